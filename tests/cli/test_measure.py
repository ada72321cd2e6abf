"""What is measured of the machine decides the number format, and says what memory was needed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import psutil
import pytest
import torch

from tokendrift_hf.cli import measure, run
from tokendrift_hf.cli.recipe import read_recipe
from tokendrift_hf.cli.run import Run

CPU = torch.device("cpu")


@pytest.mark.parametrize(("half", "single", "chosen"), [(1.0, 2.0, True), (1.0, 1.1, False), (2.0, 1.0, False)])
def test_bfloat16_is_taken_where_its_products_are_clearly_faster(half, single, chosen, monkeypatch):
    seconds = {torch.bfloat16: half, torch.float32: single}
    monkeypatch.setattr(measure, "product_seconds", lambda device, dtype: seconds[dtype])
    found, reason = measure.choose_bf16(CPU)
    assert found is chosen
    assert reason.startswith(f"bf16: auto is {str(chosen).lower()}.")
    assert f"{1e3 * half:.2f} ms in bfloat16" in reason


def test_a_larger_product_takes_longer(monkeypatch):
    """The time is that of the product: at float64 it is above that of float32, and it ends in time."""
    single, double = (measure.product_seconds(CPU, dtype, seconds=0.1) for dtype in (torch.float32, torch.float64))
    assert 0 < single < double


def test_peak_memory_of_a_device_is_what_its_backend_counts(monkeypatch):
    """Through functions that the oldest torch has as well. Those of mps are not there, and the process counts."""
    asked = []
    counting = SimpleNamespace(max_memory_allocated=lambda device: 7, reset_peak_memory_stats=asked.append)
    monkeypatch.setattr(torch, "get_device_module", lambda device: counting if device.type == "cuda" else torch.mps)
    cuda, mps = torch.device("cuda:1"), torch.device("mps")
    measure.reset_peak_memory(cuda), measure.reset_peak_memory(mps)
    assert asked == [cuda]
    assert measure.peak_memory(cuda) == 7
    assert measure.peak_memory(mps) > 2**25


def test_peak_memory_is_that_of_the_process_and_grows_with_it():
    before = measure.peak_memory(CPU)
    used = psutil.Process().memory_info().rss
    assert before >= used * 0.99
    block = bytearray(before - used + 2**26)
    block[:: 2**12] = b"x" * len(block[:: 2**12])  # every page of it
    assert measure.peak_memory(CPU) >= before + 2**25


RECIPE = """
model: base
dataset: corpus.jsonl
max_steps: 1
per_device_train_batch_size: 2
queue_size: 4
use_cpu: true
disable_tqdm: true
bf16: auto
trainings:
  TokenDrift: {}
  other: {bf16: auto, seed: 1}
  plain: {bf16: false}
"""


@pytest.fixture
def recipe(text_files):
    path = text_files / "auto.yaml"
    path.write_text(RECIPE)
    return path


@pytest.mark.parametrize("chosen", [True, False])
def test_auto_is_settled_for_every_training_before_it_is_configured(chosen, recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "choose_bf16", lambda device: (chosen, f"measured: {chosen}"))
    opened = Run.open(*read_recipe(recipe, {"output_dir": str(tmp_path / "out")}))
    assert [training.config.bf16 for training in opened.trainings] == [chosen, chosen, False]
    assert opened.arguments["bf16"] is chosen
    assert capsys.readouterr().out.count(f"measured: {chosen}") == 1, "it is said once"


def test_a_resumed_run_keeps_the_format_that_it_began_with(recipe, tmp_path, monkeypatch, capsys):
    """Whatever would be measured now: its settings are what resuming compares."""
    monkeypatch.setattr(run, "choose_bf16", lambda device: (True, ""))
    out = {"output_dir": str(tmp_path / "out"), "trainings": "{TokenDrift: {}}"}
    results = run.refine(*read_recipe(recipe, out))
    assert results["arguments"]["bf16"] is True
    assert json.loads((tmp_path / "out/refined/settings.json").read_text())["bf16"] is True
    monkeypatch.setattr(run, "choose_bf16", lambda device: (False, ""))
    again = run.refine(*read_recipe(recipe, out), resume=True)
    assert again["arguments"]["bf16"] is True
    assert "bf16: auto is true, as when the run began" in capsys.readouterr().out
