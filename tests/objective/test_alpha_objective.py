"""AlphaObjective: its formula by loops, its limit, its gradient, and that no encoder is made for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from conftest import TINY, tiny_model
from toys import logged, make_trainer, toy_rows, weights_of

from tokendrift_hf.hub.process_tokendrift import stratified_times
from tokendrift_hf.objective.alpha_objective import AlphaObjective, window_of
from tokendrift_hf.objective.corruption import corrupt
from tokendrift_hf.objective.noise import TRAIN, row_noise


@dataclass
class Settings:
    alpha_power: float = 1.0
    alpha_window: int | None = 2


def called(kind="mdlm", count=5, **inputs):
    """A batch of five rows, and logits in float64 as a leaf."""
    model = tiny_model(kind).double()
    ids = torch.tensor([row["input_ids"] for row in toy_rows(count)])
    noise = row_noise((0, TRAIN, 3), range(count), ids.shape[1], TINY["vocab_size"])
    batch = corrupt(model.process, {"input_ids": ids, **inputs}, noise, stratified_times(noise.time))
    return batch, model(input_ids=batch.x_t, timesteps=batch.t).logits.detach().requires_grad_()


def log_probs(batch, logits):
    """Row -> log p(x_0) at its predicted positions, in their order."""
    log_p = logits.log_softmax(-1)
    rows = range(len(batch.x_0))
    positions = [batch.predicted[i].nonzero().squeeze(1).tolist() for i in rows]
    return [[log_p[i, j, batch.x_0[i, j]] for j in positions[i]] for i in rows if positions[i]]


def slow_loss(batch, logits, power, window):
    losses = []
    for row in log_probs(batch, logits):
        size, total = window or len(row), 0
        for start in range(0, len(row), size):
            part = row[start : start + size]
            s = sum(part) / len(part)
            total = total + len(part) * (1 - torch.exp(power * s)) / power
        losses.append(total / len(row))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
@pytest.mark.parametrize(("power", "window"), [(1.0, 2), (0.3, 3), (4.0, None), (1.0, 1), (0.5, 100)])
def test_the_loss_and_its_gradient_are_their_formulas(kind, power, window):
    batch, logits = called(kind)
    loss, _ = AlphaObjective(None, Settings(power, window))(logits, batch)
    expected = slow_loss(batch, logits, power, window)
    gradients = [torch.autograd.grad(x, logits)[0] for x in (loss, expected)]
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("window", [None, 2])
def test_without_a_power_it_is_the_mean_cross_entropy(window):
    """k -> 0, over the positions of a row and then over rows, whatever the windows."""
    batch, logits = called()
    loss, _ = AlphaObjective(None, Settings(1e-9, window))(logits, batch)
    means = [-sum(row) / len(row) for row in log_probs(batch, logits)]
    expected = sum(means) / len(means)
    torch.testing.assert_close(loss, expected, rtol=1e-7, atol=0)
    gradients = [torch.autograd.grad(x, logits)[0] for x in (loss, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-12)


def test_a_row_counts_by_how_well_it_is_explained():
    """The gradient is that of the cross-entropy times exp(k s) of the row."""
    batch, logits = called()
    (powered,) = torch.autograd.grad(AlphaObjective(None, Settings(2.0, None))(logits, batch)[0], logits)
    (plain,) = torch.autograd.grad(AlphaObjective(None, Settings(1e-9, None))(logits, batch)[0], logits)
    for i, row in zip(batch.predicted.any(1).nonzero().squeeze(1).tolist(), log_probs(batch, logits), strict=True):
        weight = math.exp(2.0 * float(sum(row).detach()) / len(row))
        torch.testing.assert_close(powered[i], weight * plain[i], rtol=1e-6, atol=1e-12)


def test_windows_are_runs_of_predicted_positions():
    predicted = torch.tensor([[1, 0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0, 1]]).bool()
    assert window_of(predicted, 2).tolist() == [0, 0, 1, 1, 2, 14, 14, 15]
    assert window_of(predicted, None).tolist() == [0] * 5 + [14] * 3


def test_what_is_logged_is_of_the_windows():
    batch, logits = called()
    _, statistics = AlphaObjective(None, Settings(0.7, None))(logits, batch)
    s = [float(sum(row)) / len(row) for row in log_probs(batch, logits)]
    assert statistics["alpha_log_p"].item() == pytest.approx(sum(s) / len(s), rel=1e-9)
    assert statistics["alpha_weight"].item() == pytest.approx(sum(math.exp(0.7 * x) for x in s) / len(s), rel=1e-9)


def test_a_batch_with_nothing_to_predict_changes_nothing():
    ids = torch.tensor([row["input_ids"] for row in toy_rows(5)])
    batch, logits = called(prompt_mask=torch.ones_like(ids))
    loss, statistics = AlphaObjective(None, Settings())(logits, batch)
    loss.backward()
    assert loss == 0 and (logits.grad == 0).all()
    assert all(value.isfinite() for value in statistics.values())


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
def test_training_makes_the_text_likelier_without_an_encoder(kind, tmp_path):
    fields = {"objective": "alpha", "optim": "adamw_torch", "learning_rate": 0.01, "max_steps": 20}
    trainer = make_trainer(tmp_path, model=tiny_model(kind), rows=toy_rows(1) * 8, **fields)
    assert trainer.encoder is None
    before = weights_of(trainer.model)
    trainer.train()
    assert not [name for name, p in weights_of(trainer.model).items() if torch.equal(p, before[name])][1:]
    values = logged(trainer, "alpha_log_p")
    assert values[-1] > values[0] + 0.5
    assert trainer.train_objective.state_dict() == {}
