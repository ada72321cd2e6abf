"""The command line, end to end on tiny models and a short corpus of real text."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from evaluate import load as load_metric
from processes import run_forks, two_ranks
from toys import word_tokenizer
from transformers import AutoConfig, AutoTokenizer

from tokendrift_hf import DriftTrainer
from tokendrift_hf.cli import main
from tokendrift_hf.data import load_text, pack_documents
from tokendrift_hf.data.packing import spread_rows
from tokendrift_hf.models.loading import load_model, load_tokenizer

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
trainings: {TokenDrift: {}, continuation: {objective: none, base_loss_weight: 1}}
match_entropy: [all]
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
    heavy = "import sys\ntry:\n    exec(sys.argv[1])\nfinally:\n    assert not {'torch', 'gradio'} & set(sys.modules)"
    start = time.perf_counter()
    run = subprocess.run([sys.executable, "-c", heavy, code], capture_output=True, text=True, check=True)
    assert time.perf_counter() - start < 10  # generous: what keeps it short is that nothing heavy is imported
    assert all(command in run.stdout for command in ("train", "generate", "evaluate", "convert", "demo"))


def test_train_writes_models_table_plot_and_results(recipe, tmp_path, capsys):
    """The main job: refine, continue, sample all, score all; then refuse to overwrite; then resume at no cost."""
    out = tmp_path / "run"
    assert main(["train", recipe, "--output_dir", str(out)]) == 0
    results = json.loads((out / "results.json").read_text())
    labels = {(row["model"], row["num_steps"]) for row in results["rows"]}
    matched = [f"base at equal entropy ({label})" for label in ("TokenDrift", "continuation")]
    assert labels == {(name, steps) for name in ("base", "TokenDrift", "continuation", *matched) for steps in (1, 2)}
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


@pytest.fixture
def ctrl_c():
    """SIGINT raises KeyboardInterrupt. What a shell starts in the background, tests as well, ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_says_how_to_go_on(step, recipe, tmp_path, capsys, monkeypatch):
    """As a stop signal does: from the last save if there is one."""
    compute_loss = DriftTrainer.compute_loss

    def interrupted(trainer, *args, **kwargs):
        if trainer.state.global_step == step:
            os.kill(os.getpid(), signal.SIGINT)
        return compute_loss(trainer, *args, **kwargs)

    call = ["train", recipe, "--output_dir", str(tmp_path / "run"), "--judge", "null", "--validation_split", "null"]
    with monkeypatch.context() as patch:
        patch.setattr(DriftTrainer, "compute_loss", interrupted)
        assert main(call) == 130
        last = capsys.readouterr().err.splitlines()[-1]
        nothing = "Nothing was saved. The same command with --resume begins anew."
        goes_on = nothing if step == 0 else "The same command with --resume goes on from the last save."
        assert last == f"tokendrift train: Interrupted. {goes_on}"
        if step == 0:
            assert main([*call[:3], str(tmp_path / "rehearsal"), "--dry-run"]) == 130
            last = capsys.readouterr().err.splitlines()[-1]
            assert last == "tokendrift train: Interrupted. Nothing was saved. Begin it anew."
            assert not (tmp_path / "rehearsal").exists()
    assert main([*call, "--resume"]) == 0
    resumed = (tmp_path / "run/refined/model.safetensors").read_bytes()
    assert main([*call[:3], str(tmp_path / "whole"), *call[4:]]) == 0
    assert resumed == (tmp_path / "whole/refined/model.safetensors").read_bytes()


def test_generate_writes_samples_with_their_settings(text_files, tmp_path, capsys):
    path = tmp_path / "samples.jsonl"
    call = ["generate", str(text_files / "base"), "--num-samples", "2", "--num-steps", "2", "--output", str(path)]
    assert main(call) == 0
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(samples) == 2 and samples[0]["text"] != samples[1]["text"]
    assert samples[0]["seed"] == 0 and samples[0]["num_steps"] == 2 and samples[0]["num_forward_calls"] >= 2
    assert main(call) == 2
    assert "exists, and nothing is overwritten" in capsys.readouterr().err


