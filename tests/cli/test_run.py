"""What a run leaves to the next one: packed rows for others, and an exact continuation of what was cut off."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal

import pytest
from conftest import run_python
from safetensors.torch import load_file, save_file

from tokendrift_hf import lock
from tokendrift_hf.cli import main
from tokendrift_hf.cli.folder import read_history
from tokendrift_hf.cli.run import Run
from tokendrift_hf.training.drift_trainer import DriftTrainer

RECIPE = """
model: base
dataset: corpus.jsonl
judge: null
max_steps: 6
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
queue_size: 6
dropout: 0.1
ema_decay: 0.9
optim: adamw_torch
learning_rate: 1e-3
save_steps: 2
logging_steps: 1
use_cpu: true
disable_tqdm: true
"""


@pytest.fixture(scope="module")
def recipe(text_files) -> str:
    path = text_files / "run.yaml"
    path.write_text(RECIPE)
    return str(path)


def cut_off(monkeypatch, at: int) -> list[int]:
    """Interrupt a training in the micro-batch of this number. Returns a list that has an entry for each so far."""
    plain, calls = DriftTrainer.compute_loss, []

    def killed(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(DriftTrainer, "compute_loss", killed)
    return calls


@pytest.mark.parametrize(
    "flags",
    [["--streaming", "true"], ["--streaming", "true", "--wrap", "false"], ["--lora", "{r: 2}", "--dropout", "0"]],
    ids=["streaming", "streaming, a document a row", "adapters"],
)
def test_a_run_that_was_cut_off_is_resumed_bit_for_bit(flags, recipe, tmp_path, monkeypatch):
    """Killed in the second micro-batch of step 5, resumed at checkpoint 4: weights, card and losses of the whole run.

    Streams go through the corpus more than once here, so the position in the text is part of what is resumed.
    """
    flags += ["--encoder", "base"] if "--lora" in flags else []
    assert main(["train", recipe, *flags, "--output_dir", str(tmp_path / "whole")]) == 0
    calls = cut_off(monkeypatch, at=10)
    assert main(["train", recipe, *flags, "--output_dir", str(tmp_path / "cut")]) == 130
    assert main(["train", recipe, *flags, "--output_dir", str(tmp_path / "cut"), "--resume", "--queue_size", "7"]) == 2
    assert not (tmp_path / "cut/results.json").exists() and (tmp_path / "cut/refined/checkpoint-4").is_dir()
    assert main(["train", recipe, *flags, "--output_dir", str(tmp_path / "cut"), "--resume"]) == 0
    assert len(calls) == 10 + 4, "it went on from checkpoint 4"
    weights = "adapter_model.safetensors" if "--lora" in flags else "model.safetensors"
    for name in (weights, "README.md"):
        assert (tmp_path / "cut/refined" / name).read_bytes() == (tmp_path / "whole/refined" / name).read_bytes(), name
    losses = [
        [
            line["loss"]
            for line in json.loads((tmp_path / run / "refined/training.json").read_text())["log_history"][:-1]
        ]
        for run in ("whole", "cut")
    ]
    assert losses[0] == losses[1] and len(set(losses[0])) == 6


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    """The folder of a run that nothing cut off."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert main(["train", recipe, "--output_dir", str(folder)]) == 0
    return folder


def assert_same_model(one, other):
    assert (one / "refined/model.safetensors").read_bytes() == (other / "refined/model.safetensors").read_bytes()


