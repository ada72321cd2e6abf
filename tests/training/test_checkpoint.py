"""Interrupt and resume: bit for bit the run that was not interrupted, and never from half a checkpoint."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
import torch
from conftest import TINY, start_python, tiny_model
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from toys import REAL_STEPS, assert_same, logged, make_trainer, queues_of, toy_rows, weights_of
from transformers import TrainerCallback

from tokendrift_hf import lock
from tokendrift_hf.data.collators import CleanCollator
from tokendrift_hf.training.manifest import last_complete_checkpoint, read_manifest, write_manifest

EXACT = {"rtol": 0, "atol": 0}


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def run(folder, stop_at=None, model=None, rows=None, arguments=None, **fields):
    """A run with everything that has a state: dropout, AdamW, a schedule, accumulation, queues, averages."""
    callbacks = [StopAt(stop_at)] if stop_at else []
    return make_trainer(
        folder,
        model=tiny_model("mdlm", dropout=0.1) if model is None else model,
        rows=toy_rows(24) if rows is None else rows,
        arguments={"callbacks": callbacks, "eval_dataset": toy_rows(3)} | (arguments or {}),
        **REAL_STEPS
        | dict(
            max_steps=6,
            queue_size=10,
            ema_decay=0.9,
            save_strategy="steps",
            save_steps=2,
            eval_strategy="steps",
            eval_steps=3,
        )
        | fields,
    )


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """The output directory of a run that was killed in its fifth step."""
    folder = tmp_path_factory.mktemp("interrupted")
    with pytest.raises(KeyboardInterrupt):
        run(folder, stop_at=5).train()
    return folder


def copy_of(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "run")


def history(trainer):
    changing = ("runtime", "samples_per_second", "steps_per_second", "train_loss", "total_flos")
    return [
        {name: value for name, value in entry.items() if not any(part in name for part in changing)}
        for entry in trainer.state.log_history
    ]


def test_resuming_gives_the_uninterrupted_run(interrupted, tmp_path):
    """Weights, optimizer, schedule, averages, queues in order, and every logged value."""
    whole = run(tmp_path / "whole")
    whole.train()
    torch.manual_seed(987)  # the state of the new process must not matter
    resumed = run(copy_of(interrupted, tmp_path))
    resumed.train(resume_from_checkpoint=True)
    assert_same(weights_of(resumed.model), weights_of(whole.model), **EXACT)
    assert_same(resumed.ema.state_dict(), whole.ema.state_dict(), **EXACT)
    for name in ("real_queue", "generated_queue"):
        assert len(getattr(whole.train_objective, name)) == 10
        assert torch.equal(
            getattr(resumed.train_objective, name).features, getattr(whole.train_objective, name).features
        )
    one, other = resumed.optimizer.state_dict()["state"], whole.optimizer.state_dict()["state"]
    for parameter in other:
        assert_same(one[parameter], other[parameter], **EXACT)
    assert resumed.lr_scheduler.state_dict() == whole.lr_scheduler.state_dict()
    assert history(resumed) == history(whole) and len(history(whole)) == 9


def test_the_extra_files_are_safetensors_and_json(interrupted):
    folder = interrupted / "checkpoint-4"
    assert {path.name for path in folder.glob("drift_*")} == {
        "drift_queues.safetensors",
        "drift_ema.safetensors",
        "drift_state.json",
    }
    assert {x.shape for x in load_file(folder / "drift_queues.safetensors").values()} == {(10, 64)}
    manifest = read_manifest(folder)
    assert manifest["global_step"] == 4 and {"model.safetensors", "optimizer.pt"} <= manifest["files"].keys()


def test_a_checkpoint_may_have_any_name(interrupted, tmp_path):
    """A copy that is kept under a name without a number is resumed like the original."""
    shutil.copytree(interrupted / "checkpoint-2", tmp_path / "kept")
    trainer = run(tmp_path / "run", max_steps=3)
    assert trainer.train(resume_from_checkpoint=str(tmp_path / "kept")).global_step == 3


def test_a_damaged_checkpoint_is_refused_before_anything_is_loaded(interrupted, tmp_path):
    """The real files: the newest checkpoint is passed over, and refused if named. The model stays as it is."""
    folder = copy_of(interrupted, tmp_path)
    for name in ("optimizer.pt", "rng_state.pth", "drift_ema.safetensors"):
        path = folder / "checkpoint-4" / name
        content = path.read_bytes()
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
        assert last_complete_checkpoint(folder).name == "checkpoint-2"
    trainer = run(folder)
    with pytest.raises(ValueError, match="not complete: .*optimizer.pt.*changed after it was written"):
        trainer.train(resume_from_checkpoint=folder / "checkpoint-4")
    assert_same(weights_of(trainer.model), weights_of(tiny_model("mdlm", dropout=0.1)), **EXACT)
    assert {"trainer_state.json", "drift_state.json", "model.safetensors"} <= {p.name for p in path.parent.iterdir()}


def test_an_incomplete_newer_checkpoint_is_set_aside_and_costs_no_other(interrupted, tmp_path, caplog):
    """With a limit of one the checkpoint just written stays, though the incomplete one has a higher number."""
    folder = copy_of(interrupted, tmp_path)
    (folder / "checkpoint-99").mkdir()
    (folder / "checkpoint-old").mkdir()
    trainer = run(folder, max_steps=5, save_steps=5, save_total_limit=1)
    with caplog.at_level(logging.WARNING, "tokendrift_hf.training.manifest"):
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 5
    assert "checkpoint-99 is not complete: it is now _incomplete-checkpoint-99" in caplog.text
    assert {path.name for path in folder.glob("*checkpoint*")} == {
        "_incomplete-checkpoint-99",
        "checkpoint-5",
        "checkpoint-old",
    }


def test_nothing_to_resume_from_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"no complete checkpoint .*\(looked at 0\)"):
        run(tmp_path).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("stream", [False, True], ids=["rows", "stream"])
def test_a_run_that_is_done_trains_no_further_step(stream, tmp_path):
    """Killed after its last checkpoint, in the middle of an epoch: resumed, it keeps its weights."""
    rows = Dataset.from_list(toy_rows(24)).to_iterable_dataset() if stream else toy_rows(24)
    weights, fields = [], {"max_steps": 4, "save_steps": 4, "eval_strategy": "no"}
    for resume in (False, True):
        trainer = run(tmp_path, rows=rows, **fields)
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.state.global_step == 4
        weights.append(weights_of(trainer.model))
    assert_same(*weights, **EXACT)


def test_a_resumed_run_does_not_sample_its_start_again(interrupted, tmp_path):
    """eval_on_start belongs to the start: the log of the resumed run is that of the whole one."""
    fields = {"gen_ppl_num_steps": [2], "gen_ppl_num_samples": 2, "max_steps": 4}
    whole = run(tmp_path / "whole", **fields)
    whole.train()
    steps = [entry["step"] for entry in whole.state.log_history if "eval_entropy_nfe2" in entry]
    resumed = run(tmp_path / "whole", **fields)
    resumed.train(resume_from_checkpoint=tmp_path / "whole/checkpoint-2")
    assert [entry["step"] for entry in resumed.state.log_history if "eval_entropy_nfe2" in entry] == steps == [0, 3, 4]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"train_sampling_strategy": "group_by_length"},
        {"accelerator_config": {"use_seedable_sampler": False}},
    ],
    ids=["shuffled", "grouped by length", "torch's sampler"],
)
def test_the_order_of_rows_follows_the_seed_of_the_run(fields, tmp_path):
    """Not what else has drawn from torch's generator; over the end of an epoch, and after a resume in the second."""
    seen = []

    class Recording(CleanCollator):
        def __call__(self, rows):
            seen[-1].append([row["input_ids"][0] for row in rows])
            return super().__call__(rows)

    arguments = {"data_collator": Recording(TINY["vocab_size"], 16)}
    common = {"rows": toy_rows(8), "max_steps": 8, "save_strategy": "steps", "save_steps": 5, "arguments": arguments}
    for disturbance, resume in ((1, None), (2, None), (3, "checkpoint-5")):
        trainer = make_trainer(tmp_path, per_device_train_batch_size=2, **common, **fields)
        torch.manual_seed(disturbance)
        seen.append([])
        trainer.train(resume_from_checkpoint=resume and tmp_path / resume)
    assert len(seen[0]) == 8
    assert sorted(map(str, seen[0][:4])) != sorted(map(str, seen[0][4:])), "another order in the second epoch"
    assert seen[1] == seen[0]
    assert seen[2][-3:] == seen[0][5:], "what the resumed run trained on"


