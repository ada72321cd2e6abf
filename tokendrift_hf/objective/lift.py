"""The soft-token lift: expected embeddings under the model's distribution, section 3.1 of the TokenDrift paper."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..hub.process_tokendrift import at_least_float32


def soft_lift(
    logits: Tensor,
    embedding: Tensor,
    input_ids: Tensor,
    predicted: Tensor,
    *,
    mode: str = "soft",
    chunk_size: int = 512,
) -> Tensor:
    """Encoder inputs: softmax(logits) @ E at the predicted positions, E[input_ids] elsewhere.

    Equal to the plain expression in value and gradient, but no probabilities are kept: the predicted positions pass
    through in chunks, and backward computes their softmax again from the logits. Beside the logits and their gradient
    the peak is a few ``[chunk_size, V]`` tensors.

    Args:
        logits: ``[B, L, V]``. Columns of -inf or about -1e6 (the mask token) get probability 0 and gradient 0.
        embedding: E, ``[V, d]``, the frozen encoder's table: no gradient flows to it. Its dtype is that of the product
            and of the result; the softmax is float32 at least, whatever autocast says.
        input_ids: ``[B, L]``, the corrupted ids.
        predicted: ``[B, L]`` bool, the positions M that are lifted.
        mode: ``"soft"``, or ``"hard_st"`` (straight-through): forward is E[argmax], backward that of ``"soft"``.
        chunk_size: positions at a time, >= 1.

    Returns:
        ``[B, L, d]``, differentiable once with respect to the logits.

    Raises:
        ValueError: shapes that do not fit, ``predicted`` not bool, unknown mode, ``chunk_size`` < 1.
    """
    if logits.dim() != 3 or embedding.dim() != 2 or logits.shape[2] != embedding.shape[0]:
        raise ValueError(
            f"Need logits [B, L, V] and an embedding [V, d] of the same vocabulary, got {list(logits.shape)} and "
            f"{list(embedding.shape)}. The encoder must share the model's tokenizer."
        )
    if input_ids.shape != logits.shape[:2]:
        raise ValueError(f"input_ids must be {list(logits.shape[:2])} like the logits, got {list(input_ids.shape)}.")
    if mode not in ("soft", "hard_st"):
        raise ValueError(f"mode must be 'soft' or 'hard_st', got {mode!r}.")
    rows = predicted_rows(logits, predicted)
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}.")
    return _Lift.apply(logits, embedding.detach(), input_ids, rows, mode == "hard_st", chunk_size)


@torch.no_grad()
def token_entropy(logits: Tensor, predicted: Tensor, *, chunk_size: int = 512) -> Tensor:
    """Mean entropy of softmax(logits) over the predicted positions, in nats; a scalar, 0 where nothing is predicted.

    Args:
        logits: ``[B, L, V]``.
        predicted: ``[B, L]`` bool.
        chunk_size: positions at a time.
    """
    rows, flat = predicted_rows(logits, predicted), logits.reshape(-1, logits.shape[-1])
    total = flat.new_zeros((), dtype=at_least_float32(logits.dtype))
    for chunk in rows.split(chunk_size):
        total += torch.special.entr(_probabilities(flat[chunk])).sum()
    return total / max(len(rows), 1)


def predicted_rows(logits: Tensor, predicted: Tensor) -> Tensor:
    """Indices of the predicted positions among the B * L rows of the logits.

    Raises:
        ValueError: ``predicted`` is not bool or not of shape ``[B, L]``.
    """
    if predicted.dtype != torch.bool or predicted.shape != logits.shape[:2]:
        raise ValueError(
            f"predicted must be a bool tensor of shape {list(logits.shape[:2])}, got {predicted.dtype} of shape "
            f"{list(predicted.shape)}."
        )
    return predicted.flatten().nonzero().squeeze(1)


def _probabilities(logits: Tensor) -> Tensor:
    return torch.softmax(logits, dim=-1, dtype=at_least_float32(logits.dtype))


class _Lift(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, embedding: Tensor, input_ids: Tensor, rows: Tensor, hard: bool, chunk_size: int
    ) -> Tensor:
        ctx.save_for_backward(logits, embedding, rows)
        ctx.chunk_size = chunk_size
        flat = logits.reshape(-1, logits.shape[-1])
        embeds = F.embedding(input_ids, embedding)
        out = embeds.view(-1, embedding.shape[1])
        with torch.autocast(logits.device.type, enabled=False):
            for chunk in rows.split(chunk_size):
                if hard:
                    out[chunk] = F.embedding(flat[chunk].argmax(dim=-1), embedding)
                else:
                    out[chunk] = _probabilities(flat[chunk]).to(embedding.dtype) @ embedding
        return embeds

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_embeds: Tensor) -> tuple[Tensor | None, ...]:
        logits, embedding, rows = ctx.saved_tensors
        flat = logits.reshape(-1, logits.shape[-1])
        grad_out = grad_embeds.reshape(-1, embedding.shape[1])
        grad_logits = torch.zeros_like(flat)
        with torch.autocast(logits.device.type, enabled=False):
            for chunk in rows.split(ctx.chunk_size):
                p = _probabilities(flat[chunk])
                grad_p = (grad_out[chunk].to(embedding.dtype) @ embedding.T).to(p.dtype)
                grad_p -= (p * grad_p).sum(dim=-1, keepdim=True)
                grad_logits[chunk] = (p * grad_p).to(grad_logits.dtype)
        return grad_logits.view_as(logits), None, None, None, None, None
