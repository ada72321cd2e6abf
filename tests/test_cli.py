"""The command line, end to end on tiny models and a short corpus of real text."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time

import pytest

from tokendrift_hf.cli import main

TINY_RUN = """
model: base
judge: judge
dataset: corpus.jsonl
validation_split: train
reference_split: train
max_steps: 2
per_device_train_batch_size: 4
queue_size: 8
logging_steps: 1
save_steps: 1
continuation: true
num_steps: [1, 2]
num_seeds: 2
num_samples: 3
disable_tqdm: true
"""


@pytest.fixture
def recipe(text_files):
    path = text_files / "recipe.yaml"
    path.write_text(TINY_RUN)
    return str(path)


def test_help_answers_at_once_and_names_every_command():
    """No heavy import on the way to the help: it would take seconds."""
    code = "import sys; sys.argv = ['tokendrift']; from tokendrift_hf.cli import main; main(['--help'])"
    heavy = "import sys\ntry:\n    exec(sys.argv[1])\nfinally:\n    assert 'torch' not in sys.modules"
    start = time.perf_counter()
    run = subprocess.run([sys.executable, "-c", heavy, code], capture_output=True, text=True, check=True)
    assert time.perf_counter() - start < 10  # generous: what keeps it short is that nothing heavy is imported
    assert all(command in run.stdout for command in ("train", "generate", "evaluate", "convert"))


def test_train_writes_models_table_plot_and_results(recipe, tmp_path, capsys):
    """The main job: refine, continue, sample all, score all; then refuse to overwrite; then resume at no cost."""
    out = tmp_path / "run"
    assert main(["train", recipe, "--output_dir", str(out)]) == 0
    results = json.loads((out / "results.json").read_text())
    labels = {(row["model"], row["num_steps"]) for row in results["rows"]}
    assert labels == {
        (name, steps) for name in ("base", "continuation", "TokenDrift", "base at equal entropy") for steps in (1, 2)
    }
    assert all(row["num_seeds"] == 2 and row["gen_ppl"] > 1 for row in results["rows"])
    assert results["real_text"]["gen_ppl"] > 1
    assert results["training"]["TokenDrift"]["eval_loss"] != results["training"]["TokenDrift"]["eval_loss_before"]
    assert (out / "plot.png").is_file() and (out / "table.md").read_text() in capsys.readouterr().out
    for name in ("refined", "continuation"):
        assert (out / name / "modeling_tokendrift.py").is_file() and (out / name / "tokenizer.json").is_file()

    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main(["train", recipe, "--output_dir", str(out)]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    assert main(["train", recipe, "--output_dir", str(out), "--resume"]) == 0
    again = json.loads((out / "results.json").read_text())
    assert again["records"] == results["records"]


def test_generate_writes_samples_with_their_settings(text_files, tmp_path, capsys):
    path = tmp_path / "samples.jsonl"
    call = ["generate", str(text_files / "base"), "--num-samples", "2", "--num-steps", "2", "--output", str(path)]
    assert main(call) == 0
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(samples) == 2 and samples[0]["text"] != samples[1]["text"]
    assert samples[0]["seed"] == 0 and samples[0]["num_steps"] == 2 and samples[0]["num_forward_calls"] >= 2
    assert main(call) == 2
    assert "exists, and nothing is overwritten" in capsys.readouterr().err


def test_generate_continues_a_prompt_and_can_be_watched(text_files, capsys):
    prompt = "Return the"
    call = ["generate", str(text_files / "base"), "--prompt", prompt, "--num-steps", "2", "--watch"]
    assert main(call) == 0
    output = capsys.readouterr().out
    assert "step 0" in output and "step 1" in output
    assert output.rpartition("\n\n")[2].startswith(prompt) or prompt in output


def test_evaluate_compares_models(text_files, tmp_path):
    base, judge = str(text_files / "base"), str(text_files / "judge")
    call = ["evaluate", f"a={base}", f"b={base}", "--judge", judge, "--num-steps", "2", "--seeds", "2"]
    call += ["--text", str(text_files / "corpus.jsonl"), "--text-split", "train", "--num-samples", "3"]
    assert main([*call, "--output-dir", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    rows = results["rows"]
    assert [row["model"] for row in rows] == ["a", "b"]
    assert results["nelbo"]["a"] == results["nelbo"]["b"] and results["nelbo"]["a"]["nelbo_ppl"] > 1
    assert "real text" in (tmp_path / "table.md").read_text() and r"\toprule" in (tmp_path / "table.tex").read_text()
    assert rows[0]["gen_ppl"] == rows[1]["gen_ppl"], "the same model under two names is the same model"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--judge": "empty"}, "no tokenizer in"),
        ({"--model": "nowhere"}, "There is no model 'nowhere'"),
        ({"--dataset": "empty.jsonl"}, "empty|no documents|no text"),
        ({"--block_size": "999"}, "block_size=999 is longer than the model"),
        ({"--queue_size": "-1"}, "queue_size=-1"),
        ({"--objective": "magic"}, "objective='magic' is not known"),
    ],
)
def test_bad_input_is_one_clear_line_and_nothing_is_written(recipe, text_files, tmp_path, capsys, change, message):
    (text_files / "empty.jsonl").write_text("")
    (text_files / "empty").mkdir(exist_ok=True)
    (text_files / "empty" / "config.json").write_text((text_files / "judge" / "config.json").read_text())
    (text_files / "empty" / "model.safetensors").write_bytes((text_files / "judge" / "model.safetensors").read_bytes())
    words = [word for pair in change.items() for word in pair]
    assert main(["train", recipe, "--output_dir", str(tmp_path / "run"), *words]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert not (tmp_path / "run").exists()
