"""Two gloo processes against one: the same training, queues, evaluation and resume, with the weights whole or split."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import distributed_worker
import pytest
import sharded_worker
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command, launch_command_parser
from conftest import tiny_model
from processes import run_forks, two_ranks
from safetensors.torch import load_file
from toys import assert_same, logged, make_trainer, queues_of, uneven_rows, weights_of
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from tokendrift_hf.training.manifest import last_complete_checkpoint

EXACT = {"rtol": 0, "atol": 0}
ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes/accelerate"


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder in which two processes left their weights and reports."""
    folder = tmp_path_factory.mktemp("two")
    run_forks(lambda: distributed_worker.main(folder), folder, *two_ranks())
    return folder


def report(folder, rank=0, name="report"):
    """What a process has found; if it did not get so far, its last words."""
    path = folder / f"{name}_{rank}.json"
    assert path.is_file(), (folder / f"log_{rank}").read_text()[-3000:]
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", distributed_worker.CASES)
def test_two_processes_train_like_one(two, name, tmp_path):
    """Three steps on batches of 4 and 3 rows: weights, losses and queues as in one process."""
    losses = report(two)[name]
    one = distributed_worker.case(name, tmp_path)
    one.train()
    found, other = (load_file(two / f"{name}_{rank}.safetensors") for rank in (0, 1))
    assert_same(found, other, rtol=0, atol=0)
    queues = queues_of(one)
    assert_same(found, weights_of(one.model) | queues, rtol=0, atol=1e-5)
    compared = distributed_worker.COMPARED.get(name, "feature_distance")
    assert losses["loss"] == pytest.approx(logged(one), rel=1e-4, abs=1e-6)
    assert losses["distance"] == pytest.approx(logged(one, compared), rel=1e-3)
    assert len(queues.get("real", [0] * 6)) == 6


@pytest.mark.parametrize("name", distributed_worker.ADAPTED)
def test_what_two_processes_save_loads_as_the_family_class(two, name):
    report(two)
    auto_class = AutoModelForMaskedLM if name == "bert" else AutoModelForCausalLM
    loaded = auto_class.from_pretrained(two / name / "final")
    assert_same_weights(loaded, load_file(two / f"{name}_0.safetensors"), name)


def assert_same_weights(loaded, weights: dict[str, torch.Tensor], model_type: str) -> None:
    """A model of transformers that holds the weights that a training ended with."""
    assert loaded.config.model_type == model_type and type(loaded).__module__.startswith("transformers.")
    assert_same(weights_of(loaded), {name: weights[name] for name in weights_of(loaded)}, **EXACT)


def test_the_uneven_batch_reaches_both_processes_without_repetition(tmp_path):
    """What the cases above rest on: seven rows give batches of 2 + 2 and 2 + 1 rows, each row once."""
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler, SequentialSampler

    batches = BatchSampler(SequentialSampler(range(7)), 4, drop_last=False)
    shards = [list(BatchSamplerShard(batches, 2, rank, split_batches=True, even_batches=False)) for rank in (0, 1)]
    assert shards == [[[0, 1], [4, 5]], [[2, 3], [6]]]


def test_two_processes_evaluate_like_one(two, tmp_path):
    """1 to 9 rows of unequal length, batches whole or split, evened out or not: every row counts once."""
    one = make_trainer(tmp_path)
    expected = {count: one.evaluate(uneven_rows(count))["eval_loss"] for count in range(1, 10)}
    for rank in (0, 1):
        cases = report(two, rank, "evaluated")
        assert len(cases) == 36
        for case in cases:
            assert case["loss"] == pytest.approx(expected[case["rows"]], rel=1e-6), case


@pytest.mark.parametrize("name", distributed_worker.RESUMED)
def test_resuming_two_processes_is_exact(two, name):
    """Stopped by a signal to one of them. Weights, averages, queues in their order, optimizer, logged values on both.

    With `gather_features=False` each has queues of its own.
    """
    for rank in (0, 1):
        assert report(two, rank)["resumed_differs"][name] == []
    stored = {path.name for path in (two / f"{name} cut/checkpoint-3").glob("drift_queues*")}
    own = {"drift_queues_0.safetensors", "drift_queues_1.safetensors"}
    assert stored == (own if name == "own queues" else {"drift_queues.safetensors"})


def test_rows_of_all_processes_are_gathered_in_order(two):
    """Three rows of one process and two of the other."""
    expected = {"counts": [3, 2], "rows": [[float(i), -float(i)] for i in range(5)], "sum": 5.0, "has_gradient": False}
    assert report(two, 0)["gather"] == expected | {"own": [0, 3]}
    assert report(two, 1)["gather"] == expected | {"own": [3, 5]}


def test_nan_on_one_process_stops_both(two):
    assert "optimizer step 1 is not finite (nan on this process)" in report(two, 1)["error"]
    assert "is not finite" in report(two, 0)["error"] and "nan on this" not in report(two, 0)["error"]


