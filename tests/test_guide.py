"""The guide, recipes/README.md: every block is run with small stand-ins, or says why it is not."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path

import yaml

from tokendrift_hf.cli import main
from tokendrift_hf.cli.command import build_parser
from tokendrift_hf.cli.plan import plan_trainings
from tokendrift_hf.cli.recipe import Recipe, read_recipe
from tokendrift_hf.evaluation.sampling import Sampling
from tokendrift_hf.training.drift_config import DriftConfig

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
GUIDE = (RECIPES / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"(<!-- not run here: [^>]+ -->\n)?```(\w+)\n(.*?)```", GUIDE, flags=re.DOTALL)
SMALL = (
    "--max_steps 2 --per_device_train_batch_size 2 --num_steps 2 --num_seeds 1 --num_samples 2 --use_cpu true "
    "--bf16 false --disable_tqdm true --train_split train --validation_split train --reference_split train"
)
MORE = {
    "train": SMALL,
    "evaluate": "--num-samples 2 --sampling-batch-size 4 --num-seeds 1 --text-split train",
    "generate": "",
    "demo": "",
}


def test_every_block_runs_in_the_readers_order(text_files, tmp_path, capsys):
    stand_ins = {
        "recipes/quickstart/base": str(text_files / "base"),
        "recipes/quickstart/judge": str(text_files / "judge"),
        "out/": f"{tmp_path}/out/",
        "recipes/": f"{RECIPES}/",
    }
    train = f"--model {text_files / 'base'} --judge {text_files / 'judge'} --dataset {text_files / 'corpus.jsonl'}"
    given = {"train": train, "evaluate": f"--text {text_files / 'corpus.jsonl'}", "generate": "", "demo": ""}
    ran = []
    for marker, language, block in BLOCKS:
        if marker:
            continue
        for found, stand_in in stand_ins.items():
            block = block.replace(found, stand_in)
        if language == "python":
            exec(compile(block, "recipes/README.md", "exec"), {})
            continue
        if language == "yaml":
            (tmp_path / "shown.yaml").write_text(f"model: base\nuse_cpu: true\nsave_steps: 250\n{block}")
            assert plan_trainings(*read_recipe(tmp_path / "shown.yaml", {}), tmp_path / "shown")
            continue
        for command in block.replace("\\\n", " ").splitlines():
            program, task, *words = shlex.split(command)
            assert program == "tokendrift", command
            words += shlex.split(MORE[task]) + shlex.split(given[task])
            assert main([task, *words]) == 0, capsys.readouterr().err
            ran.append(task)
    output = capsys.readouterr().out
    assert set(ran) == {"train", "generate", "evaluate", "demo"}
    assert "A push would upload" in output and not (tmp_path / "out/rehearsal").exists()
    assert "TokenDrift (LoRA)" in output
    assert "bytes  app.py" in output and not (tmp_path / "out/space").exists()
    assert (tmp_path / "out/merged/config.json").is_file() and (tmp_path / "out/comparison/table.md").is_file()


def test_blocks_that_are_not_run_name_what_is_there():
    """Recipes, configurations and files in them exist, and their YAML is sound."""
    skipped = [block for marker, _, block in BLOCKS if marker]
    assert len(skipped) == 8
    for path in set(re.findall(r"recipes/[\w/]+\.yaml", GUIDE)):
        assert yaml.safe_load((RECIPES.parent / path).read_text())


def test_every_recipe_and_field_of_the_guide_exists():
    listed = set(re.findall(r"`(\w+\.yaml)`", GUIDE.split("## 1.")[0]))
    assert listed == {path.name for path in RECIPES.glob("*.yaml")}
    known = {f.metadata.get("option", f.name) for cls in (Recipe, Sampling, DriftConfig) for f in fields(cls)}
    tasks = next(action for action in build_parser()._actions if action.dest == "task").choices.values()
    known |= {word.lstrip("-") for task in tasks for action in task._actions for word in action.option_strings}
    flags = {name for name in re.findall(r"--([a-z]+_\w+)", GUIDE)} - {"main_process_ip", "main_process_port"}
    launcher = {"config_file", "num_processes", "num_machines", "machine_rank"}
    assert flags - launcher <= known, flags - launcher - known
