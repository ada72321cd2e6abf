"""A rehearsal does two short steps, says what it measured, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from stand_ins import decoder, text_rows, tiny_tokenizer

from tokendrift_hf.cli import main
from tokendrift_hf.cli.recipe import read_recipe
from tokendrift_hf.cli.rehearsal import rehearse
from tokendrift_hf.cli.run import Run
from tokendrift_hf.training.drift_trainer import DriftTrainer
from tokendrift_hf.training.stopping import STOPPED

RECIPE = """
model: base
dataset: corpus.jsonl
max_steps: 600
per_device_train_batch_size: 2
global_batch_size: 16
queue_size: 4
ema_decay: 0.9
eval_strategy: steps
eval_steps: 1
save_steps: 1
logging_steps: 1
validation_split: train
gen_ppl_num_steps: [1]
use_cpu: true
disable_tqdm: true
"""


@pytest.fixture
def recipe(text_files):
    path = text_files / "rehearsed.yaml"
    path.write_text(RECIPE)
    return path


def test_the_time_of_a_step_is_measured_with_all_its_micro_batches(recipe, tmp_path, monkeypatch, capsys):
    """Micro-batches of 0.1 s, eight a step, of which two are done: 0.8 s a step, 8 minutes for 600."""
    plain, calls = DriftTrainer.compute_loss, []

    def slow(self, *args, **kwargs):
        calls.append(1)
        time.sleep(0.1)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(DriftTrainer, "compute_loss", slow)
    measured = rehearse(Run.open(*read_recipe(recipe, {"output_dir": str(tmp_path / "out")})))
    assert len(calls) == 4, "two steps of two micro-batches, without any evaluation"
    assert 0.8 <= measured["seconds_a_step"] < 8
    output = capsys.readouterr().out
    assert "TokenDrift: 600 steps" in output
    assert "Global batch 16 = 2 rows a device x 8 accumulated x 1 processes." in output
    assert f"Measured in two steps: {measured['seconds_a_step']:.3g} s a step" in output
    assert " for 600 steps, without evaluations" in output
    assert f"Peak memory of the process: {measured['peak_memory'] / 2**30:.2f} GiB." in output
    assert measured["peak_memory"] > 2**27


def test_a_rehearsal_that_is_stopped_promises_no_checkpoint(recipe, tmp_path, monkeypatch, capsys):
    plain = DriftTrainer.compute_loss

    def stopped(self, *args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(DriftTrainer, "compute_loss", stopped)
    assert main(["train", str(recipe), "--output_dir", str(tmp_path / "out"), "--dry-run"]) == STOPPED
    error = capsys.readouterr().err
    assert "The rehearsal was stopped. It leaves nothing." in error
    assert "--resume" not in error
    assert not (tmp_path / "out").exists()


def test_a_rehearsal_leaves_nothing(recipe, tmp_path, capsys):
    """Neither in the output directory nor beside the recipe; the files of a push are named with their sizes."""
    before = {path: path.stat().st_mtime_ns for path in recipe.parent.rglob("*")}
    assert main(["train", str(recipe), "--output_dir", str(tmp_path / "out"), "--dry-run"]) == 0
    assert list(tmp_path.iterdir()) == []
    assert {path: path.stat().st_mtime_ns for path in recipe.parent.rglob("*")} == before
    output = capsys.readouterr().out
    assert "A push would upload (hub_model_id is not set):" in output
    assert " bytes  model.safetensors" in output
    assert "checkpoint-" not in output


MEASURE = """
import json, sys
from pathlib import Path

import peft
import torch

from tokendrift_hf.cli.measure import peak_memory
from tokendrift_hf.cli.recipe import read_recipe
from tokendrift_hf.cli.rehearsal import rehearse
from tokendrift_hf.cli.run import Run, refine

cpu, recipe = torch.device("cpu"), read_recipe(Path(sys.argv[1]), {})
libraries = peak_memory(cpu)
if sys.argv[2] == "rehearse":
    peak = rehearse(Run.open(*recipe))["peak_memory"]
else:
    refine(*recipe)
    peak = peak_memory(cpu)
print(json.dumps([libraries, peak]))
"""


def test_training_takes_the_memory_that_was_announced(tmp_path):
    """To 10 %, without the libraries', in processes of their own: LoRA with the base as encoder, five steps.

    What is freed goes back to the system here. Else glibc keeps it in pieces, and the peak grows with every step: the
    rehearsal says so, and can say no more of it.
    """
    sizes = {"vocab_size": 20_000, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 64}
    decoder("qwen2", **sizes).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")  # beside the model it would be taken for Qwen2's
    texts = [" ".join(f"w{i}" for i in row["input_ids"][1:-1]) for row in text_rows(100, 64)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (tmp_path / "recipe.yaml").write_text(
        f"model: {tmp_path / 'model'}\ntokenizer: {tmp_path / 'tokenizer'}\ndataset: {tmp_path / 'corpus.jsonl'}\n"
        f"output_dir: {tmp_path / 'out'}\nblock_size: 64\nper_device_train_batch_size: 8\nmax_steps: 5\n"
        "lora: {targets: attention}\nencoder: base\nuse_cpu: true\ndisable_tqdm: true\njudge: null\n"
    )
    taken, environment = [], os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**18)}
    for task in ("rehearse", "train"):
        command = [sys.executable, "-c", MEASURE, str(tmp_path / "recipe.yaml"), task]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        libraries, peak = json.loads(done.stdout.splitlines()[-1])
        taken.append(peak - libraries)
    announced, measured = taken
    assert measured > 2**26, "so much that a part of the training would be noticed if it were missing"
    assert announced == pytest.approx(measured, rel=0.1)
