"""CorruptedBatch: clean rows, their noisy version, and which positions count for what."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..hub.process_tokendrift import AbsorbingProcess, UniformProcess
from .noise import Noise


@dataclass(frozen=True)
class CorruptedBatch:
    """Everything is ``[B, L]`` but t.

    Attributes:
        x_0: clean ids.
        x_t: noisy ids, equal to x_0 where a position is not free.
        t: ``[B]``, float32.
        exists: bool, no padding.
        free: bool, neither padding nor prompt nor an id that the process keeps, so corruptible.
        predicted: bool, M of the paper: a part of the free positions.
        attention_mask: as the inputs had it. None if every position exists.
        noise: what corrupted these rows, and has more for an objective that draws.
    """

    x_0: Tensor
    x_t: Tensor
    t: Tensor
    exists: Tensor
    free: Tensor
    predicted: Tensor
    attention_mask: Tensor | None
    noise: Noise

    @cached_property
    def positions(self) -> Tensor:
        """``[N]``: where the predicted positions lie in the flattened batch. The host waits for the device, once."""
        return self.predicted.flatten().nonzero().squeeze(1)

    def at_predicted(self, x: Tensor) -> Tensor:
        """The entries ``[N, ...]`` of a tensor ``[B, L, ...]`` at the predicted positions."""
        return x.flatten(0, 1).index_select(0, self.positions)


def corrupt(
    process: AbsorbingProcess | UniformProcess, inputs: dict[str, Tensor], noise: Noise, t: Tensor
) -> CorruptedBatch:
    """Corrupt a collated batch at the times `t`, ``[B]`` in [0, 1].

    Args:
        process: the model's.
        inputs: `input_ids` ``[B, L]``, and optionally of the same shape `attention_mask` (0: padding), `prompt_mask`
            (1: prompt) and `labels` (-100: prompt). The result is on the device of `input_ids`.
        noise: of these rows.
        t: diffusion times.
    """
    x_0 = inputs["input_ids"]
    # First to float32, since not every device has float64.
    t, uniforms = (x.to(torch.float32).to(x_0.device) for x in (t, noise.uniforms))
    exists, free = positions(process, inputs)
    x_t = torch.where(free, process.corrupt(x_0, t, uniforms, noise.random_tokens.to(x_0.device)), x_0)
    predicted = process.predicted_positions(x_t) & free
    return CorruptedBatch(x_0, x_t, t, exists, free, predicted, inputs.get("attention_mask"), noise)


def positions(process: AbsorbingProcess | UniformProcess, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Which positions of a collated batch exist, and which are free (`CorruptedBatch`): bool ``[B, L]`` each."""
    exists = torch.ones_like(inputs["input_ids"], dtype=torch.bool)
    if "attention_mask" in inputs:
        exists = inputs["attention_mask"].bool()
    free = exists
    if "prompt_mask" in inputs:
        free = free & ~inputs["prompt_mask"].bool()
    if "labels" in inputs:
        free = free & (inputs["labels"] != -100)
    return exists, free & process.corruptible(inputs["input_ids"])
