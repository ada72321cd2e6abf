"""Models without the wrappers of torch.compile."""

from __future__ import annotations

from accelerate.utils import is_compiled_module
from torch import nn


def uncompiled(model: nn.Module) -> nn.Module:
    """The model, and every module in it, as it was before `torch.compile`. What is no module is returned as it is.

    The wrapper would put `_orig_mod.` into the name of every saved weight, which nothing can load.
    """
    if not isinstance(model, nn.Module):
        return model
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if is_compiled_module(child) and not is_compiled_module(parent):
                setattr(parent, name, child._orig_mod)
    return model._orig_mod if is_compiled_module(model) else model
