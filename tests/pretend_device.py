"""A device without float64 that needs no such device: some CPU tensors pretend to lie on it."""

from __future__ import annotations

import traceback

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE, CPU = torch.device("mps"), torch.device("cpu")


WAITING = [getattr(torch.Tensor, name) for name in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__")]
WAITING += [getattr(torch.Tensor, name) for name in ("cpu", "numpy", "nonzero", "masked_select", "equal", "unique")]
WAITING += [torch.nonzero, torch.masked_select, torch.equal, torch.unique]
INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


def _waits(function, args: tuple) -> bool:
    """Whether a function has to know a value or a size that only the device knows."""
    if function in INDEXING:  # by a mask, whose number of ones is the size
        return any(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in tree_leaves(args[1]))
    return function in WAITING


def is_there(x) -> bool:
    return isinstance(x, torch.Tensor) and getattr(x, "_pretends", False)


class PretendDevice(TorchFunctionMode):
    """Inside, tensors that were put on it say that they are on `DEVICE`, as do all that are made of them.

    Attributes:
        count: how many results of torch's functions have been there.
        doubles: where float64 tensors came to be there: the end of the stack, each.
        waits: where the host would have waited for the device to learn a value or a size: likewise.
    """

    def __init__(self):
        super().__init__()
        self.count, self.doubles, self.waits = 0, [], []

    def put(self, *things) -> None:
        """Put tensors, or all parameters and buffers of modules, on the device."""
        for thing in things:
            tensors = [thing]
            if isinstance(thing, torch.nn.Module):
                tensors = [*thing.parameters(), *thing.buffers()]
            for tensor in tensors:
                tensor._pretends = True

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function == torch.Tensor.device.__get__:
            return DEVICE if is_there(args[0]) else CPU
        leaves = tree_leaves((args, kwargs))
        there = any(map(is_there, leaves))
        if function is torch.Tensor.cpu:
            there = False
        if there and _waits(function, args):
            self.waits.append("".join(traceback.format_stack(limit=6)[:-1]))
        named = [x for x in leaves if isinstance(x, torch.device)]
        if named:
            there = named[0] == DEVICE
        args, kwargs = tree_map(lambda x: CPU if isinstance(x, torch.device) else x, (args, kwargs))
        result = function(*args, **kwargs)
        if is_there(result) and not there:  # on one device a copy to the CPU is the tensor itself
            result = result.view_as(result)
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                x._pretends = there
                self.count += there
                if there and x.dtype == torch.float64:
                    self.doubles.append("".join(traceback.format_stack(limit=5)[:-1]))
        return result
