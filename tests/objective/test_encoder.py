"""FrozenEncoder: which hidden states, which pooling, which time; gradients to inputs and never to weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, tiny_model
from toys import assert_same, weights_of
from transformers import BertConfig, BertForMaskedLM, BertModel, GPT2Config, GPT2LMHeadModel

from tokendrift_hf import FrozenEncoder
from tokendrift_hf.models.adapter import as_diffusion

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


@pytest.mark.parametrize("layers", [[3], [-4], [], [0.5], ["1"], 1, None, [True]])
def test_bad_layers_are_refused(layers):
    with pytest.raises(ValueError, match=r"hidden states 0 \(the embeddings\) to 2 \(its last block\), or -3 to -1"):
        FrozenEncoder.copy_of(tiny_model("mdlm"), layers=layers)


@pytest.mark.parametrize("timestep", [1.5, -0.1, float("nan"), "0"])
def test_bad_times_are_refused(timestep):
    with pytest.raises(ValueError, match="A diffusion time is from 0"):
        FrozenEncoder.copy_of(tiny_model("mdlm"), timestep=timestep)


def test_bad_vocabularies_are_refused():
    encoder = FrozenEncoder.copy_of(tiny_model("mdlm"))
    for fits in (23, 24):
        encoder.check_vocabulary(fits)
    for other in (22, 25):
        with pytest.raises(ValueError, match=f"embeds 23 ids and the model predicts {other}"):
            encoder.check_vocabulary(other)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"inputs_embeds": [[0.0]]}, TypeError, "inputs_embeds must be a tensor, but it is list"),
        ({"inputs_embeds": torch.zeros(3, 7).long()}, TypeError, "floating numbers .* but they are torch.int64"),
        ({"inputs_embeds": torch.zeros(3, 7)}, ValueError, r"must be \[B, L, d\], got \[3, 7\]"),
        ({"attention_mask": [[1] * L] * B}, TypeError, "attention_mask must be a tensor, but it is list"),
        ({"attention_mask": torch.ones(B, L + 1)}, ValueError, r"must be \[3, 7\] like the embeddings, got \[3, 8\]"),
        ({"positions": torch.zeros(B, 2)}, TypeError, "positions must be integers, but they are torch.float32"),
        ({"positions": torch.zeros(B - 1, 2).long()}, ValueError, r"positions must be \[3, S\], got \[2, 2\]"),
        ({"positions": torch.zeros(B).long()}, ValueError, r"positions must be \[3, S\], got \[3\]"),
    ],
)
def test_bad_inputs_are_named(arguments, error, message):
    embeds, mask = inputs()
    with pytest.raises(error, match=message):
        FrozenEncoder.copy_of(tiny_model("mdlm"))(**{"inputs_embeds": embeds, "attention_mask": mask} | arguments)


# ---- blocks that are not needed -----------------------------------------------------------------------


def foreign(kind):
    """A model of transformers of four blocks, and its list of blocks."""
    torch.manual_seed(0)
    if kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=22, n_positions=8, n_embd=D, n_layer=4, n_head=2))
        return model.eval(), model.transformer.h
    sizes = dict(vocab_size=22, hidden_size=D, num_hidden_layers=4, num_attention_heads=2, intermediate_size=8)
    config = BertConfig(max_position_embeddings=8, **sizes)
    model = BertForMaskedLM(config) if kind == "adapted" else BertModel(config)
    model = as_diffusion(model.eval(), mask_token_id=21) if kind == "adapted" else model.eval()
    return model, getattr(model, "bert", model).encoder.layer


def whole_states(model, embeds, mask):
    """All hidden states, from a pass that goes to the end."""
    if hasattr(model, "process"):
        return model.hidden_states(embeds, torch.zeros(B), mask)[0]
    return model(inputs_embeds=embeds, attention_mask=mask, output_hidden_states=True).hidden_states


@pytest.mark.parametrize("kind", ["mdlm", "duo", "gpt2", "bert", "adapted"])
@pytest.mark.parametrize("layers", [[0], [1], [2, 1], [-2], [4], [-1, 0]])
def test_features_and_gradients_are_those_of_the_whole_model_bit_for_bit(kind, layers):
    ours = kind in ("mdlm", "duo")
    model = tiny_model(kind, num_hidden_layers=4) if ours else foreign(kind)[0]
    embeds, mask = inputs(requires_grad=True)
    states = whole_states(model, embeds, mask)
    expected = torch.cat([states[layer] for layer in layers], dim=-1)
    found = FrozenEncoder.copy_of(model, layers=layers).token_features(embeds, mask)
    assert torch.equal(found, expected)
    cotangent = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    gradients = [torch.autograd.grad(features, embeds, cotangent)[0] for features in (found, expected)]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("kind", ["mdlm", "duo", "gpt2", "bert", "adapted"])
@pytest.mark.parametrize(("layers", "needed"), [([0], 0), ([1], 1), ([2, 1], 2), ([-2], 3), ([-1], 4)])
def test_blocks_above_the_deepest_layer_are_never_run(kind, layers, needed):
    ours = kind in ("mdlm", "duo")
    model = tiny_model(kind, num_hidden_layers=4) if ours else foreign(kind)[0]
    encoder = FrozenEncoder(model, layers=layers)
    blocks = next(x for x in model.modules() if isinstance(x, torch.nn.ModuleList) and len(x) == 4)
    calls = [0] * 4

    def count(index):
        def hook(*_):
            calls[index] += 1

        return hook

    for index, block in enumerate(blocks):
        block.register_forward_hook(count(index))
    embeds, mask = inputs(requires_grad=True)
    encoder(embeds, mask).sum().backward()
    assert calls == [1] * needed + [0] * (4 - needed)


def test_a_model_whose_hidden_states_are_something_else_runs_to_its_end():
    """Hidden states that are not what the blocks are given: the trial sees it, and nothing is cut short."""

    class Scaled(BertModel):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.hidden_states = tuple(2 * x for x in output.hidden_states)
            return output

    torch.manual_seed(0)
    sizes = dict(vocab_size=22, hidden_size=D, num_hidden_layers=4, num_attention_heads=2, intermediate_size=8)
    model = Scaled(BertConfig(max_position_embeddings=8, **sizes)).eval()
    embeds, mask = inputs()
    assert torch.equal(
        FrozenEncoder(model, layers=[1]).token_features(embeds, mask), whole_states(model, embeds, mask)[1]
    )


def test_custom_code_of_an_older_checkpoint_that_knows_no_number_of_blocks(monkeypatch):
    model, (embeds, mask) = tiny_model("mdlm", num_hidden_layers=4), inputs()
    expected = FrozenEncoder(model, layers=[1]).token_features(embeds, mask)
    whole = type(model).hidden_states
    monkeypatch.setattr(type(model), "hidden_states", lambda self, x, t=None, mask=None: whole(self, x, t, mask))
    encoder = FrozenEncoder(model, layers=[1])
    model.backbone.blocks[1].register_forward_hook(lambda *_: pytest.fail("block 2 was run"))
    assert torch.equal(encoder.token_features(embeds, mask), expected)
