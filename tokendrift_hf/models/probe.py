"""A model's own forward pass, looked at from outside: its blocks, its head, and whether our way through it is right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .adaptation import Adaptation


@contextmanager
def removed_after(handles: list) -> Iterator[None]:
    """Remove hooks in the end, whatever happens."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def block_list(model: PreTrainedModel) -> str:
    """The name of the list of a model's blocks.

    Raises:
        ValueError: it has none.
    """
    count = getattr(model.config, "num_hidden_layers", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name
    raise ValueError(
        f"{type(model).__name__} has no list of its {count} blocks. Models that use one block several times (ALBERT) "
        "or pool positions away (Funnel) cannot be adapted."
    )


def probe_rows(model, adaptation: Adaptation) -> Tensor:
    """Three rows [3, L] of a few ids for `check`: the second has another last id, the third another one before it."""
    usable = set(range(adaptation.num_tokens)) - {adaptation.mask_token_id, *adaptation.kept_token_ids}
    some = sorted(usable)[:: max(1, len(usable) // 8)][: min(8, adaptation.max_length)]
    rows = torch.tensor([some] * 3, device=model.device)
    rows[:, 0], rows[1, -1], rows[2, -2] = adaptation.mask_token_id, some[0], some[0]
    return rows


def trace(model: PreTrainedModel, last_block: nn.Module, ids: Tensor) -> tuple[Tensor, tuple[str, ...]]:
    """The family's own logits of the first row, and the outermost modules that run after the last block."""
    names = {module: name for name, module in model.named_modules()}
    order: list[str] = []
    inside: list[nn.Module] = []
    passed = False

    def enter(module, args):
        if passed:
            if not inside:
                order.append(names[module])
            inside.append(module)

    def leave(module, args, output):
        nonlocal passed
        if inside and inside[-1] is module:
            inside.pop()
        passed = passed or module is last_block

    handles = [module.register_forward_pre_hook(enter) for module in names]
    handles += [module.register_forward_hook(leave) for module in names]
    with removed_after(handles):
        output = model(input_ids=ids[:1])
    return output.logits, tuple(order)


def check(model, ids: Tensor, expected: Tensor) -> None:
    """That our logits are the family's own, that both sides are seen, and that padding is not.

    Raises:
        ValueError: one of these does not hold.
    """
    name = type(model).__name__
    predicted = torch.ones(model.config.vocab_size, dtype=torch.bool, device=ids.device)
    predicted[model.never_predicted] = False

    def logits(row, exists=None):
        return model(input_ids=row[None], attention_mask=exists).logits[0, :, predicted]

    # Our logits, from embeddings and the modules of the head, are those of the family's own forward.
    first, second, third = ids
    if model.adaptation.shift:
        expected = torch.cat([expected[:, :1], expected[:, :-1]], dim=1)
    plain, expected = logits(first), expected[0, :, predicted]
    error, scale = (plain - expected).abs().max(), expected.abs().max()
    if not error <= (1e-4 if expected.dtype == torch.float32 else 3e-2) * scale:
        raise ValueError(
            f"{name}: the modules after its last block ({', '.join(model.head_names)}), run in this order on "
            f"embeddings, give other logits than its own forward (they differ by {float(error):.3g}). Its head or its "
            "embedding does more than its modules say, so it cannot be adapted."
        )
    # A later token changes an earlier position, also where the mask has zeros.
    exists = torch.ones_like(ids[:1])
    exists[0, -1] = 0
    masked = logits(first, exists)
    if plain[0].equal(logits(second)[0]) or masked[0].equal(logits(third, exists)[0]):
        raise ValueError(
            f"{name} is causal: a later token changes nothing at an earlier position, so masks could be filled from "
            "the left alone. Set config.is_causal = False if it was trained to see both sides (transformers 5.24 and "
            "later; classes that ignore it cannot be adapted)."
        )
    # A position that does not exist changes nothing; experts may round differently.
    leak, effect = (
        (one - other)[:-1].abs().max() for one, other in ((masked, logits(second, exists)), (plain, logits(second)))
    )
    if leak > 1e-3 * effect:
        raise ValueError(
            f"{name} sees padding: a token that attention_mask leaves out changes other positions. Rows of unequal "
            "length would depend on their neighbours, so it cannot be adapted."
        )
