"""DriftObjective without a Trainer: its documented loop, its queues and what it reports."""

from __future__ import annotations

import copy
import inspect
import math
import re
import textwrap
from dataclasses import dataclass, field, replace

import pytest
import torch
from conftest import TINY, tiny_model
from toys import LENGTH, config, make_trainer, toy_rows, weights_of

from tokendrift_hf import DriftObjective, FrozenEncoder
from tokendrift_hf.hub.process_tokendrift import stratified_times
from tokendrift_hf.objective import drift_objective
from tokendrift_hf.objective.corruption import corrupt
from tokendrift_hf.objective.drift import DriftField
from tokendrift_hf.objective.noise import TRAIN, row_noise
from tokendrift_hf.objective.objectives import OBJECTIVES, make_objective
from tokendrift_hf.objective.predictions import predict


@dataclass
class Settings:
    """What an objective reads, without a TrainingArguments."""

    objective: str = "feature"
    drift_scale: float = 1.0
    mirror_step_size: float = 1.0
    mirror_eta: float | None = None
    encoder_input: str = "soft"
    drift_kernel: str = "paper"
    temperatures: list[float] = field(default_factory=lambda: [0.02, 0.05, 0.2])
    attraction: float = 1.0
    repulsion: float = 1.0
    queue_size: int = 6
    gather_features: bool = True
    feature_pooling: str = "mean"
    feature_tokens: int = 16


def toy_ids(count: int) -> torch.Tensor:
    return torch.tensor([row["input_ids"] for row in toy_rows(count)])


def corrupted(model, ids: torch.Tensor, step: int = 0):
    noise = row_noise((0, TRAIN, step), range(len(ids)), ids.shape[1], TINY["vocab_size"])
    return corrupt(model.process, {"input_ids": ids}, noise, stratified_times(noise.time))


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
def test_the_loop_of_the_docstring_trains(kind):
    """The example as it stands, but for the learning rate: every weight moves and the queues fill."""
    example = textwrap.dedent(re.search(r"::\n\n(.*?)\n\s*Args:", inspect.getdoc(DriftObjective), re.DOTALL)[1])
    loop = [line for line in example.splitlines() if line and "import" not in line]
    assert len(loop) <= 11
    model, seen = tiny_model(kind), []
    before = weights_of(model)
    names = dict(model=model, blocks=toy_ids(64).repeat(12, 1).split(16), seen=seen)
    names["config"] = Settings(queue_size=64, drift_kernel="drifting")
    example = example.replace("lr=3e-5", "lr=5e-3").replace(
        "loss.backward()", "loss.backward(); seen.append(statistics)"
    )
    exec(example, names)
    assert len(seen) == 48
    assert not [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert len(names["objective"].real_queue) == len(names["objective"].generated_queue) == 64
    distance = [float(statistics["feature_distance"]) for statistics in seen]
    assert sum(distance[-4:]) < 0.8 * sum(distance[:4])


@pytest.mark.parametrize("whole", [False, True], ids=["predictions", "logits"])
def test_a_loop_is_the_trainer(whole, tmp_path):
    """Three steps of SGD by hand give the weights of DriftTrainer: bit for bit, and with whole logits nearly so."""
    model = tiny_model("mdlm")
    by_hand = copy.deepcopy(model)
    trainer = make_trainer(tmp_path, model=model, rows=toy_rows(4), per_device_train_batch_size=4)
    seen = []
    collate = trainer.data_collator
    trainer.data_collator = lambda rows: seen.append(collate(rows)) or seen[-1]
    objective = DriftObjective(FrozenEncoder.copy_of(by_hand), trainer.args)
    trainer.train()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=1.0)
    for step in range(3):
        ids = seen[step]["input_ids"]
        noise = row_noise((trainer.args.seed, TRAIN, step, 0), range(4), LENGTH, TINY["vocab_size"])
        batch = corrupt(by_hand.process, {"input_ids": ids}, noise, stratified_times(noise.time))
        logits = by_hand(input_ids=batch.x_t, timesteps=batch.t).logits if whole else predict(by_hand, by_hand, batch)
        loss, _ = objective(logits, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        objective.accept()
    for name, value in weights_of(by_hand).items():
        torch.testing.assert_close(value, weights_of(trainer.model)[name], rtol=0, atol=1e-5 * whole, msg=name)
    assert torch.equal(objective.real_queue.features, trainer.train_objective.real_queue.features)


@pytest.fixture
def called():
    """An objective, the model, and a batch of four rows with its logits."""
    model = tiny_model("mdlm")
    objective = DriftObjective(FrozenEncoder.copy_of(model), Settings())
    batch = corrupted(model, toy_ids(4))
    return objective, model(input_ids=batch.x_t, timesteps=batch.t).logits, batch


def test_the_queues_take_in_what_has_been_accepted_once(called):
    objective, logits, batch = called
    objective(logits, batch)
    assert len(objective.real_queue) == len(objective.generated_queue) == 0
    objective.accept()
    assert len(objective.real_queue) == len(objective.generated_queue) == 4
    objective.accept()
    assert len(objective.real_queue) == 4


def with_padding(batch, rows):
    """The batch with nothing but padding in these rows."""
    mask = torch.ones_like(batch.x_0)
    mask[rows] = 0
    return replace(batch, exists=mask.bool(), predicted=batch.predicted & mask.bool(), attention_mask=mask)


@pytest.mark.parametrize("fields", [{}, {"feature_pooling": "tokens", "feature_tokens": 3}], ids=["mean", "tokens"])
def test_a_row_of_padding_alone_is_as_if_it_were_not_there(called, fields):
    """Neither anchor nor reference, nothing in the queues; the loss is a mean over all rows."""
    objective, logits, batch = called
    objective.config = Settings(**fields)
    padded = with_padding(batch, [1])
    loss, statistics = objective(logits, padded)
    objective.accept()
    rest = [0, 2, 3]
    without = replace(
        padded,
        noise=replace(padded.noise, order=padded.noise.order[rest]),
        **{name: getattr(padded, name)[rest] for name in ("x_0", "x_t", "exists", "predicted", "attention_mask")},
    )
    other = DriftObjective(objective.encoder, objective.config)
    expected, its_statistics = other(logits[rest], without)
    other.accept()
    torch.testing.assert_close(loss, expected * 3 / 4, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(statistics["feature_distance"], its_statistics["feature_distance"])
    torch.testing.assert_close(objective.real_queue.features, other.real_queue.features)
    torch.testing.assert_close(objective.generated_queue.features, other.generated_queue.features)


@pytest.mark.parametrize("name", ["feature", "mirror_kl"])
def test_a_batch_of_padding_alone_changes_nothing(called, name):
    objective, logits, batch = called
    objective.config = Settings(objective=name)
    logits = logits.detach().requires_grad_()
    loss, _ = objective(logits, with_padding(batch, [0, 1, 2, 3]))
    loss.backward()
    objective.accept()
    assert loss == 0 and (logits.grad == 0).all()
    assert len(objective.real_queue) == 0


def test_a_refused_step_leaves_the_next_one_as_if_it_had_not_been(called):
    objective, logits, batch = called
    first, _ = objective(logits, batch)
    objective(logits + 1.0 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)), batch)
    again, _ = objective(logits, batch)
    assert torch.equal(first, again)


