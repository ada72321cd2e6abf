"""What the version before the layout of today (a3a2724) has left on disk: its checkpoint goes on, its adapter loads.

The files were written by that version on one CPU core: a tiny MDLM with dropout, AdamW, accumulation, queues and an
average, saved after two of four steps, with what the uninterrupted run gave after four; and an adapter of three steps.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from conftest import FIXTURES, recorded, tiny_model
from toys import REAL_STEPS, assert_same, make_trainer, toy_rows, weights_of

from tokendrift_hf import MDLMForMaskedLM
from tokendrift_hf.models.loading import load_model
from tokendrift_hf.training.manifest import last_complete_checkpoint

OLD = FIXTURES / "a3a2724"
SIZES = {"hidden_size": 16, "num_hidden_layers": 1}
# The processor that recorded may round otherwise; a step moves a weight by up to 1e-3.
CLOSE = {"rtol": 0, "atol": 1e-5}


@pytest.fixture
def run(tmp_path):
    """A copy of the old run's output directory, which resuming writes into."""
    return shutil.copytree(OLD / "run", tmp_path / "run")


def test_an_old_checkpoint_is_complete_and_loads(run):
    checkpoint = last_complete_checkpoint(run)
    assert checkpoint.name == "checkpoint-2"
    model = MDLMForMaskedLM.from_pretrained(checkpoint)
    assert model.config.hidden_size == 16


def test_an_old_checkpoint_resumes_to_the_weights_of_its_uninterrupted_run(run):
    """Weights, averages and queues after the two steps that were missing."""
    trainer = make_trainer(
        run,
        model=tiny_model("mdlm", **SIZES, dropout=0.1),
        **REAL_STEPS,
        max_steps=4,
        ema_decay=0.9,
        feature_layers=[0, 1],
        save_strategy="steps",
        save_steps=2,
    )
    trainer.train(resume_from_checkpoint=True)
    expected = recorded("a3a2724/after_4_steps")
    queues = {f"queue.{name}": features for name, features in trainer.train_objective.state_dict().items()}
    assert_same(weights_of(trainer.model) | trainer.ema.state_dict() | queues, expected, **CLOSE)


@pytest.mark.parametrize("how", ["peft", "load_model"])
def test_an_old_adapter_gives_its_logits(how, tmp_path, monkeypatch):
    """On the base that it names, through peft and through the loader of the command."""
    from peft import PeftModel

    base = tiny_model("mdlm", **SIZES)
    base.save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    model = PeftModel.from_pretrained(base, OLD / "adapter") if how == "peft" else load_model(str(OLD / "adapter"))
    expected = recorded("a3a2724/adapter_logits")
    with torch.no_grad():
        logits = model(input_ids=expected["input_ids"], timesteps=torch.tensor([0.3, 0.8])).logits
        plain = tiny_model("mdlm", **SIZES)(input_ids=expected["input_ids"], timesteps=torch.tensor([0.3, 0.8])).logits
    torch.testing.assert_close(logits, expected["logits"], rtol=0, atol=1e-5)
    assert (logits - plain).abs().max() > 1e-3, "the adapter takes part"
    assert torch.equal(expected["input_ids"], torch.tensor([row["input_ids"] for row in toy_rows(2)]))
