"""FrozenEncoder: which hidden states, which pooling, which time; gradients to inputs and never to weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, tiny_model
from toys import assert_same, weights_of
from transformers import GPT2Config, GPT2LMHeadModel

from tokendrift_hf import FrozenEncoder

B, L, D = 3, 7, TINY["hidden_size"]


def inputs(requires_grad=False):
    g = torch.Generator().manual_seed(0)
    mask = torch.ones(B, L, dtype=torch.long)
    mask[1, 5:] = 0
    return torch.randn(B, L, D, generator=g).requires_grad_(requires_grad), mask


def hidden_states(model, embeds, mask, timestep):
    times = torch.full((B,), timestep)
    output = model(inputs_embeds=embeds, timesteps=times, attention_mask=mask, output_hidden_states=True)
    return output.hidden_states


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
@pytest.mark.parametrize("layers", [(-2, -1), (0,), (1, 2, 0)])
@pytest.mark.parametrize("timestep", [0.0, 0.7])
def test_mean_features_are_the_normalised_mean_over_what_exists(kind, layers, timestep):
    model, (embeds, mask) = tiny_model(kind), inputs()
    encoder = FrozenEncoder.copy_of(model, layers=layers, timestep=timestep)
    states = hidden_states(model, embeds, mask, timestep)
    for given in (mask, None):
        rows = []
        for i in range(B):
            length = L if given is None else int(given[i].sum())
            states = hidden_states(model, embeds, given, timestep)
            rows.append(F.normalize(torch.cat([states[k][i, :length].mean(0) for k in layers]), dim=0))
        found = encoder(embeds, given)
        torch.testing.assert_close(found, torch.stack(rows), rtol=1e-5, atol=1e-6)
        assert found.shape == (B, D * len(layers)) and found.dtype == torch.float32


def test_token_features_are_those_of_the_positions_in_order():
    model, (embeds, mask) = tiny_model("mdlm"), inputs()
    positions = torch.tensor([[4, 0], [1, 2], [6, 3]])
    found = FrozenEncoder.copy_of(model, layers=[1])(embeds, mask, positions)
    states = hidden_states(model, embeds, mask, 0.0)[1]
    expected = [F.normalize(states[i, pos], dim=0) for i in range(B) for pos in positions[i]]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-5, atol=1e-6)


def test_a_time_conditioned_encoder_is_told_its_time():
    embeds, mask = inputs()
    early, late = (FrozenEncoder.copy_of(tiny_model("duo"), timestep=t)(embeds, mask) for t in (0.0, 0.7))
    assert (early - late).norm() > 1e-3 * early.norm()


def test_gradients_reach_the_inputs_and_never_the_weights():
    model, (embeds, mask) = tiny_model("mdlm").train(), inputs(requires_grad=True)
    encoder = FrozenEncoder.copy_of(model)
    assert encoder.model is not model and not encoder.model.training and model.training
    assert all(p.requires_grad for p in model.parameters())
    encoder(embeds, mask).square().sum(dim=0).sum().backward()
    assert embeds.grad is not None and not encoder.embedding.requires_grad
    assert not any(p.requires_grad or p.grad is not None for p in encoder.model.parameters())


def test_the_copy_does_not_follow_the_model():
    model = tiny_model("mdlm")
    encoder = FrozenEncoder.copy_of(model)
    before = weights_of(encoder.model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    assert_same(weights_of(encoder.model), before, rtol=0, atol=0)


def test_padding_does_not_reach_the_features():
    encoder, (embeds, mask) = FrozenEncoder.copy_of(tiny_model("mdlm")), inputs()
    other = torch.where(mask.bool()[..., None], embeds, 9.0)
    torch.testing.assert_close(encoder(other, mask), encoder(embeds, mask), rtol=1e-6, atol=1e-7)


def test_any_architecture_that_takes_embeddings():
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=22, n_positions=8, n_embd=D, n_layer=2, n_head=2)).eval()
    embeds, mask = inputs()
    states = gpt2(inputs_embeds=embeds, attention_mask=mask, output_hidden_states=True).hidden_states
    encoder = FrozenEncoder(gpt2, layers=[1])
    torch.testing.assert_close(encoder(embeds)[0], F.normalize(states[1][0].mean(0), dim=0), rtol=1e-5, atol=1e-6)
    assert encoder.embedding.shape == (22, D)


@pytest.mark.parametrize("timestep", [6.9, -0.1, float("nan")])
def test_an_encoder_is_told_a_time_and_no_sigma(timestep):
    with pytest.raises(ValueError, match=f"timestep={timestep}. A diffusion time is from 0"):
        FrozenEncoder(tiny_model("duo"), timestep=timestep)


def test_bad_layers_and_vocabularies_are_refused():
    model = tiny_model("mdlm")
    for layers in ([3], [-4], []):
        with pytest.raises(
            ValueError, match=r"hidden states 0 \(the embeddings\) to 2 \(its last block\), or -3 to -1"
        ):
            FrozenEncoder.copy_of(model, layers=layers)
    encoder = FrozenEncoder.copy_of(model)
    for fits in (23, 24):
        encoder.check_vocabulary(fits)
    for other in (22, 25):
        with pytest.raises(ValueError, match=f"embeds 23 ids and the model predicts {other}"):
            encoder.check_vocabulary(other)
