"""Nothing in float64 gets to a device that has none: every objective, pooling and sampler."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_model
from pretend_device import DEVICE, PretendDevice
from toys import make_trainer, toy_rows

from tokendrift_hf.hub.samplers_tokendrift import SAMPLERS

OBJECTIVES = {
    "feature": {},
    "tokens": {"feature_pooling": "tokens", "feature_tokens": 3},
    "drifting": {"drift_kernel": "drifting"},
    "hard": {"encoder_input": "hard_st"},
    "mirror_kl": {"objective": "mirror_kl"},
    "mirror_mse": {"objective": "mirror_mse", "feature_pooling": "tokens", "feature_tokens": 3},
    "mmd": {"objective": "mmd"},
    "none": {"objective": "none", "base_loss_weight": 1.0},
}


def padded_batch() -> dict[str, torch.Tensor]:
    ids = torch.tensor([row["input_ids"] for row in toy_rows(4)])
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_training_sends_no_float64(name, kind, tmp_path):
    trainer = make_trainer(tmp_path, model=tiny_model(kind), **{"base_loss_weight": 0.5} | OBJECTIVES[name])
    batch = padded_batch()
    with PretendDevice() as device:
        device.put(trainer.model, *batch.values())
        if trainer.encoder is not None:
            device.put(trainer.encoder.model)
        assert batch["input_ids"].device == DEVICE
        for _ in range(2):  # the second time with full queues
            trainer.compute_loss(trainer.model, batch).backward()
    assert device.count > 100
    assert not device.doubles, device.doubles[0]


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_host_waits_for_the_device_twice_a_step(name, kind, tmp_path):
    """To learn how many positions are predicted (mmd: and in which rows), and whether the loss is finite in time."""
    trainer = make_trainer(tmp_path, model=tiny_model(kind), **{"base_loss_weight": 0.5} | OBJECTIVES[name])
    with PretendDevice() as device:
        ids = padded_batch()["input_ids"]
        device.put(trainer.model, ids)
        if trainer.encoder is not None:
            device.put(trainer.encoder.model)
        trainer.compute_loss(trainer.model, {"input_ids": ids}).backward()
        device.waits.clear()  # the second time with full queues
        trainer.compute_loss(trainer.model, {"input_ids": ids}).backward()
    first, *others, last = device.waits
    assert len(others) == (name == "mmd"), "".join(device.waits)
    assert "nonzero" in first
    assert all("sizes = " in wait for wait in others)
    assert "isfinite" in last


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
def test_evaluation_sends_no_float64(kind, tmp_path):
    trainer = make_trainer(tmp_path, model=tiny_model(kind))
    batch = padded_batch() | {"row_number": torch.arange(4)}
    trainer._prepare_inputs = dict
    with PretendDevice() as device:
        device.put(trainer.model, *batch.values())
        trainer.prediction_step(trainer.model, batch, True)
    assert device.count > 100
    assert not device.doubles, device.doubles[0]


@pytest.mark.parametrize(
    "kind, sampler",
    [(kind, name) for name, sampler in SAMPLERS.items() for kind in ("mdlm", "duo")[: 1 if sampler.needs_mask else 2]],
)
@pytest.mark.parametrize("controls", [{}, {"temperature": 0.7, "top_k": 5, "top_p": 0.9}], ids=["plain", "controlled"])
def test_sampling_sends_no_float64(sampler, kind, controls):
    model = tiny_model(kind)
    with PretendDevice() as device:
        device.put(model)
        steps = {} if "num_steps" in SAMPLERS[sampler].unused else {"num_steps": 3}
        model.generate(num_samples=2, sampler=sampler, seed=0, **steps, **controls)
    assert device.count > 100
    assert not device.doubles, device.doubles[0]


def test_the_pretended_device_notices_what_it_should():
    """Made elsewhere and sent there, made there, or computed there; not what stays on the CPU."""
    with PretendDevice() as device:
        x = torch.ones(3)
        device.put(x)
        assert x.device == (x * 2).device == DEVICE
        assert x.cpu().device.type == "cpu"
        assert (x.cpu() * 2).double().device.type == "cpu"
        assert device.doubles == []
        for send in (
            lambda: torch.ones(3, dtype=torch.float64).to(x.device),
            lambda: torch.zeros(3, dtype=torch.float64, device=x.device),
            lambda: x.double(),
            lambda: x.new_ones(2, dtype=torch.float64),
        ):
            device.doubles.clear()
            send()
            assert len(device.doubles) == 1