def test_the_drift_gradient_and_samples_under_fully_shard_are_the_plain_ones(two):
    """FSDP2 on two CPU processes: blocks and root sharded, its head included, the frozen encoder whole on each."""
    for rank in (0, 1):
        errors = report(two, rank, "fsdp")
        assert errors.keys() == {"feature", "feature samples", "mirror_kl", "mirror_kl samples"}
        assert max(errors.values()) < 1e-5


# ---- launched by accelerate with the files of recipes/accelerate -------------------------------------


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """name -> the folder in which two processes launched with that configuration left their weights and reports."""
    folders = {}

    def run(name):
        if name not in folders:
            folders[name] = folder = tmp_path_factory.mktemp(name)
            words = ["--config_file", str(RECIPES / f"{name}.yaml"), "--num_processes", "2", "--main_process_port", "0"]
            words += ["--mixed_precision", "no", sharded_worker.__file__, str(folder)]
            command = launch_command_parser().parse_args(words)
            command.run_path, command.start_method = True, "fork"  # of torchrun: they need not import all again
            (status,), (output,) = run_forks(lambda: launch_command(command), folder, {"DS_ACCELERATOR": "cpu"})
            assert status == 0, output[-5000:]
        return folders[name]

    return run


SPLIT = ["fsdp2"] + [
    pytest.param(name, marks=pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed"))
    for name in ("zero1", "zero2")
]


@pytest.mark.parametrize("name", SPLIT)
def test_split_training_is_that_of_one_process(launch, name, tmp_path):
    """Three AdamW steps with accumulation and clipping, evaluation with samples, saving, resume; all of the Trainer."""
    folder = launch(name)
    found = json.loads((folder / "report.json").read_text())
    assert found["kind"] == ("FSDP" if name == "fsdp2" else "DEEPSPEED")
    for case in sharded_worker.CASES:
        one = sharded_worker.case(case, tmp_path, per_device_train_batch_size=4)
        one.train()
        queues = queues_of(one)
        weights = load_file(folder / f"{case}.safetensors")
        assert_same(weights, weights_of(one.model) | queues, rtol=0, atol=1e-5)
        for key, tolerance in (("loss", 1e-4), ("grad_norm", 1e-4), ("eval_loss", 1e-5), ("eval_entropy_nfe2", 1e-6)):
            values = [entry[key] for entry in found[case] if key in entry]
            assert values and values == pytest.approx(logged(one, key), rel=tolerance)
    assert_same(load_file(folder / "feature_resumed.safetensors"), load_file(folder / "feature.safetensors"), **EXACT)
    assert "ema_decay does not work with FSDP or DeepSpeed" in found["ema"]
    assert ("one weight under two names (cls.predictions.bias, cls." in found["shared"]) == (name == "fsdp2")
    assert ("encoder='base' does not work with FSDP" in found["base"]) == (name == "fsdp2")


@pytest.mark.parametrize("name", SPLIT)
def test_what_split_training_saves_is_a_plain_model(launch, name, tmp_path):
    """The code and configuration of any save, nothing of torch's or DeepSpeed's; and the checkpoint is complete."""
    final = launch(name) / "feature/final"
    plain = tiny_model("mdlm")
    plain.save_pretrained(tmp_path)
    assert {path.name for path in final.glob("*.py")} == {path.name for path in tmp_path.glob("*.py")}
    auto_map = [json.loads((folder / "config.json").read_text())["auto_map"] for folder in (final, tmp_path)]
    assert auto_map[0] == auto_map[1]
    weights = load_file(launch(name) / "feature.safetensors")
    loaded = type(plain).from_pretrained(final)
    assert_same(weights_of(loaded), {key: weights[key] for key in weights_of(loaded)}, **EXACT)
    assert last_complete_checkpoint(launch(name) / "feature").name == "checkpoint-3"


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("family", sharded_worker.ADAPTED)
def test_what_split_training_saves_loads_as_the_family_class(launch, name, family):
    auto_class = AutoModelForMaskedLM if family == "modernbert" else AutoModelForCausalLM
    loaded = auto_class.from_pretrained(launch(name) / family / "final")
    assert_same_weights(loaded, load_file(launch(name) / f"{family}.safetensors"), family)


@pytest.mark.parametrize(
    "name, kind, settings",
    [
        ("ddp", "MULTI_GPU", {}),
        ("fsdp2", "FSDP", {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}),
        ("zero1", "DEEPSPEED", {"zero_stage": 1}),
        ("zero2", "DEEPSPEED", {"zero_stage": 2}),
    ],
)
def test_accelerate_reads_the_launch_configurations(name, kind, settings):
    """accelerate's own loader refuses unknown keys. The layers that FSDP wraps are those that the model names."""
    found = load_config_from_file(str(RECIPES / f"{name}.yaml"))
    assert found.distributed_type == kind and found.mixed_precision == "bf16" and not found.use_cpu
    plugin = found.fsdp_config if kind == "FSDP" else found.deepspeed_config
    assert settings.items() <= plugin.items()


def test_there_is_one_configuration_for_each_supported_way():
    assert {path.stem for path in RECIPES.glob("*.yaml")} == {"ddp", "fsdp2", "zero1", "zero2"}
    assert torch.distributed.is_available()
