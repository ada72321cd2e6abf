"""The backend of processes on CPUs, made to do what nccl does, with which weights are split on GPUs."""

from __future__ import annotations

import torch
import torch.distributed as dist


def make_averages_averages() -> None:
    """`reduce_scatter_tensor` with ReduceOp.AVG divides by the number of processes, as FSDP2 relies on.

    gloo of torch 2.7 gives the sum without a word (https://github.com/pytorch/pytorch/issues/162338). Where it
    averages, nothing is replaced.
    """
    size, average = dist.get_world_size(), torch.zeros(1)
    dist.reduce_scatter_tensor(average, torch.ones(size), op=dist.ReduceOp.AVG)
    if average.item() == 1:
        return
    assert average.item() == size
    original = dist.reduce_scatter_tensor

    def reduce_scatter_tensor(output, input, op=dist.ReduceOp.SUM, group=None, async_op=False):
        original(output, input, op, group)
        assert not async_op
        if op == dist.ReduceOp.AVG:
            output /= dist.get_world_size(group)

    dist.reduce_scatter_tensor = reduce_scatter_tensor