# ---- Another run, another process, no room ---------------------------------------------------------------


def test_a_frozen_encoder_other_than_at_the_start_is_refused(interrupted, tmp_path):
    """The checkpoint itself as the model would change the encoder, silently: it is a copy of the model at the start."""
    folder = copy_of(interrupted, tmp_path)
    wrong = tiny_model("mdlm").from_pretrained(folder / "checkpoint-4")
    for trainer in (run(folder, model=wrong), run(folder, arguments={"encoder": tiny_model("mdlm", seed=5)})):
        with pytest.raises(ValueError, match="The encoder is not the one that the run began with"):
            trainer.train(resume_from_checkpoint=True)
    run(folder, max_steps=5, arguments={"encoder": tiny_model("mdlm", dropout=0.1)}).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("encoder", ["base", None])
def test_adapters_on_another_base_are_refused(encoder, tmp_path):
    fields = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3}
    arguments = {"peft_config": LoraConfig(r=2, target_modules=["attn_qkv"]), "encoder": encoder}
    make_trainer(tmp_path, arguments=arguments, **fields).train()
    other = make_trainer(tmp_path, model=tiny_model("mdlm", seed=3), arguments=arguments, **fields)
    with pytest.raises(ValueError, match="The base of the adapters is not the one"):
        other.train(resume_from_checkpoint=True)
    make_trainer(tmp_path, arguments=arguments, **fields).train(resume_from_checkpoint=tmp_path / "checkpoint-2")