def test_a_signal_has_a_status_of_its_own_and_never_counts_as_finished(recipe, whole, tmp_path, monkeypatch, capsys):
    """SIGTERM in step 3, saved after it. Resumed twice: once on, once with nothing to do."""
    call = ["train", recipe, "--output_dir", str(tmp_path / "cut"), "--resume"]  # also on an empty folder
    plain, calls = DriftTrainer.compute_loss, []

    def signalled(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(DriftTrainer, "compute_loss", signalled)
    assert main(call) == 75
    assert "Stopped by SIGTERM after step 3 of 6" in capsys.readouterr().err
    assert (tmp_path / "cut/refined/checkpoint-3").is_dir()
    assert not (tmp_path / "cut/refined/training.json").exists()
    assert not (tmp_path / "cut/results.json").exists()
    assert main(call) == 0
    assert len(calls) == 12
    assert_same_model(tmp_path / "cut", whole)
    assert main(call) == 0
    assert len(calls) == 12


def test_a_signal_outside_training_stops_as_well(recipe, tmp_path, monkeypatch):
    def signalled(self, *args, **kwargs):
        os.kill(os.getpid(), signal.SIGUSR1)

    monkeypatch.setattr(DriftTrainer, "save_model", signalled)
    assert main(["train", recipe, "--output_dir", str(tmp_path), "--max_steps", "1", "--save_strategy", "no"]) == 75
    assert not (tmp_path / "refined/training.json").exists()


def test_a_run_that_was_killed_in_its_first_save_begins_anew(recipe, whole, tmp_path):
    shutil.copytree(whole / "refined/checkpoint-2", tmp_path / "refined/checkpoint-2")
    shutil.copy(whole / "refined/settings.json", tmp_path / "refined")
    for name in ("drift_state.json", "trainer_state.json", "optimizer.pt"):
        (tmp_path / "refined/checkpoint-2" / name).unlink()
    assert main(["train", recipe, "--output_dir", str(tmp_path), "--resume"]) == 0
    assert_same_model(tmp_path, whole)
    assert (tmp_path / "refined/_incomplete-checkpoint-2").is_dir()


def test_a_run_that_was_killed_after_its_last_step_trains_no_further_one(recipe, whole, tmp_path, monkeypatch):
    shutil.copytree(whole, tmp_path / "cut")
    for name in ("training.json", "model.safetensors"):
        (tmp_path / "cut/refined" / name).unlink()
    (tmp_path / "cut/results.json").unlink()
    monkeypatch.setattr(DriftTrainer, "compute_loss", None)  # never called
    assert main(["train", recipe, "--output_dir", str(tmp_path / "cut"), "--resume"]) == 0
    assert_same_model(tmp_path / "cut", whole)


def test_a_folder_of_something_else_is_not_resumed_into(recipe, tmp_path, capsys):
    """Neither another program's, though it also has a settings.json, nor one in which another run is at work."""
    (tmp_path / ".vscode").mkdir()
    (tmp_path / ".vscode/settings.json").write_text("{}")
    (tmp_path / "results.json").write_text('{"mine": 1}')
    assert main(["train", recipe, "--output_dir", str(tmp_path), "--resume"]) == 2
    assert "holds something else than a run of tokendrift train" in capsys.readouterr().err
    assert (tmp_path / "results.json").read_text() == '{"mine": 1}'
    assert not (tmp_path / "refined").exists()


def test_two_runs_do_not_write_into_one_folder(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lock, "WAIT", 0.05)
    with lock.locked(tmp_path):
        assert main(["train", recipe, "--output_dir", str(tmp_path)]) == 2
    assert "Another process is writing into" in capsys.readouterr().err
    assert not (tmp_path / "refined").exists()


def test_a_run_that_another_one_finished_while_it_waited_is_left_alone(recipe, tmp_path, monkeypatch, capsys):
    """Both began when the folder was empty. The second one gets the lock once the first is done."""
    opened = Run.open

    def slowly(*arguments, **options):
        run = opened(*arguments, **options)
        monkeypatch.setattr(Run, "open", opened)
        assert main(["train", recipe, "--output_dir", str(tmp_path / "out"), "--max_steps", "1"]) == 0
        return run

    monkeypatch.setattr(Run, "open", slowly)
    assert main(["train", recipe, "--output_dir", str(tmp_path / "out"), "--max_steps", "2"]) == 2
    assert "already holds something, and nothing is overwritten" in capsys.readouterr().err
    assert json.loads((tmp_path / "out/refined/settings.json").read_text())["max_steps"] == 1


@pytest.mark.parametrize("steps", ["1", "6"], ids=["finished", "cut off"])
def test_a_run_is_not_resumed_on_another_text(steps, text_files, tmp_path, monkeypatch, capsys):
    """The name of the file is the same. A word in one document is another."""
    for name in ("base", "judge"):
        shutil.copytree(text_files / name, tmp_path / name)
    corpus, recipe = tmp_path / "corpus.jsonl", tmp_path / "run.yaml"
    corpus.write_text((text_files / "corpus.jsonl").read_text())
    recipe.write_text(RECIPE)
    call = ["train", str(recipe), "--output_dir", str(tmp_path / "out"), "--max_steps", steps]
    if steps == "6":
        with monkeypatch.context() as patch:
            cut_off(patch, at=7)
            assert main(call) == 130
    else:
        assert main(call) == 0
    corpus.write_text(corpus.read_text().replace("object", "subject", 1))
    assert main([*call, "--resume"]) == 2
    assert "was made with other settings" in (message := capsys.readouterr().err)
    assert "'train_rows': ('" in message
    corpus.write_text((text_files / "corpus.jsonl").read_text())
    assert main([*call, "--resume"]) == 0


def test_a_finished_training_is_kept_but_not_for_other_settings(recipe, tmp_path, capsys):
    """Resuming uses what is there for equal settings, whatever the batch is shared out over, and refuses others."""
    out = tmp_path / "out"
    call = ["train", recipe, "--output_dir", str(out), "--max_steps", "1"]
    assert main(call) == 0
    weights = out / "refined/model.safetensors"
    before = weights.read_bytes(), weights.stat().st_mtime_ns
    assert main([*call, "--resume", "--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "4"]) == 0
    for changed in (["--learning_rate", "2e-3"], ["--wrap", "false"], ["--drift_kernel", "drifting"]):
        capsys.readouterr()
        assert main([*call, "--resume", *changed]) == 2
        said = capsys.readouterr().err
        assert "was made with other settings" in said and f"'{changed[0][2:]}'" in said
    assert (weights.read_bytes(), weights.stat().st_mtime_ns) == before


def test_lost_weights_come_from_the_newest_checkpoint(recipe, whole, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    (out / "refined/model.safetensors").unlink()
    shutil.rmtree(out / "refined/checkpoint-6")
    assert main(["train", recipe, "--output_dir", str(out), "--resume"]) == 0
    assert "refined has lost model.safetensors: it goes on from its newest checkpoint" in capsys.readouterr().out
    assert (out / "refined/checkpoint-6").is_dir()
    assert_same_model(out, whole)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "modeling_tokendrift.py"])
@pytest.mark.parametrize("how", ["cut off", "gone", "changed"])
def test_what_a_finished_training_has_lost_is_made_again(name, how, recipe, whole, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    before = (out / "refined" / name).read_bytes()
    (out / "refined" / name).unlink()
    if how != "gone":
        (out / "refined" / name).write_bytes(before[:10] if how == "cut off" else before[:-1] + b" ")
    assert main(["train", recipe, "--output_dir", str(out), "--resume"]) == 0
    assert f"refined has lost {name}: it goes on" in capsys.readouterr().out
    assert (out / "refined" / name).read_bytes() == before
    assert_same_model(out, whole)


@pytest.mark.parametrize(
    ("name", "cut", "remedy"),
    [
        ("training.json", True, "cut off or damaged. Remove .*training.json: --resume goes on"),
        ("settings.json", True, "cut off or damaged. Remove .*refined to have that training made anew"),
        ("settings.json", False, "settings.json is gone, .*Remove .*refined to have that training made anew"),
    ],
)
def test_a_lost_record_of_a_training_comes_with_a_remedy_that_works(name, cut, remedy, recipe, whole, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    text = (out / "refined" / name).read_text()
    (out / "refined" / name).unlink()
    if cut:
        (out / "refined" / name).write_text(text[:40])
    call = ["train", recipe, "--output_dir", str(out), "--resume"]
    assert main(call) == 2
    assert re.search(remedy, capsys.readouterr().err)
    if name == "settings.json":
        shutil.rmtree(out / "refined")
    else:
        (out / "refined" / name).unlink()
    assert main(call) == 0
    assert_same_model(out, whole)


def test_a_finished_run_is_not_resumed_on_another_base(recipe, text_files, tmp_path, capsys):
    """What lies under the model's name was replaced. The table would compare with a model that nothing began with."""
    base = tmp_path / "model"
    shutil.copytree(text_files / "base", base)
    call = ["train", recipe, "--model", str(base), "--max_steps", "1", "--output_dir", str(tmp_path / "run")]
    assert main(call) == 0
    weights = load_file(base / "model.safetensors")
    save_file({name: x + 1e-3 for name, x in weights.items()}, base / "model.safetensors", {"format": "pt"})
    assert main([*call, "--resume"]) == 2
    assert "base_weights" in capsys.readouterr().err


def test_a_table_is_not_thrown_away(recipe, whole, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    results = json.loads((out / "results.json").read_text())
    (out / "results.json").write_text(json.dumps(results | {"rows": []}))
    assert main(["train", recipe, "--output_dir", str(out), "--resume"]) == 2
    assert "holds a table with TokenDrift, which this run would leave out" in capsys.readouterr().err


def test_the_home_folder_is_one_folder_for_all_that_is_written(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    call = ["train", recipe, "--max_steps", "1", "--output_dir", "~/run"]
    assert main(call) == 0
    assert {path.name for path in (tmp_path / "home/run").iterdir()} >= {"refined", "results.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert main(call) == 2
    assert "already holds something" in capsys.readouterr().err


def test_what_was_dropped_is_said_and_how_the_text_was_cut_is_on_the_card(recipe, tmp_path, caplog):
    """Rows x (length - 2) + dropped = tokens and an eos for each of the nine documents."""
    fresh = tmp_path / "fresh.jsonl"  # in no cache
    fresh.write_text("\n".join(json.dumps({"text": f"{i} {tmp_path.name} of an object " * 9}) for i in range(9)))
    call = ["train", recipe, "--max_steps", "1", "--dataset", str(fresh), "--output_dir"]
    assert main([*call, str(tmp_path / "wrapped")]) == 0
    assert main([*call, str(tmp_path / "padded"), "--wrap", "false", "--insert_eos", "false"]) == 0
    wrapped, padded = (
        tuple(map(int, found))
        for found in re.findall(
            r"9 documents \(0 empty\), (\d+) tokens, (\d+) dropped .*\n.* (\d+) rows of 16", caplog.text
        )
    )
    tokens, dropped, rows = wrapped
    assert rows * 14 + dropped == tokens + 9 and 0 <= dropped < 14
    assert padded[0] == tokens and padded[1] == tokens - 9 * 14 and padded[2] == 9
    cards = [(tmp_path / run / "refined/README.md").read_text() for run in ("wrapped", "padded")]
    assert "wrap: `True`. insert_eos: `True`" in cards[0] and "wrap: `False`. insert_eos: `False`" in cards[1]


def test_packed_rows_are_found_again_by_another_process(text_files, tmp_path):
    code = f"""
        from transformers import AutoTokenizer
        from tokendrift_hf.data import load_text, pack_documents, packing
        if {{again}}:
            packing._token_lists = None  # nothing is tokenised a second time
        tokenizer = AutoTokenizer.from_pretrained({str(text_files / "base")!r})
        text = load_text({str(text_files / "corpus.jsonl")!r})
        print("FOUND", pack_documents(text, tokenizer, 16).cache_files)
    """
    first, second = (
        run_python(code.format(again=again), tmp_path, isolated=False).partition("FOUND")[2] for again in (False, True)
    )
    assert first == second and "arrow" in first


def test_the_loss_of_the_base_is_measured_once_for_all_trainings(recipe, tmp_path, monkeypatch):
    plain, calls = DriftTrainer.evaluate, []
    monkeypatch.setattr(DriftTrainer, "evaluate", lambda self, *args: calls.append(1) or plain(self, *args))
    flags = ["--trainings", "{TokenDrift: {}, continuation: {objective: none, base_loss_weight: 1}}"]
    flags += ["--validation_split", "train", "--max_steps", "1", "--output_dir", str(tmp_path / "run")]
    assert main(["train", recipe, *flags]) == 0
    assert len(calls) == 3  # the base, and what each of the two trainings left
    histories = [json.loads(path.read_text()) for path in (tmp_path / "run").glob("*/training.json")]
    assert len({history["eval_loss_before"] for history in histories}) == 1


def test_trainings_of_one_run_may_differ_in_precision(recipe, tmp_path):
    flags = ["--trainings", "{first: {bf16: true}, second: {}, third: {bf16: true}}", "--max_steps", "1"]
    assert main(["train", recipe, *flags, "--output_dir", str(tmp_path / "run")]) == 0
    settings = {path.parent.name: json.loads(path.read_text()) for path in (tmp_path / "run").glob("*/settings.json")}
    assert {name: there["bf16"] for name, there in settings.items()} == {
        "refined": True,
        "second": False,
        "third": True,
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("feature_layers: [99]", r"feature_layers=\[99\]: this encoder has hidden states 0"),
        ("encoder: /nothere", "The encoder '/nothere' cannot be loaded"),
        ("metric_for_best_model: foo", "metric_for_best_model='foo' is not measured"),
        ("eval_strategy: epoch", "eval_strategy='epoch' needs rows to evaluate: .*validation_split"),
        ("eval_strategy: steps, eval_steps: 1", "eval_strategy='steps' needs rows to evaluate"),
        ("optim: adamw_bnb_8bit", "You need to install `bitsandbytes`"),
        ("lora: {target_modules: [nothing]}", "nothing"),
        ("lora: {r: 2}, encoder: base, dropout: 0.1", "encoder='base' shares its modules with the student"),
        ("queue_size: 0, per_device_train_batch_size: 1", "One row a micro-batch and queue_size=0"),
    ],
)
def test_what_a_later_training_cannot_work_with_is_said_before_any_training(
    fields, message, recipe, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(DriftTrainer, "compute_loss", None)  # never called
    trainings = f"{{first: {{objective: none, base_loss_weight: 1}}, later: {{{fields}}}}}"
    assert main(["train", recipe, "--trainings", trainings, "--output_dir", str(tmp_path / "run")]) == 2
    assert re.search(f"training 'later': .*{message}", capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        '{"card": ',
        '{"card": "x", "log_history": []}',
        '{"card": {"kind": "full", "model_class": "X", "evil": 1}, "log_history": []}',
        '{"card": {"kind": "full", "model_class": "X"}, "log_history": 3}',
    ],
)
def test_a_damaged_history_is_named_before_the_evaluation(content, tmp_path):
    path = tmp_path / "training.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="training.json (cannot be read|holds|is not what a finished training leaves)"):
        read_history(tmp_path)