def test_generate_continues_a_prompt_and_can_be_watched(text_files, capsys, monkeypatch):
    """In a terminal each step is drawn over the one before; elsewhere, and in the end, the text stands there once."""
    prompt = "Return the"
    call = ["generate", str(text_files / "base"), "--prompt", prompt, "--num-steps", "2"]
    assert main(call) == 0
    plain = capsys.readouterr().out
    assert plain.startswith(prompt)
    model, tokenizer = (load(text_files / "base") for load in (load_model, load_tokenizer))
    ids = [tokenizer.bos_token_id, *tokenizer(prompt)["input_ids"]]
    row = model.generate(torch.tensor([ids]), num_steps=2, max_length=16, seed=0)[0]
    assert plain == tokenizer.decode(row[1:]) + "\n", "the prompt follows bos, as in training"
    assert main([*call, "--watch"]) == 0
    assert capsys.readouterr().out == plain
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main([*call, "--watch"]) == 0
    frames = capsys.readouterr().out.split("\x1b[2J\x1b[H")
    assert [frame[:8] for frame in frames[1:-1]] == ["step 0, ", "step 1, ", "step 2, "][: len(frames) - 2]
    assert len(frames) >= 4 and "░" in frames[1] and prompt in frames[1]
    assert frames[-1] == plain


def test_a_prompt_begins_as_training_rows_do_without_a_bos(text_files, tmp_path, capsys):
    """A tokenizer without bos: eos stands in for it in the rows of training, and here too."""
    model, tokenizer = (load(text_files / "base") for load in (load_model, load_tokenizer))
    tokenizer.bos_token, eos = None, tokenizer.eos_token_id
    tokenizer.save_pretrained(tmp_path / "no_bos")
    prompt = "Return the"
    call = ["generate", str(text_files / "base"), "--tokenizer", str(tmp_path / "no_bos"), "--num-steps", "2"]
    assert main([*call, "--prompt", prompt]) == 0
    ids = torch.tensor([[eos, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]])
    row = model.generate(ids, num_steps=2, max_length=16, seed=0)[0]
    assert capsys.readouterr().out == tokenizer.decode(row[1:]) + "\n"


def test_ids_that_the_tokenizer_lacks_are_never_sampled(text_files, tmp_path):
    """A model can have more ids than its tokenizer. Here it has thousands, and the tokenizer 22."""
    words, path = word_tokenizer(bos_token="<s>", eos_token="</s>"), tmp_path / "samples.jsonl"
    words.save_pretrained(tmp_path / "words")
    call = ["generate", str(text_files / "base"), "--tokenizer", str(tmp_path / "words"), "--num-samples", "3"]
    assert main([*call, "--num-steps", "2", "--output", str(path)]) == 0
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    assert [sample["num_left_out"] for sample in samples] == [0, 0, 0]
    unknown = list(range(len(words), load_model(str(text_files / "base")).config.vocab_size))
    assert samples[0]["suppress_tokens"] == unknown
    rows = load_model(str(text_files / "base")).generate(num_samples=3, num_steps=2, seed=0, suppress_tokens=unknown)
    assert [sample["text"] for sample in samples] == words.batch_decode(rows)


def test_generate_continues_several_prompts(text_files, tmp_path):
    """Each as often as asked for, in the order given, and with what it would get in that row of a batch."""
    prompts = ["Return the", "of an object and its size", "Return the"]
    path = tmp_path / "samples.jsonl"
    call = ["generate", str(text_files / "base"), *(word for text in prompts for word in ("--prompt", text))]
    assert main([*call, "--num-samples", "2", "--num-steps", "2", "--output", str(path)]) == 0
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    assert [sample["prompt"] for sample in samples] == [text for text in prompts for _ in range(2)]
    assert all(sample["text"].startswith(sample["prompt"]) for sample in samples)
    assert len({sample["text"] for sample in samples}) == 6, "each row has random numbers of its own"


def test_generate_writes_text_longer_than_the_model(text_files, tmp_path, capsys):
    path = tmp_path / "long.jsonl"
    call = ["generate", str(text_files / "base"), "--max-new-tokens", "30", "--num-steps", "1", "--temperature", "0"]
    assert main(call) == 2
    assert "30 tokens long, but this model takes at most 16. Ask for less, or give a stride" in capsys.readouterr().err
    assert main([*call, "--stride", "8", "--output", str(path)]) == 0
    sample = json.loads(path.read_text())
    assert (sample["stride"], sample["temperature"], sample["sampler"]) == (8, 0, "ancestral")
    assert sample["num_forward_calls"] == 3  # windows that end at 16, 24 and 30


