"""Draws and log-probabilities of hard tokens: their law, their gradient, and that chunks change nothing."""

from __future__ import annotations

import math

import pytest
import torch

from tokendrift_hf.objective.noise import row_noise
from tokendrift_hf.objective.tokens import draw_tokens, token_log_probs


def inputs(dtype=torch.float64, mask_logit=None, batch=3, length=7, vocab=11, count=4):
    g = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(batch, length, vocab, generator=g, dtype=torch.float64)
    if mask_logit is not None:
        logits[..., -1] = mask_logit
    predicted = torch.rand(batch, length, generator=g) < 0.6
    predicted[1] = False  # a row with nothing predicted
    ids = torch.randint(0, vocab - 1, (int(predicted.sum()), count), generator=g)
    return logits.to(dtype).requires_grad_(), predicted, ids


@pytest.mark.parametrize("chunk_size", [1, 4, 512])
@pytest.mark.parametrize("mask_logit", [None, -1e6, -math.inf])
def test_log_probabilities_are_those_of_the_whole_softmax(chunk_size, mask_logit):
    logits, predicted, ids = inputs(mask_logit=mask_logit)
    cotangent = torch.randn(ids.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = logits.log_softmax(-1)[predicted].gather(1, ids)
    found = token_log_probs(logits, predicted, ids, chunk_size=chunk_size)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(found, logits, cotangent)
    finite = logits.detach().clamp_min(-1e3).requires_grad_()  # the plain form has no gradient at -inf
    (plain,) = torch.autograd.grad(finite.log_softmax(-1)[predicted].gather(1, ids), finite, cotangent)
    torch.testing.assert_close(gradient, plain, rtol=1e-10, atol=1e-12)


def test_the_gradient_of_a_token_drawn_twice_counts_twice():
    logits, predicted, _ = inputs(count=1)
    ids = torch.full((int(predicted.sum()), 2), 3)
    (twice,) = torch.autograd.grad(token_log_probs(logits, predicted, ids).sum(), logits)
    (once,) = torch.autograd.grad(token_log_probs(logits, predicted, ids[:, :1]).sum(), logits)
    torch.testing.assert_close(twice, 2 * once)


def test_half_precision_logits_give_float32_log_probabilities():
    logits, predicted, ids = inputs(dtype=torch.bfloat16)
    found = token_log_probs(logits, predicted, ids)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, logits.float().log_softmax(-1)[predicted].gather(1, ids), rtol=1e-6, atol=1e-6)


def test_without_predicted_positions_the_gradient_is_zero():
    logits, predicted, ids = inputs()
    (gradient,) = torch.autograd.grad(token_log_probs(logits, predicted & False, ids[:0]).sum(), logits)
    assert (gradient == 0).all()


def test_a_draw_is_the_inverse_of_the_distribution_function():
    logits, predicted, _ = inputs()
    uniforms = torch.rand(5, *predicted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = draw_tokens(logits, predicted, uniforms, chunk_size=3)
    p = logits.detach().softmax(-1)
    for position, at in enumerate(predicted.nonzero().tolist()):
        for draw in range(5):
            cdf = p[*at].cumsum(0)
            assert found[position, draw] == int((cdf / cdf[-1] <= uniforms[draw, *at]).sum())


@pytest.mark.parametrize("extreme", [0.0, 1 - 2**-53])
def test_the_mask_is_never_drawn(extreme):
    logits, predicted, _ = inputs(mask_logit=-1e6)
    found = draw_tokens(logits, predicted, torch.full((2, *predicted.shape), extreme, dtype=torch.float64))
    assert found.max() < logits.shape[-1] - 1


def test_draws_follow_the_prediction():
    """20,000 draws of two positions: the shares of tokens within five standard errors, positions independent."""
    logits = torch.tensor([[[0.0, 1.0, 2.0], [1.0, 0.0, -3.0]]])
    predicted, count = torch.ones(1, 2, dtype=torch.bool), 20_000
    found = draw_tokens(logits, predicted, row_noise((5,), range(1), 2, 3).draws(count))
    joint = (found[0] * 3 + found[1]).bincount(minlength=9).view(3, 3) / count
    p = logits.softmax(-1)[0]
    expected = p[0][:, None] * p[1]
    assert ((joint - expected).abs() < 5 * (expected / count).sqrt() + 1e-9).all()


def test_draws_depend_on_the_key_the_row_and_the_position_alone():
    whole = row_noise((3, 0, 5, 1), range(6), 9, 50).draws(4)
    assert torch.equal(row_noise((3, 0, 5, 1), range(2, 5), 4, 50).draws(4), whole[:, 2:5, :4])
    assert not torch.equal(row_noise((3, 0, 6, 1), range(6), 9, 50).draws(4), whole)


def test_draws_are_independent_of_the_corruption():
    noise = row_noise((0,), range(400), 100, 7)
    others = [noise.uniforms, noise.order, noise.random_tokens / 7]
    drawn = torch.stack([x.flatten() for x in (*noise.draws(2), *others)])
    assert (torch.corrcoef(drawn) - torch.eye(5)).abs().max() < 5 / 40000**0.5
