"""The rows of all processes: whose are which, and the features of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor


def row_counts(accelerator: Accelerator, x: Tensor) -> list[int]:
    """``len(x)`` on every process, in order of rank."""
    if accelerator.num_processes == 1:
        return [len(x)]
    return accelerator.gather(torch.tensor([len(x)], device=x.device)).tolist()


def own_rows(accelerator: Accelerator, counts: Sequence[int]) -> range:
    """The positions of this process's rows among those of all processes, which hold `counts` of them."""
    first = sum(counts[: accelerator.process_index])
    return range(first, first + counts[accelerator.process_index])


def gather_rows(accelerator: Accelerator, x: Tensor, counts: Sequence[int]) -> Tensor:
    """The rows of all processes in order of rank, which hold `counts` of them. No gradient."""
    x = x.detach()
    if accelerator.num_processes == 1:
        return x
    padding = x.new_zeros(max(counts) - len(x), *x.shape[1:])
    gathered = accelerator.gather(torch.cat([x, padding])).split(max(counts))
    return torch.cat([rows[:count] for rows, count in zip(gathered, counts, strict=True)])


def sum_over_processes(accelerator: Accelerator, x: Tensor) -> Tensor:
    """The sum over processes of a tensor of one shape on all of them. No gradient."""
    return accelerator.reduce(x, "sum") if accelerator.num_processes > 1 else x


def mean_over_processes(values: list[float]) -> list[float]:
    """The mean of each of some numbers over all processes. They travel as Python's, in full precision."""
    return [fmean(column) for column in zip(*gather_object([values]), strict=True)]


class AllProcesses:
    """What an objective asks of the processes of a run (`objective.processes.OneProcess` for more than one).

    Args:
        accelerator: of the Trainer.
        counts: the rows of the micro-batch on every process, in order of rank.
        num_tokens: the tokens of the optimizer step, on all processes, over the number of its micro-batches. None: the
            micro-batch is the step.
    """

    def __init__(self, accelerator: Accelerator, counts: Sequence[int], num_tokens: Tensor | None = None):
        self.accelerator, self.counts, self.num_tokens = accelerator, counts, num_tokens
        self.share = counts[accelerator.process_index] / sum(counts)

    def gather(self, x: Tensor, per_row: int = 1) -> tuple[Tensor, range]:
        """``x`` of all processes without gradient, ``per_row`` entries a row of the batch, and where its own lie."""
        counts = [count * per_row for count in self.counts]
        return gather_rows(self.accelerator, x, counts), own_rows(self.accelerator, counts)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over processes of a tensor that has one shape on all of them. No gradient."""
        return sum_over_processes(self.accelerator, x.detach())

    def min(self, x: Tensor) -> Tensor:
        """The smallest of the scalars of all processes."""
        return self.accelerator.gather(x.detach().reshape(1)).min()

    def token_mean(self, totals: Tensor, tokens: Tensor) -> Tensor:
        """The share of this process in a mean over the tokens of a step.

        Summed over the processes, and averaged over the micro-batches of the step, these shares are the sum over all
        its rows divided by all its tokens, however the rows were shared out.

        Args:
            totals: ``[B]``, the sums over the tokens of a row.
            tokens: ``[B]``, how many these are.
        """
        num_tokens = self.sum(tokens.sum()) if self.num_tokens is None else self.num_tokens
        return totals.sum() / num_tokens.clamp_min(1)
