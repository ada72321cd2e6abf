"""The soft-token lift: expected embeddings under the model's distribution, section 3.1 of the TokenDrift paper."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..hub.denoiser_tokendrift import draw
from .predictions import Predictions

MODES = ("soft", "hard_st", "sampled_st")


def soft_lift(
    logits: Tensor | Predictions,
    embedding: Tensor,
    input_ids: Tensor,
    predicted: Tensor,
    *,
    mode: str = "soft",
    uniforms: Tensor | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Encoder inputs: softmax(logits) @ E at the predicted positions, E[input_ids] elsewhere.

    Equal to the plain expression in value and gradient, but where there is more than one chunk no probabilities are
    kept: the predicted positions pass through in chunks, and backward computes their softmax again.

    Args:
        logits: ``[B, L, V]``, or predictions. Columns of -inf or about -1e6 (the mask token) get probability 0 and
            gradient 0.
        embedding: E, ``[V, d]``, the frozen encoder's table: no gradient flows to it. Its dtype is that of the product
            and of the result. The softmax is float32 at least, whatever autocast says.
        input_ids: ``[B, L]``, the corrupted ids.
        predicted: ``[B, L]`` bool, the positions M that are lifted.
        mode: ``"soft"``, or straight-through, with the backward of ``"soft"``: ``"hard_st"`` has E[argmax] as forward,
            ``"sampled_st"`` E of a token drawn from the prediction.
        uniforms: ``[B, L]`` in [0, 1), float64 where the device has it: what ``"sampled_st"`` draws with.
        chunk_size: positions at a time, >= 1.

    Returns:
        ``[B, L, d]``, differentiable once with respect to the logits.

    Raises:
        ValueError: shapes that do not fit, ``predicted`` not bool, unknown mode, ``"sampled_st"`` without uniforms,
            ``chunk_size`` < 1.
    """
    vocab_size = logits.vocab_size if isinstance(logits, Predictions) else logits.shape[-1]
    fits = isinstance(logits, Predictions) or logits.dim() == 3
    if not fits or embedding.dim() != 2 or vocab_size != len(embedding):
        shape = [vocab_size] if isinstance(logits, Predictions) else list(logits.shape)
        raise ValueError(
            f"Need logits [B, L, V] and an embedding [V, d] of the same vocabulary, got {shape} and "
            f"{list(embedding.shape)}. The encoder must share the model's tokenizer."
        )
    shape = logits.predicted.shape if isinstance(logits, Predictions) else logits.shape[:2]
    if input_ids.shape != shape:
        raise ValueError(f"input_ids must be {list(shape)} like the logits, got {list(input_ids.shape)}.")
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(map(repr, MODES))}, got {mode!r}.")
    if mode == "sampled_st" and uniforms is None:
        raise ValueError("mode 'sampled_st' draws tokens: give uniforms [B, L].")
    predictions, E = Predictions.of(logits, predicted, chunk_size), embedding.detach()
    if mode != "sampled_st":
        columns = ()
    else:
        uniforms = uniforms.float() if predicted.device.type == "mps" else uniforms
        columns = (predictions.at(uniforms.to(predicted.device)),)
    rows, entropy = predictions.map(
        lambda ell, *u: _lifted(ell, E, mode, *u),
        *columns,
        pullback=lambda ell, cotangents, *u: _pulled(ell, cotangents[0], E),
    )
    predictions.entropy = entropy.sum() / max(len(entropy), 1)
    # Out of place, since the embedded ids may be a part of the caller's graph.
    embeds = F.embedding(input_ids, E).masked_scatter(predicted[..., None], rows)
    predictions.lifted = embeds, E
    return embeds


@torch.no_grad()
def token_entropy(logits: Tensor | Predictions, predicted: Tensor, *, chunk_size: int | None = None) -> Tensor:
    """Mean entropy of softmax(logits) over the predicted positions, in nats: a scalar, 0 where nothing is predicted.

    Args:
        logits: ``[B, L, V]``, or predictions. If these have been lifted or drawn from, their entropy is known.
        predicted: ``[B, L]`` bool.
        chunk_size: positions at a time.
    """
    predictions = Predictions.of(logits, predicted, chunk_size)
    if predictions.entropy is None:
        (entropy,) = predictions.map(lambda ell: (entropy_of(probabilities(ell)),))
        predictions.entropy = entropy.sum() / max(len(entropy), 1)
    return predictions.entropy


def probabilities(logits: Tensor) -> Tensor:
    """softmax(logits), float32 at least."""
    return torch.softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def entropy_of(p: Tensor) -> Tensor:
    """``[n, V]`` -> ``[n]``, in nats, without gradient."""
    p = p.detach()
    # Half the time of torch.special.entr. The floor is for log(0), which 0 times nothing but a number undoes.
    return -torch.linalg.vecdot(p, p.clamp_min(torch.finfo(p.dtype).tiny).log_())


def _lifted(logits: Tensor, E: Tensor, mode: str, uniforms: Tensor | None = None) -> tuple[Tensor, Tensor]:
    p = probabilities(logits)
    soft = p.to(E.dtype) @ E
    if mode == "soft":
        return soft, entropy_of(p)
    ids = logits.argmax(dim=-1) if mode == "hard_st" else draw(p.detach(), uniforms)
    # The difference is exactly zero, and carries the gradient.
    return F.embedding(ids, E) + (soft - soft.detach()), entropy_of(p)


def _pulled(logits: Tensor, cotangent: Tensor, E: Tensor) -> Tensor:
    """The gradient of a lift of any mode with respect to the logits: that of softmax(logits) @ E."""
    p = probabilities(logits)
    gradient = (cotangent.to(E.dtype) @ E.T).to(p.dtype)
    # As autograd does it: one pass, and the same result to the bit.
    return torch.ops.aten._softmax_backward_data(gradient, p, -1, p.dtype).to(logits.dtype)
