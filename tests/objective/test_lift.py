"""The soft-token lift against the plain expression, in value, gradient and memory."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tokendrift_hf.objective.lift import soft_lift, token_entropy


def plain_lift(logits, embedding, input_ids, predicted):
    soft = torch.softmax(logits, dim=-1) @ embedding
    return torch.where(predicted[..., None], soft, embedding[input_ids])


def inputs(dtype=torch.float64, mask_logit=None, batch=3, length=7, vocab=11, dim=5):
    g = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(batch, length, vocab, generator=g, dtype=torch.float64)
    if mask_logit is not None:
        logits[..., -1] = mask_logit
    embedding = torch.randn(vocab, dim, generator=g, dtype=torch.float64)
    input_ids = torch.randint(0, vocab, (batch, length), generator=g)
    predicted = torch.rand(batch, length, generator=g) < 0.6
    predicted[1] = False  # a row with nothing predicted
    cotangent = torch.randn(batch, length, dim, generator=g, dtype=torch.float64)
    return logits.to(dtype).requires_grad_(), embedding.to(dtype), input_ids, predicted, cotangent.to(dtype)


def value_and_gradient(lift, logits, cotangent):
    embeds = lift(logits)
    (gradient,) = torch.autograd.grad(embeds, logits, cotangent)
    return embeds.detach(), gradient


@pytest.mark.parametrize("chunk_size", [1, 4, 512])
@pytest.mark.parametrize("mask_logit", [None, -1e6, -math.inf])
def test_equals_the_plain_lift(chunk_size, mask_logit):
    logits, embedding, input_ids, predicted, cotangent = inputs(mask_logit=mask_logit)
    expected = value_and_gradient(lambda x: plain_lift(x, embedding, input_ids, predicted), logits, cotangent)
    actual = value_and_gradient(
        lambda x: soft_lift(x, embedding, input_ids, predicted, chunk_size=chunk_size), logits, cotangent
    )
    for a, e in zip(actual, expected, strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-13)
    assert (actual[1][~predicted] == 0).all()


def test_gradcheck():
    logits, embedding, input_ids, predicted, _ = inputs(batch=2, length=4, vocab=5, dim=3)
    assert torch.autograd.gradcheck(lambda x: soft_lift(x, embedding, input_ids, predicted, chunk_size=2), (logits,))


@pytest.mark.parametrize("everywhere", [True, False])
def test_all_or_no_positions_predicted(everywhere):
    """All of them is the uniform-state model; none leaves the embedded input and a zero gradient."""
    logits, embedding, input_ids, predicted, cotangent = inputs()
    predicted = torch.full_like(predicted, everywhere)
    value, gradient = value_and_gradient(lambda x: soft_lift(x, embedding, input_ids, predicted), logits, cotangent)
    expected = torch.softmax(logits, dim=-1) @ embedding if everywhere else embedding[input_ids]
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-13)
    assert bool((gradient != 0).any()) is everywhere


@pytest.mark.parametrize("chunk_size", [2, 512])
def test_straight_through_has_the_argmax_forward_and_the_soft_gradient_backward(chunk_size):
    logits, embedding, input_ids, predicted, cotangent = inputs(mask_logit=-math.inf)
    settings = dict(chunk_size=chunk_size)
    hard, hard_gradient = value_and_gradient(
        lambda x: soft_lift(x, embedding, input_ids, predicted, mode="hard_st", **settings), logits, cotangent
    )
    _, soft_gradient = value_and_gradient(
        lambda x: soft_lift(x, embedding, input_ids, predicted, **settings), logits, cotangent
    )
    ids = torch.where(predicted, logits.argmax(dim=-1), input_ids)
    torch.testing.assert_close(hard, embedding[ids], rtol=0, atol=0)
    torch.testing.assert_close(hard_gradient, soft_gradient, rtol=0, atol=0)


@pytest.mark.parametrize("chunk_size", [2, 512])
def test_straight_through_of_a_draw_has_its_embedding_forward_and_the_soft_gradient_backward(chunk_size):
    logits, embedding, input_ids, predicted, cotangent = inputs(mask_logit=-math.inf)
    uniforms = torch.rand(predicted.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    settings = dict(chunk_size=chunk_size)
    drawn, gradient = value_and_gradient(
        lambda x: soft_lift(x, embedding, input_ids, predicted, mode="sampled_st", uniforms=uniforms, **settings),
        logits,
        cotangent,
    )
    _, soft_gradient = value_and_gradient(
        lambda x: soft_lift(x, embedding, input_ids, predicted, **settings), logits, cotangent
    )
    cdf = logits.detach().softmax(-1).cumsum(-1)
    ids = torch.where(predicted, (cdf / cdf[..., -1:] <= uniforms[..., None]).sum(-1), input_ids)
    torch.testing.assert_close(drawn, embedding[ids], rtol=0, atol=0)
    torch.testing.assert_close(gradient, soft_gradient, rtol=0, atol=0)
    assert not torch.equal(ids[predicted], logits.argmax(-1)[predicted])


def test_backward_keeps_no_probabilities():
    """Of the tensors saved for backward, the only one of vocabulary size is the logits tensor itself."""
    logits, embedding, input_ids, predicted, _ = inputs(vocab=64)
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        soft_lift(logits, embedding, input_ids, predicted, chunk_size=4)
    of_vocabulary_size = [t for t in saved if t.shape[-1] == 64]
    assert [t.data_ptr() for t in of_vocabulary_size] == [logits.data_ptr()]


def test_softmax_and_product_stay_float32_under_autocast():
    logits, embedding, input_ids, predicted, cotangent = inputs(torch.float32)
    expected = value_and_gradient(lambda x: soft_lift(x, embedding, input_ids, predicted), logits, cotangent)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = value_and_gradient(lambda x: soft_lift(x, embedding, input_ids, predicted), logits, cotangent)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, e, rtol=0, atol=0)


def test_bfloat16_logits_are_lifted_as_their_float32_values():
    logits, embedding, input_ids, predicted, cotangent = inputs(torch.float32, mask_logit=-1e6)
    low = logits.detach().to(torch.bfloat16).requires_grad_()
    wide = low.detach().float().requires_grad_()
    actual = value_and_gradient(lambda x: soft_lift(x, embedding, input_ids, predicted), low, cotangent)
    expected = value_and_gradient(lambda x: soft_lift(x, embedding, input_ids, predicted), wide, cotangent)
    torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=0)
    assert actual[1].dtype == torch.bfloat16
    torch.testing.assert_close(actual[1], expected[1].to(torch.bfloat16), rtol=0, atol=0)


def test_strided_logits_and_a_trainable_table():
    """A model may return a slice of a wider tensor; E is frozen even where its parameter is not."""
    logits, embedding, input_ids, predicted, cotangent = inputs()
    wide = F.pad(logits.detach(), (0, 3)).requires_grad_()
    table = embedding.clone().requires_grad_()
    actual = soft_lift(wide[..., :-3], table, input_ids, predicted)
    actual.backward(cotangent)
    _, gradient = value_and_gradient(lambda x: soft_lift(x, embedding, input_ids, predicted), logits, cotangent)
    torch.testing.assert_close(wide.grad[..., :-3], gradient, rtol=0, atol=0)
    assert table.grad is None


@pytest.mark.parametrize("mask_logit", [None, -1e6, -math.inf])
def test_token_entropy_is_the_mean_over_predicted_positions_in_nats(mask_logit):
    logits, _, _, predicted, _ = inputs(mask_logit=mask_logit)
    used = logits if mask_logit is None else logits[..., :-1]
    expected = torch.distributions.Categorical(logits=used.detach()).entropy()[predicted].mean()
    actual = token_entropy(logits, predicted, chunk_size=4)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=0)
    assert not actual.requires_grad
    assert token_entropy(logits, torch.zeros_like(predicted)) == 0
    uniform = token_entropy(torch.zeros(1, 2, 50), torch.ones(1, 2, dtype=torch.bool))
    assert float(uniform) == pytest.approx(math.log(50), rel=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embedding": torch.zeros(10, 5)}, "same vocabulary"),
        ({"logits": torch.zeros(7, 11)}, "same vocabulary"),
        ({"input_ids": torch.zeros(3, 8, dtype=torch.long)}, r"input_ids must be \[3, 7\]"),
        ({"predicted": torch.ones(3, 7)}, "bool tensor of shape"),
        ({"predicted": torch.ones(3, 8, dtype=torch.bool)}, "bool tensor of shape"),
        ({"mode": "hard"}, "'soft', 'hard_st', 'sampled_st', got 'hard'"),
        ({"mode": "sampled_st"}, "'sampled_st' draws tokens: give uniforms"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
    ],
)
def test_bad_input_is_named(change, message):
    logits, embedding, input_ids, predicted, _ = inputs()
    arguments = {"logits": logits, "embedding": embedding, "input_ids": input_ids, "predicted": predicted} | change
    with pytest.raises(ValueError, match=message):
        soft_lift(**arguments)
