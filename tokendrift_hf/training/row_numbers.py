"""Rows of held-out text that know their number, and a mean over them in which every row counts once.

Among several processes some rows are repeated, so that all have equally many, and which process gets which depends on
the launch. A number that comes with the row makes the result independent of all that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

ROW_NUMBER = "row_number"


class NumberedRows(Dataset):
    """The rows of a data set with a length, each with its number as one column more."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict:
        return {**self.rows[i], ROW_NUMBER: i}


class NumberedStream(IterableDataset):
    """The same for a stream. With several workers each has a part of it, and numbers of its own."""

    def __init__(self, rows: Iterable[dict]):
        self.rows = rows

    def __iter__(self) -> Iterator[dict]:
        worker = get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for i, row in enumerate(self.rows):
            yield {**row, ROW_NUMBER: first + i * stride}


class NumberedCollator:
    """Collates numbered rows: the batch of `collate` without the numbers, and then the numbers ``[B]``."""

    def __init__(self, collate: Callable[[list[dict]], dict[str, Tensor]]):
        self.collate = collate

    def __call__(self, rows: list[dict]) -> dict[str, Tensor]:
        batch = self.collate([{name: row[name] for name in row if name != ROW_NUMBER} for row in rows])
        batch[ROW_NUMBER] = torch.tensor([row[ROW_NUMBER] for row in rows])
        return batch


class RowSums:
    """The NELBO and the number of tokens of every row seen."""

    def __init__(self):
        self._rows: dict[int, tuple[float, int]] = {}

    def add(self, numbers: list[int], totals: Tensor, tokens: Tensor) -> None:
        """Take in rows: their numbers, NELBOs in nats ``[B]`` and counts of tokens ``[B]``."""
        self._rows |= dict(zip(numbers, zip(totals.tolist(), tokens.tolist(), strict=True), strict=True))

    def mean(self) -> float:
        """The NELBO in nats a token, over the rows of all processes. Every process has to call it.

        Raises:
            ValueError: there is no row, or no row has a token to predict.
        """
        rows = dict(gather_object(list(self._rows.items())))
        tokens = sum(count for _, count in rows.values())
        if not tokens:
            raise ValueError(
                f"The {len(rows)} rows of held-out text have no token to predict: all of it is padding or prompt. "
                "Check attention_mask, prompt_mask and labels."
            )
        return math.fsum(rows[number][0] for number in sorted(rows)) / tokens
