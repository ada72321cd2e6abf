"""Corruption noise as a pure function of (seed, step, position of the row): no state, hence nothing to restore.

The same run on one or several processes, or resumed, sees the same noise. Evaluation cannot disturb it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

TRAIN, EVALUATE = 0, 1  # the two streams of noise
DRAWS = 1  # ends the key of what is drawn later, and is not 0, which numpy takes for no further number
# t is drawn from [1e-3, 1] (sampling_eps of the reference): the weights 1/t of smaller times vary too much.
SMALLEST_TIME = 1e-3
GOLDEN_RATIO = 0.6180339887498949


@dataclass(frozen=True)
class Noise:
    """What corrupting B rows of L tokens takes.

    Attributes:
        time: ``[B]``, uniform in [0, 1). The caller turns it into t.
        uniforms: ``[B, L]`` in [0, 1): which positions are corrupted.
        random_tokens: ``[B, L]``, ids drawn uniformly from the whole vocabulary.
        order: ``[B, L]``, uniform in [0, 1): the S largest choose S positions at random.
        key: what names this noise, as `row_noise` was given it.
        rows: the global positions of the rows.
    """

    time: Tensor
    uniforms: Tensor
    random_tokens: Tensor
    order: Tensor
    key: tuple[int, ...]
    rows: Sequence[int]

    def draws(self, count: int) -> Tensor:
        """Further uniforms in [0, 1) for `count` draws of every token, ``[count, B, L]``, independent of the others.

        Those of position l of row i depend on (`key`, i, l, `count`) alone.
        """
        out = np.empty((len(self.rows), self.order.shape[1], count))
        for i, row in enumerate(self.rows):
            np.random.default_rng((*self.key, row, DRAWS)).random(out=out[i])
        return torch.from_numpy(out).permute(2, 0, 1)


def row_noise(key: tuple[int, ...], rows: Sequence[int], length: int, vocab_size: int) -> Noise:
    """The noise of the rows at the global positions `rows`.

    Position l of row i depends on (`key`, i, l) alone: neither the rest of the batch nor its padding matters.

    Args:
        key: whole numbers >= 0 that name the draw, such as (seed, stream, optimizer step, micro-step).
        rows: positions of the rows in the global batch or the data set.
        length: L.
        vocab_size: V.
    """
    time, positions = np.empty(len(rows)), np.empty((len(rows), length, 3))
    for i, row in enumerate(rows):
        generator = np.random.default_rng((*key, row))
        time[i] = generator.random()
        generator.random(out=positions[i])  # position by position, so that a longer row begins like a shorter one
    uniforms, tokens, order = torch.from_numpy(positions).unbind(-1)
    return Noise(torch.from_numpy(time), uniforms, (tokens * vocab_size).long(), order, key, rows)


def spread_times(rows: Sequence[int]) -> Tensor:
    """Uniforms in [0, 1) for the rows of a data set that cover it evenly, whatever the batch size: frac(i * phi)."""
    return (torch.tensor(rows, dtype=torch.float64) * GOLDEN_RATIO) % 1