def test_the_state_gives_the_same_next_step(called):
    objective, logits, batch = called
    objective(logits, batch)
    objective.accept()
    other = DriftObjective(objective.encoder, objective.config)
    other.load_state_dict(objective.state_dict())
    assert objective.state_dict().keys() == {"real", "generated"}
    assert torch.equal(other(logits, batch)[0], objective(logits, batch)[0])


def test_the_state_of_an_objective_without_queues_leaves_them_empty(called):
    objective, logits, batch = called
    objective(logits, batch)
    objective.accept()
    objective.load_state_dict({"bandwidth": torch.tensor(1.0)})
    assert len(objective.real_queue) == 0


def test_the_drift_is_reported_per_temperature_however_small(called, monkeypatch):
    """A norm of 1e-60 is far below every float32."""
    objective, logits, batch = called
    objective.config.temperatures = [0.02, 1]
    drift = DriftField(torch.zeros(4, 64), torch.tensor([1e-60, 0.5], dtype=torch.float64), torch.tensor([1.0, 3.0]))
    monkeypatch.setattr(drift_objective, "unchecked_drift_field", lambda *args, **kwargs: drift)
    _, statistics = objective(logits, batch)
    assert statistics.keys() == {
        "drift_norm_0.02",
        "drift_norm_1",
        "effective_references_0.02",
        "effective_references_1",
        "feature_distance",
        "queue_fill",
        "token_entropy",
    }
    assert statistics["drift_norm_0.02"].item() == 1e-60 and statistics["effective_references_1"] == 3


def test_statistics_are_those_of_the_references(called):
    objective, logits, batch = called
    _, first = objective(logits, batch)
    objective.accept()
    u, h = objective.real_queue.features, objective.generated_queue.features
    assert first["feature_distance"].item() == pytest.approx(
        math.dist(u.mean(0).tolist(), h.mean(0).tolist()), rel=1e-5
    )
    _, second = objective(logits, batch)
    assert first["queue_fill"] == 0 and second["queue_fill"] == 4
    assert not any(value.requires_grad for value in first.values())


def test_every_objective_of_the_configuration_can_be_made(tmp_path):
    model = tiny_model("mdlm")
    for name, kind in OBJECTIVES.items():
        encoder = FrozenEncoder.copy_of(model) if kind.needs_encoder else None
        assert isinstance(make_objective(config(tmp_path, objective=name), encoder), kind)
    assert make_objective(config(tmp_path, objective="none", base_loss_weight=1.0), None) is None
