"""A random order of the rows from the seed and the epoch alone, so that a resumed run finds it again."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class EpochSampler(Sampler[int]):
    """A sampler with a `generator`, which otherwise would draw from torch's global one, seeded anew in every epoch.

    Args:
        sampler: transformers' `LengthGroupedSampler`, torch's `RandomSampler` and the like.
        seed: of the order.
    """

    def __init__(self, sampler: Sampler[int], seed: int):
        self.sampler, self.seed, self.epoch = sampler, seed, 0
        self.sampler.generator = torch.Generator()

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        self.sampler.generator.manual_seed(self.seed + self.epoch)
        yield from self.sampler

    def set_epoch(self, epoch: int) -> None:
        """Called by accelerate's data loader at the beginning of an epoch."""
        self.epoch = epoch
