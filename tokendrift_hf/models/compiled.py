"""torch.compile: models without its wrappers, and blocks that are compiled in place."""

from __future__ import annotations

import logging

import torch
from accelerate.utils import is_compiled_module
from torch import nn

from .lora import base_of

logger = logging.getLogger(__name__)

# Blocks of all models of a process share one piece of code, which is compiled for each of their uses: with gradients
# and without, with adapters, under autocast, for each shape. torch gives up at 8, and says so in a line of its own.
VARIANTS = 256


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


def compile_blocks(*models: nn.Module | None, backend: str = "inductor", mode: str | None = None) -> None:
    """Let torch compile every block of the models when it first runs: one small graph that all blocks share.

    It happens in place (`nn.Module.compile`), so weights keep their names, FSDP2's hooks keep working, and what is
    saved is a plain model. accelerate's `compile_regions` builds another model, whose hidden states and head would be
    out of reach.

    Args:
        models: of this package, also with adapters or as custom code. None and others are left as they are.
        backend: of `torch.compile`.
        mode: likewise.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    for model in models:
        base = None if model is None else base_of(model)
        blocks = getattr(base, "blocks", None) or getattr(getattr(base, "backbone", None), "blocks", ())
        for block in blocks:
            block.compile(backend=backend, mode=mode)
    logger.warning(
        "torch_compile: the blocks are compiled (%s) while they first run. That first step takes up to some minutes "
        "longer, and so does the first one of another length.",
        backend,
    )
