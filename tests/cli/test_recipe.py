"""Recipes: every one in the repository parses, and a wrong field never passes silently."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from tokendrift_hf.cli.recipe import Recipe, read_recipe
from tokendrift_hf.cli.train import field_flags
from tokendrift_hf.evaluation.sampling import Sampling, option
from tokendrift_hf.training.drift_config import DriftConfig

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_parse_and_make_a_config(path, tmp_path):
    recipe, arguments = read_recipe(path, {"output_dir": str(tmp_path), "use_cpu": "true", "bf16": "true"})
    assert recipe.model
    assert DriftConfig(**arguments | {"report_to": "none"}).max_steps > 0


def _write(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: x\nlearning_rte: 1", "no field 'learning_rte'. Did you mean learning_rate"),
        ("model: x\nmax_steps: many", "max_steps must be int, but it is 'many'"),
        ("model: x\nlearning_rate: [1]", "learning_rate must be float"),
        ("model: x\nbf16: 1", "bf16 must be bool | auto, but it is 1"),
        ("model: x\nbf16: automatic", "bf16 must be bool"),
        ("model: x\nnum_steps: 4", "num_steps must be list"),
        ("model: x\nnum_steps: [4, 0]", "num_steps=.*at least 1"),
        ("model: x\nsampling_temperatures: [1, -1]", "sampling_temperatures=.*at least 0"),
        ("model: x\nsampling_temperatures: []", "sampling_temperatures=.*one or more"),
        ("model: x\njudge: x\nsampling_temperatures: [0, 0.9]", r"Add 1 to them, or set match_entropy: \[\]"),
        ("model: x\nrevision: 1234567", "revision must be str | null, but it is 1234567"),
        ("model: x\nnum_samples: 0", "num_samples=0: it must be a whole number of at least 1"),
        ("model: x\nblock_size: 1", "block_size=1"),
        ("max_steps: 3", "the field model is missing"),
        ("- a\n- b", "must hold fields"),
        ("model: [", "not valid YAML"),
    ],
)
def test_wrong_recipes_are_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read_recipe(_write(tmp_path, text), {})


def test_missing_recipe_is_named(tmp_path):
    with pytest.raises(ValueError, match="no recipe .*nowhere.yaml"):
        read_recipe(tmp_path / "nowhere.yaml", {})
    with pytest.raises(ValueError, match="no recipe .*Give a YAML file"):
        read_recipe(tmp_path, {})
    (tmp_path / "plot.png").write_bytes(b"\x89PNG")
    with pytest.raises(ValueError, match="plot.png is not valid YAML"):
        read_recipe(tmp_path / "plot.png", {})


def test_numbers_in_scientific_notation_are_numbers(tmp_path):
    """YAML 1.1 reads 5e-5 as text; a recipe means the number."""
    _, arguments = read_recipe(_write(tmp_path, "model: x\nlearning_rate: 5e-5\ntemperatures: [2e-2, 0.5]"), {})
    assert arguments == {"learning_rate": 5e-5, "temperatures": [0.02, 0.5]}


def test_flags_override_the_file(tmp_path):
    path = _write(tmp_path, "model: x\nmax_steps: 3\nnum_steps: [4]")
    recipe, arguments = read_recipe(path, field_flags(["--max_steps", "5", "--num-steps", "8", "16", "--bf16=true"]))
    assert arguments == {"max_steps": 5, "bf16": True}
    assert recipe.sampling.num_steps == [8, 16]
    recipe, arguments = read_recipe(path, field_flags(["--num-steps", "8", "--save_strategy", "no"]))
    assert recipe.sampling.num_steps == [8] and arguments["save_strategy"] == "no"


def test_text_that_looks_like_a_number_stays_text_where_text_is_wanted(tmp_path):
    path = _write(tmp_path, "model: x\nrevision: '12e4567'\nsampling_temperatures: [0, 1]")
    recipe, _ = read_recipe(path, {})
    assert recipe.revision == "12e4567" and recipe.sampling.temperatures == [0, 1]
    recipe, arguments = read_recipe(path, field_flags(["--revision", "1234567", "--run_name", "2026-11-28"]))
    assert recipe.revision == "1234567" and arguments["run_name"] == "2026-11-28"
    assert read_recipe(path, field_flags(["--revision", "null"]))[0].revision is None
    with pytest.raises(ValueError, match="output_dir must be .*'out', 'extra'"):
        read_recipe(path, field_flags(["--output_dir", "out", "extra"]))


@pytest.mark.parametrize(("words", "message"), [(["--max_steps"], "needs a value"), (["5"], "unexpected argument")])
def test_flags_without_name_or_value_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        field_flags(words)


def test_paths_are_relative_to_the_recipe(tmp_path):
    (tmp_path / "base").mkdir()
    recipe, _ = read_recipe(_write(tmp_path, "model: base\njudge: gpt2-large"), {})
    assert recipe.model == str(tmp_path / "base")
    assert recipe.judge == "gpt2-large"


def test_help_lists_every_field_without_a_heavy_import():
    """All fields of Recipe and those that DriftConfig adds or changes, each with its meaning."""
    code = (
        "import sys; sys.argv = ['tokendrift']; from tokendrift_hf.cli import main\n"
        "try: main(['train', '--help'])\nfinally: assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    listed = dict(re.findall(r"^  (\w+): .*\n {6}(.+)", run.stdout, flags=re.MULTILINE))
    own = {f.name: f for f in fields(Recipe) if f.name != "sampling"} | {option(f): f for f in fields(Sampling)}
    assert set(listed) == own.keys() | DriftConfig.__annotations__.keys()
    for name, f in own.items():
        assert f.metadata["help"].startswith(listed[name]), name
    assert "num_steps: list[int] = [4, 8, 16]" in run.stdout and "ema_decay: float | null = null" in run.stdout


def test_a_flag_wins_over_what_the_recipe_says_of_one_training(tmp_path):
    path = _write(tmp_path, "model: x\ntrainings: {a: {max_steps: 240, learning_rate: 1e-4}, b: {}}")
    recipe, arguments = read_recipe(path, {"max_steps": "2"})
    assert arguments["max_steps"] == 2 and recipe.trainings == {"a": {"learning_rate": 1e-4}, "b": {}}


def test_paths_of_a_recipe_lie_beside_it_and_those_of_flags_where_the_user_is(tmp_path, monkeypatch):
    """Names that are no paths stay what they are, whatever lies there under the same name."""
    folder, here = tmp_path / "recipes", tmp_path / "here"
    for place in (folder, here):
        place.mkdir()
        (place / "mine.txt").write_text(place.name)
    (folder / "documentation").mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(here))
    path = folder / "recipe.yaml"
    path.write_text("model: x\ndataset: mine.txt\n")
    assert read_recipe(path, {})[0].dataset == str(folder / "mine.txt")
    assert Path(read_recipe(path, {"dataset": "mine.txt"})[0].dataset).read_text() == "here"
    assert read_recipe(path, {"dataset": "documentation"})[0].dataset == "documentation"
    (here / "documentation").mkdir()
    assert read_recipe(path, {"dataset": "documentation"})[0].dataset == "documentation"
    assert read_recipe(path, {"dataset": "./documentation"})[0].dataset == "./documentation"
    assert read_recipe(path, {"dataset": "~/mine.txt"})[0].dataset == str(here / "mine.txt")
