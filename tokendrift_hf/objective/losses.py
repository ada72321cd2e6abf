"""What the drift field is turned into: the feature loss and the two mirror-teacher losses of the TokenDrift paper.

Each function takes the rows of its own process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .lift import probabilities
from .predictions import Predictions


def feature_loss(features: Tensor, field: Tensor, drift_scale: float = 1.0) -> Tensor:
    """L = 1/(2B) sum_i |h_i - sg(h_i + alpha V_i)|^2, section 3.3. Its gradient with respect to h is -alpha V / B.

    The value is alpha^2/2 times the mean square norm of V, whatever the progress: watch the un-normalised diagnostics.

    Args:
        features: h, ``[B, m]``, with a graph to the logits.
        field: V, ``[B, m]``.
        drift_scale: alpha > 0.

    Raises:
        ValueError: shapes that differ, ``drift_scale`` not positive.
    """
    _check_field(features, field)
    if not drift_scale > 0:
        raise ValueError(f"drift_scale must be positive, got {drift_scale!r}.")
    h = features.to(torch.promote_types(features.dtype, torch.float32))
    field = field.detach().to(h.dtype)
    # h - sg(h + alpha V), in the order of summation that leaves the gradient exact.
    residual = (h - h.detach()) - drift_scale * field
    return 0.5 * residual.square().sum(dim=-1).mean()


def mirror_loss(
    logits: Tensor | Predictions,
    features: Tensor,
    field: Tensor,
    predicted: Tensor,
    *,
    divergence: str,
    step_size: float | None = None,
    eta: float | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mirror teacher, section 3.4: match the distribution that one exponentiated-gradient step along V would give.

    g = grad_l <h(l), sg V>, l* = sg(l + eta g), p* = softmax(l*). The loss is 1/B sum_i sum_{t in M_i} of
    KL(p*_t || p_t) or of |l*_t - l_t|^2. Its gradient with respect to l is (p - p*)/B or 2 (l - l*)/B at the predicted
    positions, 0 elsewhere.

    The gradient of a mean-pooled feature shrinks as 1/L, and the more tokens are likely the less a change of one logit
    does, so a fixed eta means another step at every length, vocabulary and temperature of the model. ``step_size`` sets
    eta so that

        sqrt(mean over predicted positions of Var_{v ~ p_t}(eta g_tv)) = step_size * sqrt(mean_i |V_i|^2).

    The variance under p is twice KL(p*_t || p_t) to leading order: a step s changes p by about s^2/2 nats at a typical
    position, whatever the length, the vocabulary, the entropy of p and the pooling (large steps by less, once p* has
    nowhere left to go). The right-hand factor is near 1 by the normalisation of the field, and keeps the fixed point:
    if V vanishes, so does the step.

    What the optimizer makes of it: the gradient of ``"mse"`` is proportional to the step, so with an optimizer that
    divides by the gradient's size (Adam) a step size alone changes nothing. It matters against other losses and a
    clipping threshold. That of ``"kl"`` is proportional only while the step is small. Large steps saturate and weigh
    positions and tokens differently.

    Consumes the graph from ``features`` to ``logits``. The one behind ``logits`` stays. Backward can run once.

    Args:
        logits: l, ``[B, L, V]``, part of the graph of ``features``, or the predictions that were lifted to make these.
            Columns of -inf or -1e6 are safe.
        features: h, ``[B, m]`` (or ``[B * S, m]`` for S features a sample).
        field: V, like the features.
        predicted: M, ``[B, L]`` bool. A row with nothing predicted contributes 0.
        divergence: ``"kl"`` or ``"mse"``.
        step_size: see above, > 0. Give either this or ``eta``.
        eta: the paper's raw eta > 0.
        reduce: sums a small vector over all processes, so that every process takes the same eta. None for one process.
        chunk_size: positions at a time.

    Returns:
        The loss, and for the log ``mirror_eta`` with ``mirror_step`` = the left-hand side above, detached.

    Raises:
        ValueError: shapes that do not fit, neither or both of step_size and eta, one that is not positive, an unknown
            divergence, features that do not depend on the logits.
    """
    _check_field(features, field)
    if divergence not in ("kl", "mse"):
        raise ValueError(f"divergence must be 'kl' or 'mse', got {divergence!r}.")
    if (step_size is None) == (eta is None) or not (step_size if eta is None else eta) > 0:
        raise ValueError(f"Give one positive number, step_size or eta; got step_size={step_size!r}, eta={eta!r}.")
    predictions = Predictions.of(logits, predicted, chunk_size)
    gradient_of, column = _pullback(logits, predictions, features, field)

    dtype = torch.promote_types(predictions.inputs[0].dtype, torch.float32)
    field = field.detach().to(dtype)
    with torch.no_grad():
        (variance,) = predictions.map(lambda ell, x: (_variance(ell, gradient_of(ell, x)),), column)
    squares = [variance.sum().to(dtype), field.square().sum()]
    totals = torch.stack([*squares, field.new_tensor(len(predictions)), field.new_tensor(len(field))])
    if reduce is not None:
        totals = reduce(totals)
    deviation, field_rms = (totals[:2] / totals[2:].clamp(min=1)).sqrt()
    if eta is None:
        eta_ = torch.where(deviation > 0, step_size * field_rms / deviation, torch.zeros_like(deviation))
    else:
        eta_ = torch.full_like(deviation, eta)
    distance = _kl if divergence == "kl" else _square
    loss = predictions.total(lambda ell, x: distance(ell, eta_ * gradient_of(ell, x)), column)
    return loss / len(predicted), {"mirror_eta": eta_, "mirror_step": eta_ * deviation}


