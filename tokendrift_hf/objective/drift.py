"""The drift field: where each generated feature should move, given real and generated references.

Section 3.2 of the TokenDrift paper (arXiv 2605.19470). The joint normalisation, which the paper takes over from the
original drifting code, follows that code: https://github.com/lambertae/drifting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Constants of the "drifting" kernel, as in the original code.
SELF_PENALTY = 100.0  # added to the normalised distance of an anchor to itself
AFFINITY_FLOOR = 1e-3  # least affinity of any pair, the anchor with itself included
MIN_DISTANCE = 1e-4
MIN_SCALE = 1e-3


@dataclass(frozen=True)
class DriftField:
    """The field and what is worth logging about it.

    Attributes:
        field: V, ``[..., B, m]``, in feature units: mean over temperatures of the fields divided by their RMS norm. Its
            own RMS norm is therefore at most 1, whatever the progress of training.
        rms_per_temperature: ``[T]``, ``sqrt(mean_i |V_i|^2)`` before that division, in feature units. It falls as the
            generated features approach the real ones. float64 (float32 on MPS), since it can be far below 1e-38.
        effective_references: ``[T]``, mean over anchors of exp(entropy in nats) of the softmax over all references:
            1 means that a single reference decides, P + N that all count alike.
    """

    field: Tensor
    rms_per_temperature: Tensor
    effective_references: Tensor


@torch.no_grad()
def drift_field(
    features: Tensor,
    positives: Tensor,
    negatives: Tensor,
    *,
    temperatures: Sequence[float] = (0.02, 0.05, 0.2),
    self_index: Tensor | None = None,
    attraction: float = 1.0,
    repulsion: float = 1.0,
    kernel: str = "paper",
    eps: float | None = None,
    positive_weights: Tensor | None = None,
    negative_weights: Tensor | None = None,
) -> DriftField:
    r"""Attraction to real features minus repulsion from generated ones, per anchor, averaged over temperatures.

    With s_ij = -cost_ij / tau, the affinity A_ij is the geometric mean of the softmax of s over all references (row)
    and over all anchors (column). With u the positives, v the negatives, a and r the two weights,

        V_i = a sum_j W+_ij (u_j - h_i) - r sum_k W-_ik (v_k - h_i),
        W+_ij = A+_ij sum_k A-_ik,   W-_ik = A-_ik sum_j A+_ij.

    Both sides carry the same mass, so V is translation-invariant, anti-symmetric under exchange of the sets (a = r),
    zero if they are equal, and zero for an anchor that has no negative other than itself.

    Kernels: ``"paper"`` has cost = |h - u|^2 and leaves the anchor's own pair out. ``"drifting"`` has
    cost = |h - u| / (mean of all distances) and a floor under the affinities, and reproduces the original code: there
    ``force_scaled = sqrt(m) * T * field``.

    Args:
        features: h, the anchors, ``[..., B, m]``, any floating type. The column softmax, the mean distance and the RMS
            run over all of them, leading dimensions included in the last two: pass the whole gathered batch.
        positives: u, ``[..., P, m]``, P >= 1.
        negatives: v, ``[..., N, m]``, N >= 0.
        temperatures: tau > 0, one field each.
        self_index: ``[B]`` integers: which negative is the anchor itself. None if none is.
        attraction: a >= 0.
        repulsion: r >= 0, not both zero.
        kernel: ``"paper"`` or ``"drifting"``.
        eps: the RMS is ``sqrt(mean |V_i|^2 + (eps * pull)^2)``, where pull is the RMS of what goes into V before the
            subtraction, a sum_j W+_ij |u_j - h_i| + r sum_k W-_ik |v_k - h_i|. Relative, so that it neither swallows a
            field of 1e-30 nor lets the rounding noise of equal sets grow to RMS 1. Default: 1024 machine epsilons of
            the result's dtype.
        positive_weights: ``[..., P]`` >= 0. ``"paper"``: how often the reference counts (0: absent, 2: as if listed
            twice). ``"drifting"``: a factor on the affinity after the softmaxes, as in the original code, so that a
            reference of weight 0 exerts no force but keeps its share of the softmax.
        negative_weights: ``[..., N]``, likewise.

    Returns:
        A `DriftField` without gradient; ``field`` in the widest input type, at least float32. The computation runs in
        float64 (float32 on MPS) outside autocast: V is a small difference of large sums.

    Raises:
        ValueError: shapes that do not fit, no anchor, no positive, a temperature that is not positive, weights that are
            negative or both zero, an unknown kernel.
    """
    _check(features, positives, negatives, self_index, positive_weights, negative_weights)
    if not temperatures or not all(tau > 0 and math.isfinite(tau) for tau in temperatures):
        raise ValueError(f"temperatures must be one or more positive numbers, got {temperatures!r}.")
    if not (attraction >= 0 and repulsion >= 0 and attraction + repulsion > 0):
        raise ValueError(
            f"attraction and repulsion must be >= 0 and not both zero, got {attraction!r} and {repulsion!r}."
        )
    if kernel not in ("paper", "drifting"):
        raise ValueError(f"kernel must be 'paper' or 'drifting', got {kernel!r}.")

    out_dtype = torch.float32
    for x in (features, positives, negatives):
        out_dtype = torch.promote_types(out_dtype, x.dtype)
    dtype = torch.float32 if features.device.type == "mps" else torch.float64
    eps = 1024 * torch.finfo(out_dtype).eps if eps is None else eps
    lowest, tiny = torch.finfo(dtype).min, torch.finfo(dtype).tiny

    with torch.autocast(features.device.type, enabled=False):
        centre = features.to(dtype).mean(dim=-2, keepdim=True)
        h, u, v = (x.to(dtype) - centre for x in (features, positives, negatives))
        references = torch.cat([u, v], dim=-2)
        weights = torch.cat([_weights(u, positive_weights), _weights(v, negative_weights)], dim=-1).unsqueeze(-2)
        # |a|^2 + |b|^2 - 2ab loses the distance between nearly equal vectors; centred and in float64 it does not.
        expand = "use_mm" if dtype == torch.float64 else "donot_use_mm"
        distance = torch.cdist(h, references, compute_mode=f"{expand}_for_euclid_dist")
        is_self = _is_self(distance, self_index, u.shape[-2])
        if kernel == "paper":
            cost = distance.square().masked_fill(is_self, math.inf)
            multiplicity, floor = weights.log(), -math.inf
        else:
            floored = distance.clamp(min=MIN_DISTANCE)
            scale = (floored * weights).mean() / weights.mean()
            cost = floored / scale.clamp(min=MIN_SCALE) + SELF_PENALTY * is_self
            multiplicity, floor = torch.zeros_like(weights), math.log(AFFINITY_FLOOR)

        sizes = [u.shape[-2], v.shape[-2]]
        distance_plus, distance_minus = distance.split(sizes, dim=-1)
        field, rms, effective = torch.zeros_like(h), [], []
        for tau in temperatures:
            s = -cost / tau
            # clamp: a row or column in which nothing is left is -inf throughout, and -inf - (-inf) is NaN.
            row = s - torch.logsumexp(s + multiplicity, dim=-1, keepdim=True).clamp(min=lowest)
            column = s - torch.logsumexp(s, dim=-2, keepdim=True).clamp(min=lowest)
            log_affinity = (0.5 * (row + column)).clamp(min=floor) + weights.log()
            log_plus, log_minus = log_affinity.split(sizes, dim=-1)
            log_mass_plus = torch.logsumexp(log_plus, dim=-1, keepdim=True)
            log_mass_minus = torch.logsumexp(log_minus, dim=-1, keepdim=True)
            weight_plus = (log_plus - log_mass_plus.clamp(min=lowest)).exp()
            weight_minus = (log_minus - log_mass_minus.clamp(min=lowest)).exp()

            # The masses sum A+ sum A- of all anchors may be too small for any float: take the largest one out.
            log_mass = log_mass_plus + log_mass_minus
            log_unit = log_mass.amax().clamp(min=lowest)
            mass = (log_mass - log_unit).exp()
            barycenters = attraction * (weight_plus @ u) - repulsion * (weight_minus @ v)
            v_tau = mass * (barycenters - (attraction - repulsion) * h)
            # What pulls and pushes, were all the references in one direction.
            pull = attraction * (weight_plus * distance_plus).sum(dim=-1)
            push = repulsion * (weight_minus * distance_minus).sum(dim=-1)
            noise = eps * mass.squeeze(-1) * (pull + push)
            mean_square = v_tau.square().sum(dim=-1).mean()
            field += v_tau / (mean_square + noise.square().mean()).sqrt().clamp(min=tiny)
            rms.append(mean_square.sqrt() * log_unit.exp())
            effective.append(torch.special.entr((row + multiplicity).exp()).sum(dim=-1).exp().mean())
        return DriftField((field / len(temperatures)).to(out_dtype), torch.stack(rms), torch.stack(effective))


def _weights(references: Tensor, weights: Tensor | None) -> Tensor:
    return references.new_ones(references.shape[:-1]) if weights is None else weights.to(references)


def _is_self(distance: Tensor, self_index: Tensor | None, num_positives: int) -> Tensor:
    """``[B, P + N]``, True where the reference is the anchor itself."""
    is_self = torch.zeros(distance.shape[-2:], dtype=torch.bool, device=distance.device)
    if self_index is not None:
        is_self[:, num_positives:].scatter_(1, self_index.to(distance.device)[:, None], True)
    return is_self


def _check(
    features: Tensor,
    positives: Tensor,
    negatives: Tensor,
    self_index: Tensor | None,
    positive_weights: Tensor | None,
    negative_weights: Tensor | None,
) -> None:
    shapes = f"features {list(features.shape)}, positives {list(positives.shape)}, negatives {list(negatives.shape)}"
    tensors = (features, positives, negatives)
    if any(x.dim() < 2 for x in tensors) or len({(x.shape[:-2], x.shape[-1]) for x in tensors}) != 1:
        raise ValueError(f"Need [..., B, m], [..., P, m] and [..., N, m] with equal m and leading sizes, got {shapes}.")
    if features.shape[-2] == 0 or positives.shape[-2] == 0:
        raise ValueError(f"Need at least one anchor and one positive, got {shapes}.")
    if self_index is not None and self_index.shape != features.shape[-2:-1]:
        raise ValueError(f"self_index must hold one integer an anchor, got {list(self_index.shape)} for {shapes}.")
    for name, weights, x in (("positive", positive_weights, positives), ("negative", negative_weights, negatives)):
        if weights is not None and weights.shape != x.shape[:-1]:
            raise ValueError(f"{name}_weights must have shape {list(x.shape[:-1])}, got {list(weights.shape)}.")