@pytest.mark.parametrize(
    "words, message",
    [
        (["base", "--seed", "-1"], "seed=-1. It must be a whole number from 0"),
        (["base", "--temperature", "-1"], "It must be 0, which is greedy"),
        (["base", "--watch", "--num-samples", "2"], "--watch shows one text"),
        (["no_config"], "There is no config.json in .*no_config"),
        (["nowhere"], "There is no model .*nowhere"),
        (["judge"], "Give mask_token_id"),
    ],
)
def test_generate_says_what_is_wrong(text_files, capsys, words, message):
    (text_files / "no_config").mkdir(exist_ok=True)
    assert main(["generate", str(text_files / words[0]), *words[1:]]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_generate_takes_the_settings_of_the_model(text_files, tmp_path, capsys):
    for file in (text_files / "base").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "generation_config.json").read_text()) | {"num_steps": 3, "sampler": "entropy"}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    assert main(["generate", str(tmp_path), "--output", str(tmp_path / "x.jsonl")]) == 0
    sample = json.loads((tmp_path / "x.jsonl").read_text())
    assert (sample["num_steps"], sample["sampler"], sample["num_forward_calls"]) == (3, "entropy", 3)


def evaluate_call(text_files, *more: str) -> list[str]:
    """Two steps and two seeds of one model under two names, against real text."""
    base, judge = str(text_files / "base"), str(text_files / "judge")
    call = ["evaluate", f"a={base}", f"b={base}", "--judge", judge, "--num-steps", "2", "4", "--num-seeds", "2"]
    call += ["--text", str(text_files / "corpus.jsonl"), "--text-split", "train", "--num-samples", "8"]
    return [*call, *more]


def test_evaluate_compares_models(text_files, tmp_path, capsys):
    """Every option at once: two temperatures, MAUVE, the matched line, two draws for the NELBO."""
    more = ["--sampling-temperatures", "0.2", "1", "--mauve", "--match_entropy", "b", "--n-mc", "2"]
    assert main(evaluate_call(text_files, *more, "--output-dir", str(tmp_path))) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    rows = [row for row in results["rows"] if row["num_steps"] == 4]
    labels = [("a", 0.2), ("a", 1), ("b", 0.2), ("b", 1)]
    assert [(row["model"], row["temperature"]) for row in rows[:4]] == labels
    assert [row["model"] for row in rows[4:]] == ["a at equal entropy (b)"]
    assert rows[1]["gen_ppl"] == rows[3]["gen_ppl"], "the same model under two names is the same model"
    assert all(0 <= row["mauve"] <= 1 and row["num_seeds"] == 2 for row in rows)
    assert results["nelbo"]["a"] == results["nelbo"]["b"] and results["nelbo"]["a"]["nelbo_ppl"] > 1
    table = (tmp_path / "table.md").read_text()
    assert table in capsys.readouterr().out
    for found in ("| real text |", "| a (T = 0.2) |", "at the entropy of real text |", "MAUVE", "(standard error)"):
        assert found in table
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    tokenizer = AutoTokenizer.from_pretrained(text_files / "base")
    length = AutoConfig.from_pretrained(text_files / "base").max_position_embeddings
    text = pack_documents(load_text(str(text_files / "corpus.jsonl"), split="train"), tokenizer, length)
    metric, judge = load_metric("gen_ppl"), str(text_files / "judge")
    spread, first = (
        metric.compute(predictions=ids, model_id=judge)["gen_ppl"]
        for ids in (spread_rows(text, 8), text[:8]["input_ids"])
    )
    assert results["real_text"]["gen_ppl"] == pytest.approx(spread, rel=1e-4)
    assert first != pytest.approx(spread, rel=1e-3), "the rows of the line come from the whole text"


def _without_times(value):
    """Everything but the wall-clock times, which no two runs share."""
    if isinstance(value, dict):
        return {k: _without_times(v) for k, v in value.items() if k not in ("seconds", "tokens_per_second")}
    return [_without_times(x) for x in value] if isinstance(value, list) else value


def test_two_processes_evaluate_like_one(text_files, tmp_path):
    """Under accelerate's variables the cells are shared out: the same records, the same table, each cell drawn once.

    The first process finds one cell done, as after a kill, and leaves it alone.
    """
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(evaluate_call(text_files, "--output-dir", str(one))) == 0
    (done, *others) = sorted((one / "cells").iterdir())
    assert len(others) == 7
    (two / "cells").mkdir(parents=True)
    (two / "cells" / done.name).write_bytes(done.read_bytes())
    before = (two / "cells" / done.name).stat().st_mtime_ns

    call = evaluate_call(text_files, "--output-dir", str(two))
    statuses, outputs = run_forks(lambda: main(call), tmp_path / "logs", *two_ranks())
    assert statuses == [0, 0], outputs
    assert (two / "cells" / done.name).stat().st_mtime_ns == before
    assert "| 4/4 [" in outputs[0], "half of the cells"
    for name in (*(f"cells/{path.name}" for path in (done, *others)), "results.json"):
        same = [_without_times(json.loads((folder / name).read_text())) for folder in (one, two)]
        assert same[0] == same[1], name
    (table, took), (table_of_two, _) = ((f / "table.md").read_text().split("\n\n", 1) for f in (one, two))
    assert table == table_of_two
    assert "tokens/s" in took
    assert len(list((two / "cells").iterdir())) == 8
    assert "| real text |" in outputs[0] and "| real text |" not in outputs[1], "the first process alone prints"


