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

    Returns:
        A `DriftField` without gradient. ``field`` has the widest input type, at least float32. The computation runs in
        float64 (float32 on MPS) outside autocast: V is a small difference of large sums.

    Raises:
        TypeError: features that are not floating tensors, a ``self_index`` that is not a tensor of integers.
        ValueError: shapes that do not fit, no anchor, no positive, a feature that is not finite, an index outside the
            negatives, a temperature that is not positive, weights that are negative or both zero, an unknown kernel.
    """
    _check_features(features, positives, negatives, self_index)
    _check_settings(temperatures, attraction, repulsion, kernel, eps)
    return unchecked_drift_field(
        features,
        positives,
        negatives,
        temperatures=temperatures,
        self_index=self_index,
        attraction=attraction,
        repulsion=repulsion,
        kernel=kernel,
        eps=eps,
        dtype=torch.float64,
    )


@torch.no_grad()
def unchecked_drift_field(
    features: Tensor,
    positives: Tensor,
    negatives: Tensor,
    *,
    temperatures: Sequence[float],
    self_index: Tensor | None,
    attraction: float,
    repulsion: float,
    kernel: str,
    eps: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> DriftField:
    """`drift_field` for a training step: no check waits for the device, and features that are NaN give a NaN field.

    It runs in the precision of the result, apart from the distances. Of float32 features the field then differs from
    that in float64 by 1e-6 of its norm, or 1e-5 where positives and negatives are nearly equal sets, and takes a
    quarter of the time. Their rounding noise may reach 1e-3 of a full field where they are exactly equal.

    Args:
        dtype: the least precision of the computation, and not of the result.
    """
    out_dtype = torch.float32
    for x in (features, positives, negatives):
        out_dtype = torch.promote_types(out_dtype, x.dtype)
    eps = 1024 * torch.finfo(out_dtype).eps if eps is None else eps
    dtype = torch.float32 if features.device.type == "mps" else torch.promote_types(out_dtype, dtype)
    with torch.autocast(features.device.type, enabled=False):
        geometry = _Geometry.of(features, positives, negatives, self_index, kernel, dtype)
        parts = [geometry.field_at(tau, attraction, repulsion, eps) for tau in temperatures]
    fields, rms, effective = zip(*parts, strict=True)
    mean = sum(fields[1:], fields[0]) / len(fields)
    return DriftField(mean.to(out_dtype), torch.stack(rms), torch.stack(effective))


@dataclass(frozen=True)
class _Geometry:
    """Anchors, references and what lies between them: all that the temperatures share.

    Attributes:
        anchors: h, ``[..., B, m]``, centred.
        references: u and -v, ``[..., P + N, m]``, centred likewise.
        num_positives: P.
        distance: ``[..., B, P + N]``.
        cost: of the kernel, likewise. inf where a pair does not count.
        excluded: ``[..., B, 1]``, the column of the pair that does not count. None if all do.
        floor: the least log-affinity.
    """

    anchors: Tensor
    references: Tensor
    num_positives: int
    distance: Tensor
    cost: Tensor
    excluded: Tensor | None
    floor: float

    @classmethod
    def of(
        cls, h: Tensor, u: Tensor, v: Tensor, self_index: Tensor | None, kernel: str, dtype: torch.dtype
    ) -> _Geometry:
        """Distances are taken in float64 (float32 on MPS), and everything is kept in `dtype`."""
        exact = torch.float32 if h.device.type == "mps" else torch.float64
        # Only differences matter, and those of centred features keep their digits.
        centre = h.to(exact).mean(dim=-2, keepdim=True)
        h, u, v = (x.to(exact) - centre for x in (h, u, v))
        # |a|^2 + |b|^2 - 2ab loses the distance between nearly equal vectors. Centred and in float64 it does not.
        expand = "use_mm" if exact == torch.float64 else "donot_use_mm"
        distance = torch.cdist(h, torch.cat([u, v], dim=-2), compute_mode=f"{expand}_for_euclid_dist")
        own = None
        if self_index is not None:
            own = (u.shape[-2] + self_index.to(h.device).long())[:, None].expand(*distance.shape[:-1], 1)
        if kernel == "paper":
            cost, excluded, floor = distance.square(), own, -math.inf
            if own is not None:
                cost.scatter_(-1, own, math.inf)
        else:
            cost, excluded, floor = distance.clamp(min=MIN_DISTANCE), None, math.log(AFFINITY_FLOOR)
            cost /= cost.mean().clamp(min=MIN_SCALE)
            if own is not None:
                cost.scatter_add_(-1, own, torch.full_like(own, SELF_PENALTY, dtype=exact))
        tensors = (x.to(dtype) for x in (h, torch.cat([u, -v], dim=-2), distance, cost))
        h, references, distance, cost = tensors
        return cls(h, references, u.shape[-2], distance, cost, excluded, floor)

    def field_at(self, tau: float, attraction: float, repulsion: float, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """The field of one temperature at RMS norm 1, its RMS norm before that, and the effective references."""
        lowest, tiny = torch.finfo(self.cost.dtype).min, torch.finfo(self.cost.dtype).tiny
        s = self.cost * (-1 / tau)
        log_row, effective = self._row_sums(s)
        # clamp: a column in which nothing is left is -inf throughout, and -inf - (-inf) is NaN.
        log_column = torch.logsumexp(s, dim=-2, keepdim=True).clamp(min=lowest)
        log_affinity = s.sub_(0.5 * log_row).sub_(0.5 * log_column)
        if self.floor > -math.inf:
            log_affinity.clamp_(min=self.floor)

        # Affinities with the largest of an anchor taken out, on either side, and their sums: in place, for they are
        # many.
        sides = log_affinity.split([self.num_positives, log_affinity.shape[-1] - self.num_positives], dim=-1)
        sums, log_masses = [], []
        for side in sides:
            largest = side.amax(dim=-1, keepdim=True).clamp(min=lowest) if side.shape[-1] else side.new_zeros(())
            sums.append(side.sub_(largest).exp_().sum(dim=-1, keepdim=True))
            log_masses.append(sums[-1].log() + largest)
        # The masses sum A+ sum A- of all anchors may be too small for any float: take the largest one out.
        log_mass = log_masses[0] + log_masses[1]
        log_unit = log_mass.amax().clamp(min=lowest)
        mass = (log_mass - log_unit).exp()
        for side, total, weight in zip(sides, sums, (attraction, repulsion), strict=True):
            side.mul_(weight * mass / total.clamp(min=tiny))
        weights = log_affinity
        field = weights @ self.references - (attraction - repulsion) * mass * self.anchors

        # What pulls and pushes, were all the references in one direction: the scale of the rounding noise.
        noise = eps * torch.linalg.vecdot(weights, self.distance)
        mean_square = field.square().sum(dim=-1).mean()
        field = field / (mean_square + noise.square().mean()).sqrt().clamp(min=tiny)
        exact = torch.float32 if field.device.type == "mps" else torch.float64
        return field, mean_square.to(exact).sqrt() * log_unit.to(exact).exp(), effective

    def _row_sums(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """Of the softmax over all references: its log-normaliser ``[..., B, 1]``, and the mean of exp(entropy)."""
        lowest = torch.finfo(s.dtype).min
        largest = s.amax(dim=-1, keepdim=True).clamp(min=lowest)
        shifted = s - largest
        p = shifted.exp()
        total = p.sum(dim=-1, keepdim=True)
        if self.excluded is not None:
            shifted.scatter_(-1, self.excluded, 0.0)  # 0 * -inf is NaN
        entropy = total.log().squeeze(-1) - torch.linalg.vecdot(p, shifted) / total.squeeze(-1)
        return (largest + total.log()).clamp(min=lowest), entropy.exp().mean()


def _check_features(features: Tensor, positives: Tensor, negatives: Tensor, self_index: Tensor | None) -> None:
    sets = {"features": features, "positives": positives, "negatives": negatives}
    for name, x in sets.items():
        if not (isinstance(x, Tensor) and x.is_floating_point()):
            found = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name} must be a floating tensor, but it is {found}.")
    shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in sets.items())
    if any(x.dim() < 2 for x in sets.values()) or len({(x.shape[:-2], x.shape[-1]) for x in sets.values()}) != 1:
        raise ValueError(f"Need [..., B, m], [..., P, m] and [..., N, m] with equal m and leading sizes, got {shapes}.")
    if features.shape[-2] == 0 or positives.shape[-2] == 0:
        raise ValueError(f"Need at least one anchor and one positive, got {shapes}.")
    for name, x in sets.items():
        if not x.isfinite().all():
            raise ValueError(f"{name} hold {int((~x.isfinite()).sum())} numbers that are NaN or infinite.")
    if self_index is None:
        return
    if not isinstance(self_index, Tensor) or self_index.dtype not in (torch.int64, torch.int32):
        found = self_index.dtype if isinstance(self_index, Tensor) else type(self_index).__name__
        raise TypeError(f"self_index must be a tensor of integers, but it is {found}.")
    if self_index.shape != features.shape[-2:-1]:
        raise ValueError(f"self_index must hold one integer an anchor, got {list(self_index.shape)} for {shapes}.")
    if self_index.min() < 0 or self_index.max() >= negatives.shape[-2]:
        raise ValueError(
            f"self_index must name rows 0 to {negatives.shape[-2] - 1} of the negatives, but it runs from "
            f"{int(self_index.min())} to {int(self_index.max())}."
        )


def _check_settings(temperatures: Sequence[float], attraction: float, repulsion: float, kernel: str, eps) -> None:
    numbers = isinstance(temperatures, (list, tuple)) and all(_is_number(tau) and tau > 0 for tau in temperatures)
    if not numbers or not temperatures:
        raise ValueError(f"temperatures must be one or more positive numbers, got {temperatures!r}.")
    if not all(_is_number(x) and x >= 0 for x in (attraction, repulsion)) or attraction == repulsion == 0:
        raise ValueError(
            f"attraction and repulsion must be >= 0 and not both zero, got {attraction!r} and {repulsion!r}."
        )
    if kernel not in ("paper", "drifting"):
        raise ValueError(f"kernel must be 'paper' or 'drifting', got {kernel!r}.")
    if eps is not None and not (_is_number(eps) and eps >= 0):
        raise ValueError(f"eps must be a number >= 0, got {eps!r}.")


def _is_number(x) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)