def _check_field(features: Tensor, field: Tensor) -> None:
    if features.dim() != 2 or features.shape != field.shape:
        raise ValueError(
            f"Need features and field of one shape [B, m], got {list(features.shape)} and {list(field.shape)}. "
            "With gathered features, take the field's rows of this process."
        )


def _pullback(
    logits: Tensor | Predictions, predictions: Predictions, features: Tensor, field: Tensor
) -> tuple[Callable[[Tensor, Tensor], Tensor], Tensor]:
    """g = grad_l <h, sg V> at the predicted positions, as a function of a chunk of logits and of a column ``[N, ...]``.

    Through a lift the column is the gradient of the expected embeddings ``[N, d]``, and g its product with the Jacobian
    of the softmax. Without one it is g itself.
    """
    through = predictions.lifted[0] if isinstance(logits, Predictions) and predictions.lifted is not None else logits
    gradient = None
    if isinstance(through, Tensor) and features.requires_grad and through.requires_grad:
        v = field.detach().to(features.dtype)
        (gradient,) = torch.autograd.grad(features, through, grad_outputs=v, allow_unused=True)
    if gradient is None:
        raise ValueError("features do not depend on logits: compute them from these logits with gradients enabled.")
    column = predictions.at(gradient)
    if through is logits:
        return lambda ell, g: g.to(torch.promote_types(ell.dtype, torch.float32)), column
    E = predictions.lifted[1]

    def softmax_jacobian(ell: Tensor, gradient: Tensor) -> Tensor:
        p = probabilities(ell.detach())
        g = (gradient.to(E.dtype) @ E.T).to(p.dtype)
        return p * (g - (p * g).sum(dim=-1, keepdim=True))

    return softmax_jacobian, column


def _variance(logits: Tensor, g: Tensor) -> Tensor:
    """``[n]``: Var(g) under softmax(logits)."""
    p = probabilities(logits)
    return (p * (g - (p * g).sum(dim=-1, keepdim=True)).square()).sum(-1)


def _kl(logits: Tensor, step: Tensor) -> Tensor:
    """``[n]``: KL(p* || p) with p* = softmax(logits + step), whose gradient is p - p*."""
    with torch.no_grad():
        ell = logits.to(step.dtype)
        log_z = torch.logsumexp(ell, dim=-1, keepdim=True)
        p = (ell - log_z).exp()
        # log(p*/p) without log p* - log p: finite where p = 0, right for small steps, 0 for none.
        log_ratio = step - (torch.logsumexp(ell + step, dim=-1, keepdim=True) - log_z)
        p_star = (ell - log_z + log_ratio).exp()
        gradient = torch.where(log_ratio < 1, -p * torch.expm1(log_ratio), p - p_star)
        # KL = sum p* log(p*/p) - (p* - p): the second term sums to 0 and cancels the first order.
        value = (p_star * log_ratio + gradient).sum(-1)
    return _WithGradient.apply(value, logits, gradient)


def _square(logits: Tensor, step: Tensor) -> Tensor:
    """``[n]``: |l* - l|^2 with l* = sg(logits + step), whose gradient is 2 (l - l*)."""
    return _WithGradient.apply(step.square().sum(-1), logits, -2 * step)


class _WithGradient(torch.autograd.Function):
    """A value ``[n]`` whose gradient with respect to logits ``[n, V]`` is known."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, logits: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient.to(logits.dtype))
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> tuple[None, Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return None, gradient * cotangent[:, None].to(gradient.dtype), None
