"""Suppressed tokens: never sampled, and the law of the rest is that of a model which never had them."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_model
from tables import Stub, enumerate_run, p_value, psi_laws, stub

from tokendrift_hf.hub.denoiser_tokendrift import Denoiser
from tokendrift_hf.hub.process_tokendrift import AbsorbingProcess, UniformProcess
from tokendrift_hf.hub.samplers_tokendrift import SAMPLERS

SUPPRESSED = 1
EARLY = [1.0, 0.8, 0.6, 0.4]  # times at whose end much noise is left


def without(model: Stub) -> tuple[Stub, torch.Tensor]:
    """A stub whose vocabulary never had the suppressed id, with the same odds of all other tokens, and its ids."""
    V, L = model.process.vocab_size, model.config.max_position_embeddings
    kept = torch.tensor([token for token in range(V) if token != SUPPRESSED])
    states = torch.cartesian_prod(*[kept] * L)
    table = model.table[(states * V ** torch.arange(L - 1, -1, -1)).sum(1)][..., kept]
    slope = model.slope[kept] if isinstance(model.slope, torch.Tensor) else 0.0
    masked = model.process.mask_id is not None
    process = AbsorbingProcess(V - 1, V - 2) if masked else UniformProcess(V - 1)
    return Stub(process, table, slope), kept


def histogram(model: Stub, kept: torch.Tensor, **settings) -> torch.Tensor:
    """How often each text over the kept ids was sampled."""
    x = model.generate(num_samples=12000, seed=3, suppress_tokens=[SUPPRESSED], **settings)
    assert not (x == SUPPRESSED).any()
    new = torch.searchsorted(kept, x)
    n, L = len(kept), x.shape[1]
    return torch.bincount((new * n ** torch.arange(L - 1, -1, -1)).sum(1), minlength=n**L).double()


@pytest.mark.parametrize(
    "kind, settings, kappa",
    [
        ("mdlm", {}, 1.0),
        ("duo", {}, 1.0),
        ("duo", {"noise_removal": "none", "time_grid": EARLY}, 1.0),
        ("duo", {"noise_removal": "greedy"}, 1.0),
        ("mdlm", {"sampler": "psi", "psi": "constant-0.3"}, 0.3),
        ("duo", {"sampler": "psi", "psi": "constant-0.3"}, 0.3),
    ],
)
def test_the_rest_follows_the_law_of_a_model_without_them(kind, settings, kappa):
    model = stub(kind, V=4)
    small, kept = without(model)
    removal = settings.get("noise_removal", "ancestral")
    laws = psi_laws(small.process, 3, [kappa] * 3, times=settings.get("time_grid"), removal=removal)
    assert p_value(histogram(model, kept, num_steps=3, **settings), enumerate_run(small, laws)) > 1e-3


def test_without_care_for_the_noise_of_duo_they_would_be_left():
    """Suppressed in the prediction alone they stay where a run ends with noise."""
    model = stub("duo", V=4)
    model.process.without = lambda ids: model.process
    settings = dict(num_steps=3, noise_removal="none", time_grid=EARLY, suppress_tokens=[SUPPRESSED])
    x = model.generate(num_samples=2000, seed=3, **settings)
    assert (x == SUPPRESSED).any()


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
def test_no_sampler_ever_gives_them(kind):
    """Here they are by far the likeliest tokens."""
    model = tiny_model(kind)
    favoured = [0, 5, 6, 21]
    with torch.no_grad():
        model.backbone.output_layer.linear.bias[favoured] += 20
    for name, sampler in SAMPLERS.items():
        if kind == "mdlm" or not sampler.needs_mask:
            for controls in ({}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}):
                x = model.generate(num_samples=4, seed=0, sampler=name, suppress_tokens=favoured, **controls)
                assert not torch.isin(x, torch.tensor(favoured)).any(), (name, controls)
                if kind == "duo":
                    continue
                assert torch.isin(model.generate(seed=0, sampler=name, **controls), torch.tensor(favoured)).all()


def test_prompts_may_hold_them():
    prompt = torch.tensor([[7, 1, 4]])
    x = tiny_model("duo").generate(prompt, max_new_tokens=9, suppress_tokens=[1, 7], seed=0)
    assert x[:, :3].equal(prompt)
    assert not torch.isin(x[:, 3:], torch.tensor([1, 7])).any()


def test_random_tokens_are_even_over_the_states_and_skip_the_others():
    process = UniformProcess(9).without([0, 3, 4]).without([8])
    uniforms = (torch.arange(5 * 40, dtype=torch.float64) + 0.5) / 200
    ids, counts = process.random_tokens(uniforms).unique(return_counts=True)
    assert ids.tolist() == [1, 2, 5, 6, 7]
    assert counts.tolist() == [40] * 5
    everything = UniformProcess(9).random_tokens(torch.tensor([0.0, 0.12, 1 - 2**-24]))
    assert everything.tolist() == [0, 1, 8]


def test_bounds_of_the_prediction_hold_without_them():
    """DUO's head is skipped where a bound of p(x_t) settles the outcome. It bounds the restricted softmax."""
    model = tiny_model("duo", vocab_size=1000)
    suppressed = list(range(100, 700))
    x, t = torch.randint(1000, (1, 16), generator=torch.Generator().manual_seed(0)), torch.tensor([0.5])
    x[x.ge(100) & x.lt(700)] = 7
    denoiser = Denoiser(model, temperature=1.0, top_k=0, top_p=1.0, suppress_tokens=suppressed)
    with torch.no_grad():
        model.backbone.output_layer.linear.weight *= 0.3
        model.backbone.output_layer.linear.bias[suppressed] += 5  # with them the bound would be far too low
        hidden, c = model(x, timesteps=t, positions=torch.arange(16)[None]).hidden_states
        logits = model(x, timesteps=t).logits[0]
        logits[:, suppressed] = -torch.inf
        bounds = denoiser.log_p_bounds(hidden[0], c.expand(16, -1), x[0])
    exact = logits.log_softmax(-1).gather(1, x.T)[:, 0]
    assert (bounds > exact).all()
    assert (bounds < exact + 5).all(), "and they are worth something"
