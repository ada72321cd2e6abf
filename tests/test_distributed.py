"""Two gloo processes against one: the same training, queues, evaluation and resume; and the launch configurations."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import distributed_worker
import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from safetensors.torch import load_file
from training import assert_same, logged, make_trainer, uneven_rows, weights_of

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes/accelerate"


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder in which two processes left their weights and reports."""
    folder = tmp_path_factory.mktemp("two")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    shared = dict(os.environ, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, PYTHONPATH=path)
    logs = [open(folder / f"log_{rank}", "w") for rank in (0, 1)]
    workers = [
        subprocess.Popen(
            [sys.executable, distributed_worker.__file__, str(folder)],
            env=dict(shared, RANK=str(rank), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1"),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        for worker in workers:
            worker.wait(timeout=400)
    finally:
        for worker, log in zip(workers, logs, strict=True):
            worker.kill()
            log.close()
    return folder


def report(folder, rank=0, name="report"):
    """What a process has found; if it did not get so far, its last words."""
    path = folder / f"{name}_{rank}.json"
    assert path.is_file(), (folder / f"log_{rank}").read_text()[-3000:]
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", distributed_worker.CASES)
def test_two_processes_train_like_one(two, name, tmp_path):
    """Three steps on batches of 4, 3 and 4 rows: weights, losses and queues as in one process."""
    losses = report(two)[name]
    one = distributed_worker.case(name, tmp_path)
    one.train()
    found, other = (load_file(two / f"{name}_{rank}.safetensors") for rank in (0, 1))
    assert_same(found, other, rtol=0, atol=0)
    queues = {"real": one.real_queue.features, "generated": one.generated_queue.features}
    assert_same(found, weights_of(one.model) | queues, rtol=0, atol=1e-5)
    assert losses["loss"] == pytest.approx(logged(one), rel=1e-4)
    assert losses["distance"] == pytest.approx(logged(one, "feature_distance"), rel=1e-3)
    assert name == "continuation" or len(queues["real"]) == 6


def test_the_uneven_batch_reaches_both_processes_without_repetition(tmp_path):
    """What the cases above rest on: seven rows give batches of 2 + 2 and 2 + 1 rows, each row once."""
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler, SequentialSampler

    batches = BatchSampler(SequentialSampler(range(7)), 4, drop_last=False)
    shards = [list(BatchSamplerShard(batches, 2, rank, split_batches=True, even_batches=False)) for rank in (0, 1)]
    assert shards == [[[0, 1], [4, 5]], [[2, 3], [6]]]


def test_two_processes_evaluate_like_one(two, tmp_path):
    """Repeated rows in the last batches do not count."""
    expected = make_trainer(tmp_path, per_device_eval_batch_size=2).evaluate(uneven_rows(5))["eval_loss"]
    assert report(two, 0)["eval_loss"] == report(two, 1)["eval_loss"] == pytest.approx(expected, rel=1e-6)


def test_resuming_two_processes_is_exact(two):
    assert report(two, 0)["resumed_is_equal"] and report(two, 1)["resumed_is_equal"]


def test_nan_on_one_process_stops_both(two):
    assert "optimizer step 1 is not finite (nan on this process)" in report(two, 1)["error"]
    assert "is not finite" in report(two, 0)["error"] and "nan on this" not in report(two, 0)["error"]


def test_the_drift_gradient_under_fully_shard_is_the_plain_one(two):
    """FSDP2 on two CPU processes: blocks and root sharded, the frozen encoder whole on each."""
    for rank in (0, 1):
        errors = report(two, rank, "fsdp")
        assert errors.keys() == {"feature", "mirror_kl"} and max(errors.values()) < 1e-5


@pytest.mark.parametrize(
    "name, kind, settings",
    [
        ("ddp", "MULTI_GPU", {}),
        ("fsdp2", "FSDP", {"fsdp_version": 2, "fsdp_transformer_layer_cls_to_wrap": "DiTBlock"}),
        ("zero1", "DEEPSPEED", {"zero_stage": 1}),
        ("zero2", "DEEPSPEED", {"zero_stage": 2}),
    ],
)
def test_accelerate_reads_the_launch_configurations(name, kind, settings):
    """accelerate's own loader refuses unknown keys; the wrapped layer is one that the model names."""
    found = load_config_from_file(str(RECIPES / f"{name}.yaml"))
    assert found.distributed_type == kind and found.mixed_precision == "bf16" and not found.use_cpu
    plugin = found.fsdp_config if kind == "FSDP" else found.deepspeed_config
    assert settings.items() <= plugin.items()


def test_there_is_one_configuration_for_each_supported_way():
    assert {path.stem for path in RECIPES.glob("*.yaml")} == {"ddp", "fsdp2", "zero1", "zero2"}
    assert torch.distributed.is_available()