def test_evaluate_never_writes_over_other_results(text_files, tmp_path, capsys):
    """Neither a training's nor those of other models; its own it extends."""
    base, judge = str(text_files / "base"), str(text_files / "judge")
    call = ["evaluate", f"a={base}", "--judge", judge, "--num-samples", "2", "--num-seeds", "1", "--num-steps"]
    out = ["--output-dir", str(tmp_path / "out")]
    assert main([*call, "1", *out]) == 0 and main([*call, "1", "2", *out]) == 0
    results = (tmp_path / "out" / "results.json").read_bytes()
    assert {row["num_steps"] for row in json.loads(results)["rows"]} == {1, 2}
    assert main([*call, "1", *out, "--judge", base]) == 2
    assert "other models, and nothing is overwritten" in capsys.readouterr().err
    assert (tmp_path / "out" / "results.json").read_bytes() == results

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "results.json").write_text('{"recipe": {}, "rows": []}')
    assert main([*call, "1", "--output-dir", str(tmp_path / "run")]) == 2
    assert "the results of a training, and nothing is overwritten" in capsys.readouterr().err
    assert main([*call, "1", "--output-dir", base]) == 2
    assert "holds something else than an evaluation" in capsys.readouterr().err
    assert not (text_files / "base" / "cells").exists()


def test_a_wrong_flag_shows_the_usage_of_its_command(capsys):
    with pytest.raises(SystemExit):
        main(["convert", "a", "b", "--emma"])
    error = capsys.readouterr().err
    assert "usage: tokendrift convert" in error and "--no-ema" in error and "--emma" in error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--num-seeds", "0"], "num_seeds=0: it must be a whole number of at least 1"),
        (["--sampling-temperatures", "-1"], r"sampling_temperatures=\[-1.0\]: give one or more finite numbers"),
        (["--match-entropy", "c"], r"match_entropy=\['c'\]: 'c' is none of \['b'\]"),
        (["--match-entropy", "b", "--sampling-temperatures", "0.9"], "Add 1 to them"),
        (["--judge", "nowhere"], "The judge 'nowhere' cannot be loaded"),
        (["--text", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_evaluate_refuses_before_it_samples(text_files, tmp_path, capsys, change, message):
    assert main(evaluate_call(text_files, "--output-dir", str(tmp_path / "out"), *change)) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert not (tmp_path / "out").exists()


def test_evaluate_needs_text_for_mauve_and_one_label_a_model(text_files, capsys):
    base = str(text_files / "base")
    assert main(["evaluate", base, "--mauve"]) == 2 and "Name it with --text" in capsys.readouterr().err
    assert main(["evaluate", base, base]) == 2 and "LABEL=MODEL" in capsys.readouterr().err


def test_without_the_extra_evaluate_says_what_to_install(text_files, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "evaluate", None)  # as if it were not installed
    for name in ("tokendrift_hf.metrics.gen_ppl", "tokendrift_hf.metrics.gen_ppl.gen_ppl"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert main(evaluate_call(text_files)) == 2
    assert 'Gen.-PPL needs evaluate: pip install "tokendrift-hf[eval]".' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--judge": "{folder}/empty"}, "knows special tokens only"),
        ({"--model": "nowhere"}, "There is no model 'nowhere'"),
        ({"--dataset": "{folder}/empty.jsonl"}, "empty.jsonl holds no document"),
        ({"--block_size": "999"}, "block_size=999 is longer than the model"),
        ({"--queue_size": "-1"}, "queue_size=-1"),
        ({"--encoder": "nowhere"}, "The encoder 'nowhere' cannot be loaded"),
        ({"--report_to": "nobody"}, "report_to='nobody' is not known"),
        ({"--objective": "magic"}, "objective='magic' is not known"),
    ],
)
def test_bad_input_is_one_clear_line_and_nothing_is_written(recipe, text_files, tmp_path, capsys, change, message):
    (text_files / "empty.jsonl").write_text("")
    (text_files / "empty").mkdir(exist_ok=True)
    (text_files / "empty" / "config.json").write_text((text_files / "judge" / "config.json").read_text())
    (text_files / "empty" / "model.safetensors").write_bytes((text_files / "judge" / "model.safetensors").read_bytes())
    words = [word.replace("{folder}", str(text_files)) for pair in change.items() for word in pair]
    assert main(["train", recipe, "--output_dir", str(tmp_path / "run"), *words]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
