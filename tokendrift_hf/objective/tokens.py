"""Hard tokens from predictions: draws, and the log-probabilities of chosen ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..hub.denoiser_tokendrift import draw
from .lift import entropy_of, probabilities
from .predictions import Predictions


@torch.no_grad()
def draw_tokens(
    logits: Tensor | Predictions, predicted: Tensor, uniforms: Tensor, *, chunk_size: int | None = None
) -> Tensor:
    """Independent draws from softmax(logits) at the predicted positions.

    The distribution function is inverted in the precision of `uniforms`: with float64 rare tokens come as often as they
    should, which a float32 draw over a large vocabulary cannot promise. A token of probability 0 is never drawn.

    Args:
        logits: ``[B, L, V]``, or predictions.
        predicted: ``[B, L]`` bool.
        uniforms: ``[K, B, L]`` in [0, 1), one for each draw.
        chunk_size: positions at a time.

    Returns:
        ids ``[N, K]``, N the number of predicted positions, row by row.
    """
    predictions, count = Predictions.of(logits, predicted, chunk_size), len(uniforms)
    if predicted.device.type == "mps":
        uniforms = uniforms.float()

    def drawn(ell: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        p = probabilities(ell)
        which = torch.arange(len(p), device=p.device).repeat_interleave(count)
        return draw(p, u.flatten(), which).view(-1, count), entropy_of(p)

    ids, entropy = predictions.map(drawn, predictions.at(uniforms.to(predicted.device).movedim(0, -1)))
    predictions.entropy = entropy.sum() / max(len(entropy), 1)
    return ids


def log_probs(logits: Tensor, ids: Tensor, without: int | None = None) -> Tensor:
    """log softmax(logits) of ids: ``[n, V]`` and ``[n, K]`` -> ``[n, K]``, from the log-normaliser alone.

    Args:
        without: an id that has no probability whatever its logit, and is not asked for. None: there is none.
    """
    return _LogProbs.apply(logits, ids, without)


class _LogProbs(torch.autograd.Function):
    """In as few passes over the logits as it takes. Beside them nothing of their size is kept."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, without: int | None) -> Tensor:
        ell = logits.to(torch.promote_types(logits.dtype, torch.float32))
        parts = [ell] if without is None else [ell[:, :without], ell[:, without + 1 :]]
        log_z = torch.stack([part.logsumexp(-1) for part in parts if part.shape[1]]).logsumexp(0)[:, None]
        ctx.save_for_backward(logits, ids, log_z)
        ctx.without = without
        return ell.gather(1, ids) - log_z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:
        logits, ids, log_z = ctx.saved_tensors
        gradient = (logits.to(log_z.dtype) - log_z).exp_()
        if ctx.without is not None:
            gradient[:, ctx.without] = 0
        gradient.mul_(-cotangent.sum(-1, keepdim=True)).scatter_add_(1, ids, cotangent)
        return gradient.to(logits.dtype), None, None


def token_log_probs(
    logits: Tensor | Predictions, predicted: Tensor, ids: Tensor, *, chunk_size: int | None = None
) -> Tensor:
    """log softmax(logits) of chosen ids at the predicted positions.

    Args:
        logits: ``[B, L, V]``, or predictions.
        predicted: ``[B, L]`` bool.
        ids: ``[N, K]``, K ids for each predicted position, row by row.
        chunk_size: positions at a time.

    Returns:
        ``[N, K]``, float32 at least, differentiable once with respect to the logits.
    """
    predictions = Predictions.of(logits, predicted, chunk_size)
    log_p, entropy = predictions.map(
        lambda ell, ids: (log_probs(ell, ids), entropy_of(probabilities(ell.detach()))), ids
    )
    predictions.entropy = entropy.sum() / max(len(entropy), 1)
    return log_p
