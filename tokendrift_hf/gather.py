"""The rows of all processes: whose are which, and the features of all of them."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import Tensor


def row_counts(accelerator: Accelerator, x: Tensor) -> list[int]:
    """``len(x)`` on every process, in order of rank."""
    if accelerator.num_processes == 1:
        return [len(x)]
    return accelerator.gather(torch.tensor([len(x)], device=x.device)).tolist()


def own_rows(accelerator: Accelerator, x: Tensor) -> tuple[range, int]:
    """The positions of this process's rows among those of all processes, and the number of all."""
    counts = row_counts(accelerator, x)
    first = sum(counts[: accelerator.process_index])
    return range(first, first + len(x)), sum(counts)


def gather_rows(accelerator: Accelerator, x: Tensor) -> Tensor:
    """The rows of all processes in order of rank, also when they hold different numbers of them. No gradient."""
    if accelerator.num_processes == 1:
        return x.detach()
    counts = row_counts(accelerator, x)
    gathered = accelerator.gather(accelerator.pad_across_processes(x.detach())).split(max(counts))
    return torch.cat([rows[:count] for rows, count in zip(gathered, counts, strict=True)])


def sum_over_processes(accelerator: Accelerator, x: Tensor) -> Tensor:
    """The sum over processes of a tensor of one shape on all of them. No gradient."""
    return accelerator.reduce(x, "sum") if accelerator.num_processes > 1 else x
