"""Interrupt and resume: bit for bit the run that was not interrupted, and never from half a checkpoint."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
import torch
from conftest import tiny_model
from safetensors.torch import load_file
from toys import assert_same, make_trainer, toy_rows, weights_of
from transformers import TrainerCallback

from tokendrift_hf.training.manifest import last_complete_checkpoint, read_manifest, write_manifest

EXACT = {"rtol": 0, "atol": 0}


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def run(folder, stop_at=None, **fields):
    """A run with everything that has a state: dropout, AdamW, a schedule, accumulation, queues, averages."""
    return make_trainer(
        folder,
        model=tiny_model("mdlm", dropout=0.1),
        rows=toy_rows(24),
        arguments={"callbacks": [StopAt(stop_at)] if stop_at else [], "eval_dataset": toy_rows(3)},
        **dict(
            max_steps=6,
            gradient_accumulation_steps=2,
            per_device_train_batch_size=2,
            optim="adamw_torch",
            learning_rate=1e-3,
            lr_scheduler_type="linear",
            max_grad_norm=1.0,
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


def damage(path, how):
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("how", ["missing", "cut off"])
def test_an_incomplete_checkpoint_is_skipped_or_refused(interrupted, how, tmp_path, caplog):
    """Each of its files, missing or cut off: the newest is passed over with a message, and refused if named."""
    names = sorted(path.name for path in (interrupted / "checkpoint-4").iterdir())
    assert {"trainer_state.json", "drift_state.json", "drift_queues.safetensors", "rng_state.pth"} <= set(names)
    for name in names:
        folder = shutil.copytree(interrupted, tmp_path / name)
        damage(folder / "checkpoint-4" / name, how)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "tokendrift_hf.training.manifest"):
            assert last_complete_checkpoint(folder).name == "checkpoint-2"
        assert "Skipping" in caplog.text and name in caplog.text
        with pytest.raises(ValueError, match=f"checkpoint-4 is not .*complete.*{name}"):
            read_manifest(folder / "checkpoint-4")
    trainer = run(folder)
    with pytest.raises(ValueError, match="not .*complete"):
        trainer.train(resume_from_checkpoint=folder / "checkpoint-4")
    assert_same(weights_of(trainer.model), weights_of(tiny_model("mdlm", dropout=0.1)), **EXACT)


def test_an_empty_newest_folder_does_not_stop_a_resume(interrupted, tmp_path):
    folder = copy_of(interrupted, tmp_path)
    (folder / "checkpoint-99").mkdir()
    (folder / "checkpoint-old").mkdir()
    assert last_complete_checkpoint(folder).name == "checkpoint-4"
    trainer = run(folder, max_steps=5)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 5


def test_nothing_to_resume_from_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"no complete checkpoint .*\(looked at 0\)"):
        run(tmp_path).train(resume_from_checkpoint=True)


def test_saving_again_into_a_folder_makes_it_complete_again(tmp_path):
    """A resumed run writes over newer, incomplete checkpoints: nothing of the old files counts."""
    (tmp_path / "trainer_state.json").write_text("{'old': 1}")
    (tmp_path / "weights").write_text("w")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/optimizer").write_text("o")
    write_manifest(tmp_path, {"global_step": 1})
    with pytest.raises(ValueError, match="trainer_state.json is missing or damaged"):
        read_manifest(tmp_path)
    (tmp_path / "trainer_state.json").write_text("{}")
    assert read_manifest(tmp_path)["files"] == {"sub/optimizer": 1, "weights": 1}
    write_manifest(tmp_path, {"global_step": 1})
    (tmp_path / "trainer_state.json").write_text("{}")
    (tmp_path / "sub/optimizer").unlink()
    with pytest.raises(ValueError, match="sub/optimizer should have 1 bytes, found nothing"):
        read_manifest(tmp_path)


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
    del manifest["files"]["drift_ema.safetensors"]
    (checkpoint / "drift_state.json").write_text(json.dumps(manifest))
    trainer = run(folder, max_steps=5)
    trainer.train(resume_from_checkpoint=True)
    saved, new = load_file(checkpoint / "model.safetensors"), weights_of(trainer.model)
    expected = {name: 2 / 11 * saved[name] + 9 / 11 * new[name] for name in trainer.ema.shadow}
    assert_same(trainer.ema.shadow, expected, rtol=1e-5, atol=1e-7)
