"""The paired conditional MMD between drawn rows and the real one, in the features of a frozen encoder.

After Representation-Space MMD (arXiv 2610.06648). One row at a time, n predicted positions S, D draws x_1 .. x_D of the
whole row from one prediction, features phi_i(x) ``[m]`` of position i.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


@torch.no_grad()
def kernel_means(
    real: Tensor, draws: Tensor, bandwidth: Tensor | float, *, elements: int = 2**22
) -> tuple[Tensor, Tensor]:
    """What the kernel k(a, b) = exp(-|a - b|^2 / (2 bandwidth^2)) says of every position of every draw.

    Args:
        real: phi_j(x_0) at the predicted positions, ``[n, m]``, n >= 2.
        draws: phi_i(x_b) there, ``[D, n, m]``, D >= 1.
        bandwidth: in feature units, > 0.
        elements: kernel values held at a time.

    Returns:
        The attraction ``[D, n]``, mean_j k(phi_i(x_b), phi_j(x_0)), and the repulsion ``[D, D, n]``,
        mean_{j != i} k(phi_i(x_b), phi_j(x_c)) for b != c, with 0 on the diagonal b = c.
    """
    D, n, _ = draws.shape
    with torch.autocast(draws.device.type, enabled=False):
        # |a|^2 + |b|^2 - 2ab cancels where features share a large part: take out the mean feature first.
        scaled = (torch.cat([real[None], draws]) - real.mean(0)) / (bandwidth * math.sqrt(2))
        points = scaled.flatten(0, 1)
        squares = points.square().sum(-1)
        sums = []  # of an anchor's kernel with the positions of x_0 and of every draw
        for anchors in torch.arange(n, len(points), device=draws.device).split(max(1, elements // len(points))):
            k = torch.addmm(squares, points[anchors], points.T, beta=-1, alpha=2).sub_(squares[anchors, None])
            k = k.clamp_(max=0).exp_().view(len(anchors), D + 1, n)
            k[:, 1:].scatter_(-1, (anchors % n)[:, None, None].expand(-1, D, 1), 0)  # equal positions do not count
            sums.append(k.sum(-1))
    sums = torch.cat(sums).view(D, n, D + 1).movedim(-1, 1)
    one_draw = torch.eye(D, dtype=torch.bool, device=draws.device)[..., None]
    return sums[:, 0] / n, sums[:, 1:].masked_fill(one_draw, 0) / (n - 1)


def sequence_advantages(attraction: Tensor, repulsion: Tensor) -> Tensor:
    """The advantage of every group of draws, as published: one reward for all tokens of a group.

    With B draws x_b in group g, r_g = 2 mean_b mean_i attraction - mean_{b != c} mean_i repulsion, which is minus the
    group's estimate of MMD^2 but for a constant. It is a U-statistic: pairs within one draw never count. The advantage
    is r_g minus the mean reward of the other groups, so the policy gradient has the expectation of the exact one.

    Args:
        attraction: ``[G, B, n]`` of `kernel_means`, G >= 2 groups of B >= 2 draws.
        repulsion: ``[G, B, B, n]``.

    Returns:
        ``[G]``.
    """
    G, B, _ = attraction.shape
    reward = 2 * attraction.mean(dim=(1, 2)) - repulsion.mean(-1).sum(dim=(1, 2)) / (B * (B - 1))
    return (reward - reward.mean()) * (G / (G - 1))


def local_advantages(attraction: Tensor, repulsion: Tensor, positions: Tensor, window: int) -> Tensor:
    """The advantage of every token of every draw, from the kernel values of the positions near it.

    The share of position i of draw b is w_bi = 2 attraction_bi - 2 mean_{c != b} repulsion_bci. A token's credit is the
    mean share of the predicted positions within `window` of it, minus the same mean over the other draws (computed
    without draw b, so that it is a baseline and takes nothing away from the repulsion).

    It leaves out what a token does to features further away. For a `window` that spans the row nothing is left out: the
    policy gradient has the expectation of the exact gradient of MMD^2, from all D (D - 1) / 2 pairs of draws instead of
    those within groups. Narrow windows are biased and have far less variance.

    Args:
        attraction: ``[D, n]`` of `kernel_means`, D >= 2.
        repulsion: ``[D, D, n]``.
        positions: where the n positions lie in the row, ``[n]``, ascending.
        window: in tokens, >= 0.

    Returns:
        ``[D, n]``.
    """
    D, n = attraction.shape
    share = 2 * attraction - 2 * repulsion.sum(1) / (D - 1)
    # The shares of the other draws c as if b were not there: their mean needs only sums over the pairs.
    others = 2 * (attraction.sum(0) - attraction) / (D - 1)
    if D > 2:
        pairs = repulsion.sum(dim=(0, 1)) - repulsion.sum(1) - repulsion.sum(0)
        others = others - 2 * pairs / ((D - 1) * (D - 2))
    return window_means(share - others, positions, window)


def window_means(values: Tensor, positions: Tensor, window: int) -> Tensor:
    """``[..., n]`` -> ``[..., n]``: the mean over the entries whose position is at most `window` from one's own."""
    near = ((positions[:, None] - positions).abs() <= window).to(values.dtype)
    with torch.autocast(values.device.type, enabled=False):
        return values @ near / near.sum(0)


def median_distance(features: Tensor) -> Tensor:
    """The median distance between features ``[n, m]`` that differ by more than rounding, a scalar. NaN if none do."""
    with torch.autocast(features.device.type, enabled=False):
        distances = torch.nn.functional.pdist(features - features.mean(0))
    return distances[distances > 1e-5 * features.norm(dim=-1).mean()].median()
