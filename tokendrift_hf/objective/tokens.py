"""Hard tokens from logits: draws of the model's prediction, and the log-probabilities of chosen ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..hub.denoiser_tokendrift import draw
from .lift import predicted_rows


@torch.no_grad()
def draw_tokens(logits: Tensor, predicted: Tensor, uniforms: Tensor, *, chunk_size: int = 256) -> Tensor:
    """Independent draws from softmax(logits) at the predicted positions.

    The distribution function is inverted in the precision of `uniforms`: with float64 rare tokens come as often as they
    should, which a float32 draw over a large vocabulary cannot promise. A token of probability 0 is never drawn.

    Args:
        logits: ``[B, L, V]``.
        predicted: ``[B, L]`` bool.
        uniforms: ``[K, B, L]`` in [0, 1), one for each draw.
        chunk_size: positions at a time.

    Returns:
        ids ``[N, K]``, N the number of predicted positions, in the order of `predicted_rows`.
    """
    rows, flat, count = predicted_rows(logits, predicted), logits.reshape(-1, logits.shape[-1]), len(uniforms)
    if logits.device.type == "mps":
        uniforms = uniforms.float()
    uniforms = uniforms.flatten(1).T.to(logits.device)
    ids = rows.new_empty(len(rows), count)
    for chunk in torch.arange(len(rows), device=rows.device).split(chunk_size):
        p = torch.softmax(flat[rows[chunk]], dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        which = torch.arange(len(chunk), device=rows.device).repeat_interleave(count)
        ids[chunk] = draw(p, uniforms[rows[chunk]].flatten(), which).view(-1, count)
    return ids


def token_log_probs(logits: Tensor, predicted: Tensor, ids: Tensor, *, chunk_size: int = 512) -> Tensor:
    """log softmax(logits) of chosen ids at the predicted positions, from the log-normaliser alone.

    Nothing of the size of the logits is kept: backward takes the softmax anew, a chunk of positions at a time.

    Args:
        logits: ``[B, L, V]``.
        predicted: ``[B, L]`` bool.
        ids: ``[N, K]``, K ids for each predicted position, in the order of `predicted_rows`.
        chunk_size: positions at a time.

    Returns:
        ``[N, K]``, float32 at least, differentiable once with respect to the logits.
    """
    return _LogProbs.apply(logits, predicted_rows(logits, predicted), ids, chunk_size)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Tensor, ids: Tensor, chunk_size: int) -> Tensor:
        flat, dtype = logits.reshape(-1, logits.shape[-1]), torch.promote_types(logits.dtype, torch.float32)
        log_z = flat.new_empty(len(rows), 1, dtype=dtype)
        log_p = flat.new_empty(ids.shape, dtype=dtype)
        for chunk in torch.arange(len(rows), device=rows.device).split(chunk_size):
            ell = flat[rows[chunk]].to(dtype)
            log_z[chunk] = ell.logsumexp(-1, keepdim=True)
            log_p[chunk] = ell.gather(1, ids[chunk]) - log_z[chunk]
        ctx.save_for_backward(logits, rows, ids, log_z)
        ctx.chunk_size = chunk_size
        return log_p

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, rows, ids, log_z = ctx.saved_tensors
        flat = logits.reshape(-1, logits.shape[-1])
        grad_logits = torch.zeros_like(flat)
        for chunk in torch.arange(len(rows), device=rows.device).split(ctx.chunk_size):
            p = (flat[rows[chunk]].to(log_z.dtype) - log_z[chunk]).exp()
            gradient = p.mul_(-grad[chunk].sum(-1, keepdim=True)).scatter_add_(1, ids[chunk], grad[chunk])
            grad_logits[rows[chunk]] = gradient.to(grad_logits.dtype)
        return grad_logits.view_as(logits), None, None, None
