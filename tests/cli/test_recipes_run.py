"""Every recipe, run for two steps with small stand-ins for its model, text and judge; and the settings they promise."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from processes import run_forks, two_ranks
from stand_ins import write_tasks

from tokendrift_hf.cli import main
from tokendrift_hf.cli.plan import labels_to_match, plan_trainings
from tokendrift_hf.cli.recipe import Recipe, read_recipe
from tokendrift_hf.cli.train import field_flags
from tokendrift_hf.training.drift_config import DriftConfig

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
PAPER = json.loads((RECIPES / "results" / "paper.json").read_text())
# Two steps of two rows, two samples a cell; everything else is what the recipe says.
SMALL = (
    "--max_steps 2 --per_device_train_batch_size 2 --per_device_eval_batch_size 4 --num_steps 2 --num_seeds 1 "
    "--num_samples 2 --save_strategy no --use_cpu true --bf16 false --dataloader_num_workers 0 --disable_tqdm true "
    "--block_size 16 --save_steps 500"
).split()


@pytest.fixture(scope="module")
def stand_ins(text_files) -> list[str]:
    """Flags that put small things in the place of the recipe's."""
    columns = {"prompt": "completion", "question": "answer"}  # as the recipes name them
    pairs = [
        {
            name: text
            for pair in columns.items()
            for name, text in zip(pair, (f"Return the {word}", "of an object"), strict=True)
        }
        for word in "name size type kind".split()
    ]
    (text_files / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    base = str(text_files / "base")
    return ["--model", base, "--tokenizer", base, "--revision", "null"]


@pytest.mark.parametrize("name", NAMES)
def test_two_steps_of_every_recipe(name, stand_ins, text_files, tmp_path, capsys):
    recipe, arguments = read_recipe(RECIPES / f"{name}.yaml", {})
    words = [*SMALL, *stand_ins, "--output_dir", str(tmp_path / "run")]
    words += ["--dataset", str(text_files / ("pairs.jsonl" if recipe.prompt_column else "corpus.jsonl"))]
    words += ["--judge", str(text_files / "judge")] if recipe.judge else []
    words += ["--global_batch_size", "4"] if recipe.global_batch_size else []
    if recipe.tasks:
        write_tasks(tmp_path)
        words += ["--tasks", "tiny_free", "--task_folder", str(tmp_path)]
    for split in ("train_split", "validation_split", "reference_split"):
        words += [f"--{split}", "train"] if getattr(recipe, split) else []
    assert main(["train", str(RECIPES / f"{name}.yaml"), *words]) == 0
    output = capsys.readouterr().out
    planned = plan_trainings(recipe, arguments | {"use_cpu": True, "bf16": False}, tmp_path / "plan")
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert list(results["training"]) == [training.label for training in planned]
    for training in planned:
        assert f"{training.label}: 2 steps" in output
        assert results["training"][training.label]["log_history"][-1]["step"] == 2
        folder = tmp_path / "run" / Path(training.config.output_dir).name
        adapters = training.recipe.lora is not None
        assert (folder / ("adapter_config.json" if adapters else "config.json")).exists()
    batch = 4 if recipe.global_batch_size else 2
    assert f"Global batch {batch} = 2 rows a device x {batch // 2} accumulated x 1 processes" in output
    peaks = [results["training"][training.label]["peak_memory_gib"] for training in planned]
    assert re.findall(r": peak memory ([\d.]+) GiB\.", output) == [f"{peak:.2f}" for peak in peaks]
    if recipe.judge:
        assert {row["model"] for row in results["rows"]} >= {"base", *results["training"]}
        matched = [row["matched_to"] for row in results["rows"] if row["matched_to"]]
        assert matched == labels_to_match(recipe, planned)


@pytest.mark.parametrize("name", ["mdlm_owt", "duo_owt"])
def test_settings_are_the_papers(name):
    """Section 4.1 and the appendix on experimental details."""
    recipe, arguments = read_recipe(RECIPES / f"{name}.yaml", {})
    config = DriftConfig(**arguments | {"use_cpu": True, "bf16": False})
    assert recipe.model == ("kuleshov-group/mdlm-owt" if name.startswith("mdlm") else "s-sahoo/duo")
    assert len(recipe.revision) == 40
    assert (recipe.dataset, recipe.block_size, recipe.global_batch_size) == ("openwebtext", 1024, 512)
    assert (config.per_device_train_batch_size, config.max_steps, config.optim) == (2, 13000, "adamw_torch")
    assert config.learning_rate == (3e-5 if name.startswith("mdlm") else 5e-5)
    assert (recipe.judge, recipe.sampling.num_steps, recipe.sampling.num_seeds) == ("gpt2-large", [4, 8, 16], 3)
    assert (config.objective, config.base_loss_weight, config.encoder_input) == ("feature", 0.0, "soft")
    assert (config.drift_kernel, config.drift_scale, config.temperatures) == ("paper", 1.0, [0.02, 0.05, 0.2])
    assert (config.queue_size, config.feature_layers, config.feature_pooling) == (1024, [-2, -1], "mean")


@pytest.mark.parametrize(
    ("number", "row"), [(n, row) for n, table in PAPER["tables"].items() for row in table["rows"] if row["recipe"]]
)
def test_every_row_of_the_papers_tables_is_one_command(number, row):
    """It parses, makes a config of as many steps as the table's, and is in the guide with the paper's figures."""
    _, arguments = read_recipe(RECIPES / row["recipe"], field_flags(shlex.split(row["flags"])))
    config = DriftConfig(**arguments | {"use_cpu": True, "bf16": False})
    assert config.max_steps == PAPER["tables"][number]["steps_trained"]
    guide = (RECIPES / "README.md").read_text()
    command = f"tokendrift train recipes/{row['recipe']} {row['flags']}".strip()
    line = next(
        line for line in guide.splitlines() if f"| `{command}` |" in line and line.startswith(f"| {row['row']} |")
    )
    for cell in row["results"].values():
        assert f"{cell['gen_ppl']:g} ± {cell['gen_ppl_sd']:g} / {cell['entropy']:.2f}" in line


@pytest.mark.parametrize(("processes", "steps"), [(1, 256), (4, 64), (8, 32), (16, 16)])
def test_accumulation_follows_from_the_number_of_processes(processes, steps, monkeypatch, tmp_path):
    monkeypatch.setattr(DriftConfig, "world_size", property(lambda self: processes))
    recipe, arguments = read_recipe(RECIPES / "mdlm_owt.yaml", {"use_cpu": "true", "bf16": "false"})
    (training,) = plan_trainings(recipe, arguments, tmp_path)
    assert training.config.gradient_accumulation_steps == steps


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_batch_size": "7"}, "global_batch_size=7 is not a multiple of 2"),
        ({"gradient_accumulation_steps": "2"}, "two ways to say one thing"),
        ({"continuation": "true"}, "Write instead: trainings: .*continuation: .objective: none"),
        ({"full_refinement": "{}"}, "Write instead: trainings: .*lora"),
        ({"trainings": "{a: {learning_rte: 1}}"}, "training 'a': there is no field 'learning_rte' of one training"),
        ({"trainings": "{a: {dataset: x}}"}, "no field 'dataset' of one training"),
        ({"trainings": "{a: {learning_rate: fast}}"}, "training 'a': learning_rate must be float"),
        ({"trainings": "{a: {output_dir: x}}"}, "output_dir is a matter of the whole run"),
        ({"trainings": "{base: {}}"}, "cannot be called 'base'"),
        ({"trainings": "{x: {}, '..': {}}"}, "cannot be called '..'"),
        ({"trainings": "{x: {}, a b: {}, a_b: {}}"}, "'a_b' would lie in a_b"),
        ({"trainings": "{x: {}, Refined: {}}"}, "'Refined' would lie in Refined"),
        ({"trainings": "{x: {}, cells: {}}"}, "'cells' would lie in cells"),
        ({"trainings": "{x: }"}, "Write 'label: .field: value.'"),
        ({"trainings": "{}"}, "trainings has no training"),
        ({"trainings": "[x]"}, "trainings must be"),
        ({"encoder": "base"}, "there is no lora"),
        ({"trainings": "{a: {gradient_accumulation_steps: 2}}"}, "two ways to say one thing"),
        ({"push_to_hub": "true"}, "push_to_hub needs the name of the repository"),
        ({"lora": "{targets: all}"}, "targets='all' is not known"),
        ({"dropout": "1.0"}, "dropout=1.0"),
        ({"task_limit": "0"}, "task_limit=0: it must be at least 1"),
        ({"task_shots": "-1"}, "task_shots=-1: it must be at least 0"),
        ({"streaming": "true"}, "streaming: true reads training text only"),
    ],
)
def test_contradictions_are_refused(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        recipe, arguments = read_recipe(RECIPES / "mdlm_owt.yaml", {"use_cpu": "true", "bf16": "false"} | change)
        plan_trainings(recipe, arguments, tmp_path)


def test_a_training_has_the_fields_of_the_recipe_but_for_its_own(tmp_path):
    """Numbers are read as numbers, paths beside the recipe are found, adapters are one training's own."""
    (tmp_path / "phi").mkdir()
    path = tmp_path / "recipe.yaml"
    path.write_text("""
model: x
learning_rate: 1e-5
push_to_hub: true
hub_model_id: me/x
use_cpu: true
global_batch_size: 16
match_entropy: [all]
trainings:
  TokenDrift: {}
  small steps: {learning_rate: 1e-6, encoder: phi, dropout: 0.5, seed: 1}
  LoRA (r 4): {lora: {r: 4}, encoder: base, global_batch_size: 8}
""")
    recipe, arguments = read_recipe(path, {})
    main, small, lora = planned = plan_trainings(recipe, arguments, tmp_path / "out")
    assert labels_to_match(recipe, planned) == ["TokenDrift", "small steps", "LoRA (r 4)"]
    assert [training.folder.name for training in planned] == ["refined", "small_steps", "LoRA_r_4"]
    assert [training.config.learning_rate for training in planned] == [1e-5, 1e-6, 1e-5]
    assert [training.config.seed for training in planned] == [42, 1, 42]
    assert [training.recipe.encoder for training in planned] == [None, str(tmp_path / "phi"), "base"]
    assert [training.recipe.dropout for training in planned] == [None, 0.5, None]
    assert [training.config.gradient_accumulation_steps for training in planned] == [2, 2, 1]
    assert [training.config.push_to_hub for training in planned] == [True, False, False], "the main one is published"
    assert main.peft_config is None
    assert small.peft_config is None
    assert lora.peft_config.r == 4


@pytest.mark.parametrize(
    ("arguments", "lora", "label"),
    [
        ({}, None, "TokenDrift"),
        ({}, {}, "TokenDrift (LoRA)"),
        ({"objective": "none", "base_loss_weight": 1.0}, None, "continuation"),
        ({"objective": "none", "base_loss_weight": 1.0}, {}, "continuation (LoRA)"),
        ({"objective": "mmd"}, None, "local MMD"),
        ({"objective": "mmd", "mmd_credit": "sequence"}, None, "MMD"),
        ({"objective": "mmd"}, {}, "local MMD (LoRA)"),
        ({"objective": "alpha"}, None, "alpha"),
        ({"objective": "mirror_kl"}, None, "mirror KL"),
        ({"objective": "mirror_mse"}, None, "mirror L2"),
    ],
)
def test_a_recipe_without_trainings_describes_one(arguments, lora, label, tmp_path):
    (training,) = plan_trainings(Recipe("x", lora=lora), arguments | {"use_cpu": True}, tmp_path)
    assert training.label == label
    assert training.folder == tmp_path / "refined"


def test_two_processes_run_one_recipe(stand_ins, text_files, tmp_path):
    """One launch, two gloo processes: half the accumulation, the same global batch, one table, written once."""
    words = [*SMALL, *stand_ins, "--output_dir", str(tmp_path / "run"), "--dataset", str(text_files / "corpus.jsonl")]
    words += ["--validation_split", "train", "--judge", str(text_files / "judge"), "--global_batch_size", "8"]
    call = ["train", str(RECIPES / "mdlm_owt.yaml"), "--ddp_backend", "gloo", *words]
    statuses, outputs = run_forks(lambda: main(call), tmp_path / "logs", *two_ranks())
    assert statuses == [0, 0], outputs
    assert "Global batch 8 = 2 rows a device x 2 accumulated x 2 processes" in outputs[0]
    assert "Global batch" not in outputs[1] and "Done in" not in outputs[1]
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert {row["model"] for row in results["rows"]} >= {"base", "TokenDrift"}
    assert "| global_batch_size | `8` |" in (tmp_path / "run/refined/README.md").read_text()