def test_queues_of_several_processes_are_not_resumed_by_one(interrupted, tmp_path):
    folder = copy_of(interrupted, tmp_path)
    manifest = read_manifest(folder / "checkpoint-4") | {"processes_with_own_state": 2}
    write_manifest(
        folder / "checkpoint-4", {name: manifest[name] for name in manifest if name not in ("files", "self")}
    )
    with pytest.raises(ValueError, match=r"queues of 2 processes of their own .*gather_features=False.* now 0"):
        run(folder).train(resume_from_checkpoint=True)


def test_two_processes_do_not_train_into_one_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "WAIT", 0.05)
    with lock.locked(tmp_path):
        with pytest.raises(ValueError, match="Another process is writing into .*Wait for it to end"):
            run(tmp_path).train()
    assert not list(tmp_path.glob("checkpoint-*"))
    run(tmp_path, max_steps=1).train()


def test_the_lock_dies_with_its_process(tmp_path):
    code = f"""
        from pathlib import Path
        import os, signal
        from tokendrift_hf.lock import locked
        with locked(Path({str(tmp_path)!r})):
            os.kill(os.getpid(), signal.SIGKILL)
    """
    process = start_python(code, tmp_path / "process", isolated=False)
    process.communicate(timeout=100)
    assert process.returncode == -9
    assert (tmp_path / lock.LOCK).is_file()
    with lock.locked(tmp_path, wait=0):
        pass


def test_running_out_of_memory_begins_anew_with_nothing_of_the_failed_attempt(tmp_path, monkeypatch):
    """Weights, optimizer, averages, queues, noise and dropout are those of a run with the smaller batch."""
    fields = {"save_strategy": "no", "eval_strategy": "no", "max_steps": 3, "logging_steps": 1}
    small = run(tmp_path / "small", per_device_train_batch_size=3, **fields)
    small.train()
    found = run(tmp_path / "found", per_device_train_batch_size=4, auto_find_batch_size=True, **fields)
    plain, batches = found.training_step, []

    def step(model, inputs, *args):
        batches.append(len(inputs["input_ids"]))
        if len(batches) == 4:  # in the second of the micro-batches of step 2
            plain(model, inputs, *args)
            raise RuntimeError("CUDA out of memory.")
        return plain(model, inputs, *args)

    monkeypatch.setattr(found, "training_step", step)
    found.train()
    assert batches == [4] * 4 + [3] * 6
    assert logged(found) == logged(small)
    assert_same(weights_of(found.model), weights_of(small.model), **EXACT)
    assert_same(found.ema.state_dict(), small.ema.state_dict(), **EXACT)
    assert_same(queues_of(found), queues_of(small), **EXACT)


def test_saved_arguments_hold_no_token_and_no_path_of_this_machine(tmp_path):
    secret = "hf_CANARYcanary"
    trainer = run(
        tmp_path / "CANARYfolder/run",
        max_steps=2,
        hub_token=secret,
        gen_ppl_num_steps=[1],
        gen_ppl_num_samples=1,
        save_total_limit=3,
    )
    trainer.args.gen_ppl_judge = str(tmp_path / "CANARYfolder/judge")
    trainer.train()
    trainer.save_model()
    for folder in (tmp_path / "CANARYfolder/run", tmp_path / "CANARYfolder/run/checkpoint-2"):
        assert b"CANARY" not in (folder / "training_args.bin").read_bytes()
        stored = torch.load(folder / "training_args.bin", weights_only=False)
        assert (stored.output_dir, stored.gen_ppl_judge) == ("run", "judge")
        assert (stored.save_total_limit, stored.push_to_hub) == (3, False)
    assert trainer.args.hub_token == secret


def test_changed_settings_are_warned_about(interrupted, tmp_path, caplog):
    folder = copy_of(interrupted, tmp_path)
    with caplog.at_level(logging.WARNING, "tokendrift_hf.training.checkpoint"):
        run(folder, max_steps=4).train(resume_from_checkpoint=True)
        assert not [record for record in caplog.records if "other settings" in record.message]
        trainer = run(folder, max_steps=5, queue_size=4, temperatures=[0.1], ema_decay=None)
        trainer.train(resume_from_checkpoint=True)
    for text in ("'queue_size': (10, 4)", "'temperatures': ([0.02, 0.05, 0.2], [0.1])", "'ema_decay': (0.9, None)"):
        assert text in caplog.text
    assert len(trainer.train_objective.real_queue) == 4


def test_averages_that_start_at_a_checkpoint_without_them_start_from_its_weights(interrupted, tmp_path):
    folder = copy_of(interrupted, tmp_path)
    checkpoint = folder / "checkpoint-4"
    (checkpoint / "drift_ema.safetensors").unlink()
    manifest = json.loads((checkpoint / "drift_state.json").read_text())
    del manifest["self"]
    write_manifest(checkpoint, manifest)
    trainer = run(folder, max_steps=5)
    trainer.train(resume_from_checkpoint=True)
    saved, new = load_file(checkpoint / "model.safetensors"), weights_of(trainer.model)
    expected = {name: 2 / 11 * saved[name] + 9 / 11 * new[name] for name in trainer.ema.shadow}
    assert_same(trainer.ema.shadow, expected, rtol=1e-5, atol=1e-7)
