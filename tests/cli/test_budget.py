"""What is announced before training: floating-point operations, memory, and how they are said."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_model
from toys import CHECKPOINTING, make_trainer

from tokendrift_hf.cli.budget import GIB, Budget, budget, describe
from tokendrift_hf.models.lora import lora_config
from tokendrift_hf.training.drift_config import DriftConfig

SIZE, LENGTH, ROWS = 128, 64, 4


def kept_for_backward(folder, layers: int, lora: bool, **fields) -> tuple[float, int]:
    """Bytes that a loss of `layers` blocks keeps for its backward pass, weights left out, and what is announced."""
    fields = {"gradient_accumulation_steps": 2} | fields
    model = tiny_model("mdlm", hidden_size=SIZE, num_hidden_layers=layers, max_position_embeddings=LENGTH)
    rows = [{"input_ids": [i % 20 for i in range(LENGTH)]}] * ROWS
    trainer = make_trainer(
        folder, model=model, rows=rows, arguments={"peft_config": lora_config("linear")} if lora else {}, **fields
    )
    trainer.model.train()
    if fields.get(CHECKPOINTING):
        trainer.model.gradient_checkpointing_enable()
    batch = trainer.data_collator(rows)
    weights = {
        p.untyped_storage().data_ptr() for p in [*trainer.model.parameters(), *trainer.encoder.model.parameters()]
    }
    kept: dict[int, torch.Tensor] = {}

    def keep(x):
        if x.untyped_storage().data_ptr() not in weights:
            kept[x.untyped_storage().data_ptr()] = x  # held, so that no address is used twice
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), trainer.accelerator.autocast():
        loss = trainer.compute_loss(trainer.model, batch)
    assert loss.requires_grad
    return sum(x.untyped_storage().nbytes() for x in kept.values()), budget(
        trainer.model, trainer.args, LENGTH
    ).batch_bytes


@pytest.mark.parametrize(
    ("lora", "fields"),
    [(False, {}), (True, {}), (False, {"bf16": True}), (False, {CHECKPOINTING: True})],
    ids=["full", "lora", "bf16", "checkpointing"],
)
def test_announced_activations_of_a_block_are_those_that_autograd_keeps(lora, fields, tmp_path):
    """The difference that two more blocks make, which is free of everything else."""
    (few, announced_few), (many, announced_many) = (
        kept_for_backward(tmp_path, layers, lora, **fields) for layers in (2, 4)
    )
    assert many - few == pytest.approx(announced_many - announced_few, rel=0.2)


def test_mirror_teachers_and_longer_vocabularies_need_more():
    model = tiny_model("mdlm", vocab_size=5000)
    costs = [
        budget(model, DriftConfig(objective=objective, per_device_train_batch_size=64, use_cpu=True), 16).batch_bytes
        for objective in ("feature", "mirror_kl")
    ]
    assert costs[1] - costs[0] == 4 * 5000 * 64 * 16


def test_gradients_count_beside_activations_only_if_they_are_accumulated():
    model = tiny_model("mdlm")
    one, two = (
        budget(model, DriftConfig(gradient_accumulation_steps=steps, use_cpu=True), 16).batch_bytes for steps in (1, 2)
    )
    assert two - one == 4 * model.num_parameters()


def test_the_announcement_says_batch_memory_and_time():
    config = DriftConfig(per_device_train_batch_size=3, gradient_accumulation_steps=4, use_cpu=True)
    text = describe(Budget(2e12, 3 * GIB, GIB // 2), config, num_steps=100, rate=4e11)
    assert "Global batch 12 = 3 rows a device x 4 accumulated x 1 processes." in text
    assert "3.00 GiB for weights, optimizer and encoder, about 0.50 GiB for activations" in text
    assert "8.00 TFLOP a step and device, at 0.40 TFLOP/s" in text and "at least 33 min for 100 steps" in text
