"""The moving average of the weights: its formula, its precision, and where the trainer uses it."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_model
from safetensors.torch import load_file
from torch import nn
from toys import assert_same, logged, make_trainer, toy_rows, weights_of
from transformers import Trainer

from tokendrift_hf.training.ema import WeightEMA

EXACT = {"rtol": 0, "atol": 0}


def test_follows_its_formula_in_float32_for_bfloat16_weights():
    """100 small updates of bf16 weights against the recursion in float64; frozen parameters are left out."""
    model = nn.Linear(3, 2).bfloat16()
    model.bias.requires_grad_(False)
    ema, expected = WeightEMA(model, 0.95), model.weight.detach().double()
    assert ema.shadow.keys() == {"weight"} and ema.shadow["weight"].dtype == torch.float32
    for n in range(1, 101):
        with torch.no_grad():
            model.weight += 0.01 * torch.randn(2, 3, generator=torch.Generator().manual_seed(n)).bfloat16()
        ema.update(model)
        decay = min(0.95, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * model.weight.detach().double()
    torch.testing.assert_close(ema.shadow["weight"].double(), expected, rtol=1e-6, atol=1e-7)


def test_applied_restores_the_weights_bit_for_bit_whatever_happens():
    model = nn.Linear(3, 2).bfloat16()
    ema = WeightEMA(model, 0.5)
    with torch.no_grad():
        model.weight.mul_(3)
    raw = weights_of(model)
    with pytest.raises(RuntimeError, match="inside"):
        with ema.applied(model):
            assert torch.equal(model.weight, ema.shadow["weight"].bfloat16())
            raise RuntimeError("inside")
    assert_same(weights_of(model), raw, **EXACT)


def test_state_goes_through_tensors_and_a_foreign_one_is_refused():
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    ema, fresh = WeightEMA(model, 0.5), WeightEMA(other, 0.5)
    ema.update(model)
    fresh.load_state_dict(ema.state_dict())
    assert fresh.num_updates == 1
    assert_same(fresh.shadow, ema.shadow, **EXACT)
    with pytest.raises(ValueError, match="belongs to another model"):
        fresh.load_state_dict(WeightEMA(nn.Linear(3, 2, bias=False), 0.5).state_dict())


def test_the_trainer_evaluates_samples_and_saves_averages_and_checkpoints_raw_weights(tmp_path, monkeypatch):
    trainer = make_trainer(
        tmp_path,
        arguments={"eval_dataset": toy_rows(5)},
        ema_decay=0.9,
        save_strategy="steps",
        save_steps=3,
        gen_ppl_num_steps=[1],
        gen_ppl_num_samples=2,
    )
    trainer.train()
    raw, shadow = weights_of(trainer.model), trainer.ema.shadow
    assert trainer.ema.num_updates == 3 and not torch.equal(
        raw["backbone.vocab_embed.embedding"], next(iter(shadow.values()))
    )

    seen = []
    monkeypatch.setattr(
        trainer.monitor, "measure", lambda model: seen.append(weights_of(model)) or {"entropy_nfe1": 1.0}
    )
    loss = trainer.evaluate()["eval_loss"]
    assert_same({name: seen[0][name] for name in shadow}, shadow, **EXACT)
    assert_same(weights_of(trainer.model), raw, **EXACT)

    averaged = tiny_model("mdlm")
    averaged.load_state_dict(shadow, strict=False)
    plain = make_trainer(tmp_path / "plain", model=averaged, arguments={"eval_dataset": toy_rows(5)})
    assert plain.evaluate()["eval_loss"] == loss

    trainer.save_model(_internal_call=True)  # as push_to_hub does
    for folder, weights in ((tmp_path, shadow), (tmp_path / "checkpoint-3", raw)):
        saved = load_file(folder / "model.safetensors")
        assert_same({name: saved[name] for name in shadow}, {name: weights[name] for name in shadow}, **EXACT)
    stored = load_file(tmp_path / "checkpoint-3/drift_ema.safetensors")
    assert_same({name: stored[f"shadow.{name}"] for name in shadow}, shadow, **EXACT)

    def fail(*args, **kwargs):
        raise RuntimeError("evaluation failed")

    monkeypatch.setattr(trainer, "prediction_step", fail)
    with pytest.raises(RuntimeError, match="evaluation failed"):
        trainer.evaluate()
    assert_same(weights_of(trainer.model), raw, **EXACT)


def test_the_best_checkpoint_brings_its_own_average_back(tmp_path):
    """At learning rate 1 the loss rises: the best is step 1, and evaluation and saving use its average."""
    trainer = make_trainer(
        tmp_path,
        arguments={"eval_dataset": toy_rows(5)},
        objective="none",
        base_loss_weight=1.0,
        ema_decay=0.9,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,
    )
    trainer.train()
    losses = logged(trainer, "eval_loss")
    best = losses.index(max(losses)) + 1
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
    stored = load_file(tmp_path / f"checkpoint-{best}/drift_ema.safetensors")
    assert_same(
        {f"shadow.{name}": value for name, value in trainer.ema.shadow.items()} | {"num_updates": torch.tensor(best)},
        stored,
        **EXACT,
    )
    assert trainer.evaluate()["eval_loss"] == max(losses)


def test_averages_do_not_go_with_split_weights(tmp_path, monkeypatch):
    create = Trainer.create_accelerator_and_postprocess

    def create_with_fsdp(self):
        create(self)
        self.is_fsdp_enabled = True

    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", create_with_fsdp)
    with pytest.raises(ValueError, match="ema_decay does not work with FSDP or DeepSpeed"):
        make_trainer(tmp_path, ema_decay=0.9)
