"""The paired MMD: kernels and credits against loops, and the policy gradient against the exact one by enumeration."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tokendrift_hf.objective.mmd import (
    kernel_means,
    local_advantages,
    median_distance,
    sequence_advantages,
    window_means,
)

WHOLE_ROW = 10**6


def features(n=5, D=4, m=3, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    return torch.randn(n, m, generator=g, dtype=dtype), torch.randn(D, n, m, generator=g, dtype=dtype)


@pytest.mark.parametrize("elements", [1, 50, 2**22], ids=["rows", "tiles", "whole"])
def test_kernel_means_are_their_formulas(elements):
    (real, draws), sigma = features(), 1.3
    attraction, repulsion = kernel_means(real, draws, sigma, elements=elements)
    D, n, _ = draws.shape

    def k(a, b):
        return math.exp(-(math.dist(a.tolist(), b.tolist()) ** 2) / (2 * sigma**2))

    for b, i in itertools.product(range(D), range(n)):
        assert attraction[b, i].item() == pytest.approx(sum(k(draws[b, i], real[j]) for j in range(n)) / n, rel=1e-12)
        for c in range(D):
            pairs = [k(draws[b, i], draws[c, j]) for j in range(n) if j != i and b != c]
            assert repulsion[b, c, i].item() == pytest.approx(sum(pairs) / (n - 1), rel=1e-12, abs=1e-15)


def test_features_with_a_large_common_part_keep_their_distances():
    """float32 features around 1000, as of a network with a few outlier dimensions, against float64."""
    real, draws = features(n=30, m=16, dtype=torch.float32)
    found = kernel_means(real + 1000, draws + 1000, 4.0)
    exact = kernel_means((real + 1000).double(), (draws + 1000).double(), 4.0)
    for f, e in zip(found, exact, strict=True):
        torch.testing.assert_close(f.double(), e, rtol=1e-4, atol=1e-6)


def test_autocast_does_not_reach_the_kernel():
    real, draws = features(n=30, m=16, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = kernel_means(real, draws, 4.0)
    for f, e in zip(found, kernel_means(real, draws, 4.0), strict=True):
        assert torch.equal(f, e)


def test_window_means_see_positions_and_not_their_order():
    positions = torch.tensor([0, 1, 4, 5, 6, 20])
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert window_means(values, positions, 0).tolist() == values.tolist()
    assert window_means(values, positions, 1).tolist() == [1.5, 1.5, 3.5, 4.0, 4.5, 6.0]
    assert window_means(values, positions, WHOLE_ROW).tolist() == [3.5] * 6


def test_the_median_distance_leaves_out_features_that_are_one():
    points = torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 4.0], [3.0, 4.0], [0.0, 1.0]])
    distances = [5, 5, 1, 5, 5, 1, math.sqrt(18), math.sqrt(18)]
    assert median_distance(points).item() == pytest.approx(sorted(distances)[3], rel=1e-6)
    assert median_distance(points[:2]).isnan()


# ---- the exact gradient -------------------------------------------------------------------------------
# A row of three positions: the middle one is known, the others have two tokens each. The features of a position
# depend on the tokens around it, without any structure.

TOKENS, REAL = 2, (1, 0)
TABLE = torch.randn(TOKENS, TOKENS, 2, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
ROWS = list(itertools.product(range(TOKENS), repeat=2))  # what the two predicted positions may be


def phi(row):
    """[2, 4]: features of the two predicted positions of a row, each seeing both tokens."""
    return TABLE[row[0], row[1]]


def probabilities(logits):
    """[4]: of every row, under independent draws."""
    p = logits.softmax(-1)
    return torch.stack([p[0, a] * p[1, b] for a, b in ROWS])


def exact_mmd(logits, sigma):
    """MMD^2 without its constant: -2 E mean_ij k(phi_i(X), phi_j(x_0)) + E mean_{i != j} k(phi_i(X), phi_j(X'))."""

    def kernel(x, y):
        return torch.exp(-torch.cdist(phi(x), phi(y)).square() / (2 * sigma**2))

    p = probabilities(logits)
    attraction = torch.stack([kernel(x, REAL).mean() for x in ROWS])
    repulsion = torch.stack(
        [torch.stack([(kernel(x, y).sum() - kernel(x, y).trace()) / 2 for y in ROWS]) for x in ROWS]
    )
    return -2 * p @ attraction + p @ repulsion @ p


def expected_gradient(logits, count, advantages):
    """The exact expectation over all draws of -sum_b sum_i A_bi grad log p(x_bi), by enumeration of 4^count draws."""
    table = torch.stack([phi(row) for row in ROWS])
    log_p = logits.log_softmax(-1)
    total, probability = 0.0, probabilities(logits).detach()
    for draw in itertools.product(range(len(ROWS)), repeat=count):
        A = advantages(table[list(draw)])
        chosen = torch.stack([torch.stack([log_p[i, ROWS[d][i]] for i in range(2)]) for d in draw])
        total = total - math.prod(float(probability[d]) for d in draw) * (A * chosen).sum()
    return torch.autograd.grad(total, logits)[0]


LOGITS = torch.tensor([[0.3, -0.5], [0.0, 0.7]], dtype=torch.float64, requires_grad=True)


def exact_gradient(sigma):
    return torch.autograd.grad(exact_mmd(LOGITS, sigma), LOGITS)[0]


@pytest.mark.parametrize("sigma", [0.7, 2.0])
def test_whole_sequence_credit_has_the_expectation_of_the_exact_gradient(sigma):
    """Two groups of two draws: all 256 outcomes with their probabilities."""
    real = phi(REAL)

    def advantages(draws):
        groups = [kernel_means(real, group, sigma) for group in draws.split(2)]
        attraction, repulsion = (torch.stack(x) for x in zip(*groups, strict=True))
        return sequence_advantages(attraction, repulsion).repeat_interleave(2)[:, None].expand(-1, 2)

    # The reward of every group of draws has that gradient: two of them.
    torch.testing.assert_close(
        expected_gradient(LOGITS, 4, advantages), 2 * exact_gradient(sigma), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("count", [2, 3])
def test_a_window_of_the_whole_row_has_the_expectation_of_the_exact_gradient(count):
    real, positions = phi(REAL), torch.tensor([0, 2])

    def advantages(draws):
        return local_advantages(*kernel_means(real, draws, 0.7), positions, WHOLE_ROW)

    found = expected_gradient(LOGITS, count, advantages)
    # The credit is a mean over the two positions, as the MMD is; every draw contributes.
    torch.testing.assert_close(found, count * exact_gradient(0.7), rtol=1e-10, atol=1e-12)


def test_a_narrow_window_is_exact_where_features_do_not_see_further(monkeypatch):
    """Features that see their own token alone: window 0 leaves nothing out, whatever the other positions do."""
    own = torch.randn(2, TOKENS, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    table = torch.stack([torch.stack([torch.stack([own[0, a], own[1, b]]) for b in range(2)]) for a in range(2)])
    monkeypatch.setitem(globals(), "TABLE", table)
    real, positions = phi(REAL), torch.tensor([0, 2])

    def advantages(draws):
        return local_advantages(*kernel_means(real, draws, 0.7), positions, 0)

    found = expected_gradient(LOGITS, 3, advantages)
    # A share is n times its part of the mean.
    torch.testing.assert_close(found, 2 * 3 * exact_gradient(0.7), rtol=1e-10, atol=1e-12)


def test_a_narrow_window_is_biased_where_features_see_further():
    real, positions = phi(REAL), torch.tensor([0, 2])
    found = expected_gradient(LOGITS, 2, lambda x: local_advantages(*kernel_means(real, x, 0.7), positions, 0))
    assert (found - 4 * exact_gradient(0.7)).norm() > 0.05 * found.norm()
