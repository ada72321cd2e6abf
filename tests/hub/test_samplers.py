"""The samplers: draws, controls, schedules, parity with recorded runs, and laws of whole runs against enumeration."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from conftest import FIXTURES, recorded, tiny_model
from reference import log_probs, posterior
from safetensors import safe_open
from tables import Stub, enumerate_run, histogram, independent_stub, mask_column, p_value, psi_laws, stub
from torch import nn

from tokendrift_hf import DUOConfig, DUOForMaskedLM, MDLMConfig, MDLMForMaskedLM
from tokendrift_hf.hub import samplers_tokendrift as samplers
from tokendrift_hf.hub.denoiser_tokendrift import Denoiser, RowStreams, control, draw
from tokendrift_hf.hub.process_tokendrift import AbsorbingProcess, UniformProcess

# Draws and controls


@pytest.mark.parametrize("V", [2, 7, 256, 257, 1000])
def test_draw_inverts_the_distribution_function(V):
    """The two-level search gives the token that a search through all float64 partial sums gives."""
    generator = torch.Generator().manual_seed(V)
    weights = torch.rand(500, V, generator=generator, dtype=torch.float64) ** 8
    weights[:, ::3] = 0
    uniforms = torch.rand(500, generator=generator, dtype=torch.float64)
    cdf = weights.cumsum(-1)
    expected = torch.searchsorted(cdf, uniforms[:, None] * cdf[:, -1:], right=True)[:, 0]
    assert draw(weights, uniforms).equal(expected)
    rows = torch.tensor([7, 3, 3])
    assert draw(weights, uniforms[rows], rows).equal(expected[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_uniforms_never_give_a_token_of_weight_zero(dtype):
    eps = torch.finfo(dtype).eps / 2
    uniforms = torch.tensor([0.0, eps, 0.5, 1 - eps], dtype=dtype)
    for V in (5, 256, 300, 50258):
        weights = torch.zeros(4, V)
        weights[:, 2:4] = torch.tensor([0.3, 0.7])
        assert draw(weights, uniforms).tolist() == [2, 2, 3, 3]
        weights[:, V - 2] = 1e-30
        assert set(draw(weights, uniforms).tolist()) <= {2, 3, V - 2}


def test_float64_draws_keep_the_entropy_of_a_long_tail():
    """A Zipf law over 5000 tokens through 1000 steps: mean surprisal within 3 standard errors of the entropy."""
    p = 1 / torch.arange(1, 5001, dtype=torch.float64)
    p = p / p.sum()
    model = independent_stub("mdlm", p.tolist(), 1024)
    surprisal = -p.log()[model.generate(num_steps=1000, num_samples=2, seed=0)].flatten()
    entropy = -(p * p.log()).sum()
    assert abs(surprisal.mean() - entropy) < 3 * surprisal.std() / math.sqrt(len(surprisal))


def test_nucleus_equals_the_recorded_one():
    ops = recorded("sampling_ops")
    for top_p in (0.5, 0.9, 0.95):
        ours = control(ops["nucleus.logp"].double().flatten(0, 1), 1.0, 0, top_p).log_softmax(-1)
        theirs = ops[f"nucleus.{top_p}.logp_with_inf"].flatten(0, 1)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_controls_against_their_definition():
    logits = torch.randn(20, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert control(logits, 1.0, 0, 1.0) is logits
    torch.testing.assert_close(control(logits, 0.5, 0, 1.0), logits * 2)
    best = control(logits, 1.0, 4, 1.0)
    assert (best.isfinite().sum(-1) == 4).all() and (best.amax(-1) == logits.amax(-1)).all()
    greedy = control(logits, 0.0, 0, 1.0).exp()
    assert greedy.argmax(-1).equal(logits.argmax(-1)) and greedy.sum(-1).eq(1).all()
    assert control(logits, 2.0, 1, 1.0).equal(control(logits, 0.0, 0, 1.0))
    p = logits.softmax(-1)
    for row, kept in zip(p, control(logits, 1.0, 0, 0.6).isfinite(), strict=True):
        order = row.argsort(descending=True)
        count = next(k for k in range(1, 31) if row[order[:k]].sum() >= 0.6)
        assert set(order[:count].tolist()) == set(kept.nonzero()[:, 0].tolist())


# Schedules


def test_time_grids():
    linear = samplers.time_grid("linear", 4, [0, 0])
    torch.testing.assert_close(torch.tensor(linear), recorded("psi_schedules")["grid.linear.4"])
    for spec, run in (("0.9-inv", "loop_0.01"), ("0.1", "loop_noinv")):
        loop = samplers.time_grid(f"linear-constant-linear-{spec}", 16, [0.45, 0.5])
        theirs = recorded("psi_schedules")[f"{run}.log-linear.16.t"]
        torch.testing.assert_close(torch.tensor(loop)[:-1], theirs[:-1])
        assert loop[-1] == pytest.approx(1e-5)  # theirs stops at the plateau, 0.1, when the last part has one step
    no_descent = samplers.time_grid("linear-constant-linear-0.1", 4, [0.45, 0.5])
    assert no_descent == pytest.approx([1, 0.55, 0.1, 0.1, 0.1]), "noise removal goes down from the plateau"
    cosine = samplers.time_grid("cosine", 8, [0, 0])
    assert cosine[0] == 1 and cosine[-1] == pytest.approx(1e-5) and sorted(cosine, reverse=True) == cosine
    assert samplers.time_grid([0.9, 0.5, 0.1], 2, [0, 0]) == [0.9, 0.5, 0.1]


def recorded_alphas(run, schedule, N):
    """alpha at the recorded times, by either of the reference's noise schedules."""
    times = recorded("psi_schedules")[f"{run}.{schedule}.{N}.t"].double()
    signal = (1 - 1e-3) * times
    return (1 - signal if schedule == "log-linear" else 1 - torch.cos(torch.pi / 2 * (1 - signal))).tolist()


@pytest.mark.parametrize("run", ["pure_posterior", "pure_pc", "constant_0.3", "max_capped_0.01", "max_capped_0.4_flat"])
@pytest.mark.parametrize("schedule", ["log-linear", "cosine"])
@pytest.mark.parametrize("N", [4, 16])
def test_kappas_equal_the_recorded_ones(run, schedule, N):
    """At every step but the last of a segment, which the reference sets to 1 (see `kappas`)."""
    psi = json.loads(safe_open(FIXTURES / "psi_schedules.safetensors", "pt").metadata()["json"])["runs"][run]
    fixture = recorded("psi_schedules")
    fractions = [psi["high_frac"], psi["middle_frac"]]
    alphas = recorded_alphas(run, schedule, N)
    ours = samplers.kappas([psi["high_mode"], psi["middle_mode"], psi["low_mode"]], fractions, alphas)
    theirs = fixture[f"{run}.{schedule}.{N}.kappa"][:-1]
    # constant_0.3: 12 of 17 points early or middle there, 5 + 6 of 16 steps here; the step at the seam may differ
    seam = [round(fractions[0] * N) + round(fractions[1] * N)] if "constant" in run else []
    for i, (a, b) in enumerate(zip(ours, theirs.tolist(), strict=True)):
        assert a == pytest.approx(b, abs=2e-5) or i in seam, (i, a, b)


@pytest.mark.parametrize(
    ("run", "schedule", "eta"),
    [("loop_0.01", "log-linear", 0.01), ("loop_noinv", "log-linear", 0.02), ("loop_noinv", "cosine", 0.02)],
)
def test_remdm_loop_keeps_its_plateau(run, schedule, eta):
    alphas, fixture = recorded_alphas(run, schedule, 16), recorded("psi_schedules")
    ours = samplers.kappas(["pure-posterior", f"constant-remdm-{eta}", "pure-posterior"], [0.45, 0.5], alphas)
    assert ours[8:15] == pytest.approx(fixture[f"{run}.{schedule}.16.kappa"][8:15].tolist(), abs=2e-5)
    assert ours[:7] == [1.0] * 7 and ours[15] == 1.0


def test_max_rescale_is_the_corrected_one_and_the_recorded_one_differs_as_documented():
    fixture = recorded("psi_schedules")
    alphas = [1 - (1 - 1e-3) * t for t in fixture["max_rescale_0.05.log-linear.16.t"].double().tolist()]
    ours = samplers.kappas("max-rescale-0.05", [0, 0], alphas)
    for a_t, a_s, k, recorded_k in zip(
        alphas, alphas[1:], ours, fixture["max_rescale_0.05.log-linear.16.kappa"].tolist(), strict=False
    ):
        most = (1 - a_s) / a_t
        assert k == pytest.approx(max(0, 1 - 0.05 * min(1, most) / (1 - a_s)))
        assert recorded_k == pytest.approx(1 - 0.05 * min(0.05, most) / (1 - a_s), abs=2e-5)


@pytest.mark.parametrize("N", [1, 3, 16])
def test_a_masked_psi_step_is_remdm(N):
    """ReMDM: a present token is masked with sigma, a mask falls with (a_s - (1 - sigma) a_t) / (1 - a_t)."""
    times = torch.linspace(1, 1e-5, N + 1, dtype=torch.float64).tolist()
    alphas = [1 - (1 - 1e-3) * t for t in times]
    for (a_t, a_s), k in zip(
        itertools.pairwise(alphas), samplers.kappas("max-capped-0.3", [0, 0], alphas), strict=True
    ):
        sigma = min(0.3, (1 - a_s) / a_t, 1 - a_s)  # kappa is clipped at 0
        reveal, remask = samplers.absorbing_rates(a_t, a_s, k)
        assert remask == pytest.approx(sigma) and reveal == pytest.approx((a_s - (1 - sigma) * a_t) / (1 - a_t))


# Parity


def reference_categorical(p, uniforms):
    """The exponential race of the reference, its constants included."""
    return (p / (1e-10 - (uniforms + 1e-10).log())).argmax(-1)


def test_reference_categorical_is_the_recorded_one():
    ops = recorded("sampling_ops")
    for kind in ("f32", "f64"):
        p, u = ops[f"categorical.{kind}.probs"], ops[f"categorical.{kind}.uniform"]
        assert reference_categorical(p, u).equal(ops[f"categorical.{kind}.ids"])


def mixture(process, p, x, alpha_t, alpha_s, kappa):
    """The law of one step put together from the rates that the samplers use."""
    V = process.vocab_size
    old = nn.functional.one_hot(x, V).to(p)
    if process.mask_id is not None:
        reveal, remask = samplers.absorbing_rates(alpha_t, alpha_s, kappa)
        mask = nn.functional.one_hot(torch.tensor(process.mask_id), V).to(p)
        masked = (x == process.mask_id)[..., None]
        return torch.where(masked, reveal * p + (1 - reveal) * mask, (1 - remask) * old + remask * mask)
    p_x = p.gather(-1, x[..., None])

    def posterior(alpha_s):
        pull, keep, uniform = samplers.uniform_rates(alpha_t, alpha_s, V)
        stays = pull * p_x / (1 + pull * p_x)
        return stays * old + (1 - stays) * (keep * old + uniform / V + (1 - keep - uniform) * p)

    return kappa * posterior(alpha_s) + (1 - kappa) * (alpha_s * posterior(1.0) + (1 - alpha_s) / V)


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
def test_rates_give_the_recorded_posteriors(kind):
    """The rates by which the samplers decide, put together, are the recorded q(x_s | x_t), also with kappa.

    The recorded alphas are float32, hence the first tolerance.
    """
    fixture = recorded(f"posterior_{kind}")
    p, x = fixture[f"{kind}.p_x0"], fixture[f"{kind}.x_t"]
    process = AbsorbingProcess(98, 97) if kind == "mdlm" else UniformProcess(98)
    for i in range(5):
        alpha_t, alpha_s = (fixture[f"{i}.alpha_{s}"][0, 0].double() for s in "ts")
        clean = posterior(process, p, x, alpha_t, torch.ones_like(alpha_t))
        noise = nn.functional.one_hot(torch.tensor(97), 98) if kind == "mdlm" else 1 / 98
        noised = alpha_s * clean + (1 - alpha_s) * noise
        for kappa, name in ((1.0, "q_xs"), (0.7, "psi_kappa_0.7"), (0.0, "psi_kappa_0.0")):
            ours = mixture(process, p, x, alpha_t.item(), alpha_s.item(), kappa)
            torch.testing.assert_close(ours, fixture[f"{kind}.{i}.{name}"], rtol=1e-5, atol=1e-6)
            formula = kappa * posterior(process, p, x, alpha_t, alpha_s) + (1 - kappa) * noised
            torch.testing.assert_close(ours, formula, rtol=1e-9, atol=1e-15)


def recorded_model(kind: str, weights: str):
    sizes = json.loads((FIXTURES / f"{weights}_tiny_config.json").read_text())["config"]
    sizes = {k: sizes[k] for k in ("vocab_size", "model_length", "hidden_dim", "cond_dim", "n_blocks", "n_heads")}
    model = MDLMForMaskedLM(MDLMConfig(**sizes)) if kind == "mdlm" else DUOForMaskedLM(DUOConfig(**sizes))
    model.load_state_dict(recorded(f"{weights}_tiny_weights"))
    return model.eval()


@torch.no_grad()
def replay(name: str, kind: str, weights: str, dtype, greedy: bool, top_p: float = 1.0, kappa=None):
    """A recorded run, drawn over the whole vocabulary from the recorded uniforms; every network input must be met.

    It proves that the time grid, the rates, the kappas, the nucleus and the network calls are those of the reference;
    that generate() follows the same laws with draws of its own is shown by the tests against enumeration below.
    """
    fixture = recorded(name)
    N = json.loads(safe_open(FIXTURES / f"{name}.safetensors", "pt").metadata()["json"])["num_steps"]
    model, uniforms = recorded_model(kind, weights), fixture["uniforms"].to(dtype)
    process, times = model.process, samplers.time_grid("linear", N, [0, 0])
    alphas = process.schedule.alpha(torch.tensor(times, dtype=torch.float64)).tolist()
    x = fixture["prior"] if "prior" in fixture else process.prior(fixture["final"])
    inputs = [x]
    for i, t in enumerate(times):
        logits = model(x, timesteps=torch.full((len(x),), t)).logits
        logits = control(logits.flatten(0, 1), 1.0, 0, top_p).view_as(logits)
        p = log_probs(process, logits.to(dtype), x).exp()
        if i == N and greedy:
            new = torch.where(process.predicted_positions(x), p.argmax(-1), x)
        else:
            alpha_s = alphas[i + 1] if i < N else 1.0
            law = mixture(
                process, p, x, alphas[i], alpha_s, 1.0 if kappa is None or i == N else kappa(alphas[i], alpha_s)
            )
            new = reference_categorical(law, uniforms[i])
            if process.mask_id is not None and kappa is None:
                new = torch.where(x == process.mask_id, new, x)
        x = new
        inputs.append(x)
    calls = [inputs[0]] + [b for a, b in itertools.pairwise(inputs[:-1]) if not a.equal(b)]
    theirs = list(fixture["x_per_call"])
    theirs = [theirs[0]] + [b for a, b in itertools.pairwise(theirs) if not a.equal(b)]
    assert len(calls) == len(theirs) and all(a.equal(b) for a, b in zip(calls, theirs, strict=True))
    assert x.equal(fixture["final"])
    if "sigma_per_call" in fixture and len(fixture["sigma_per_call"]) == N + 1:
        sigma = process.schedule.sigma(torch.tensor(times)).float()
        torch.testing.assert_close(fixture["sigma_per_call"][:, 0], sigma, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "name, kind, greedy, top_p, kappa",
    [
        ("sampling_mdlm_cache", "mdlm", False, 1.0, None),
        ("sampling_mdlm_cache_greedy", "mdlm", True, 1.0, None),
        ("sampling_mdlm_cache_hits", "mdlm", False, 1.0, None),
        ("sampling_mdlm_cache_hits_greedy", "mdlm", True, 1.0, None),
        ("sampling_mdlm_analytic", "mdlm", False, 1.0, None),
        (
            "sampling_mdlm_psi_capped",
            "mdlm",
            False,
            1.0,
            lambda t, s: samplers.kappas("max-capped-0.4", [0, 0], [t, s])[0],
        ),
        ("sampling_duo_ancestral", "duo", False, 1.0, None),
        ("sampling_duo_greedy", "duo", True, 1.0, None),
        ("sampling_duo_nucleus", "duo", True, 0.9, None),
        # the reference's max-rescale, with eta twice
        (
            "sampling_duo_psi_rescale",
            "duo",
            False,
            1.0,
            lambda t, s: max(0.0, 1 - 0.9 * min(0.9, (1 - s) / t) / (1 - s)),
        ),
    ],
)
def test_recorded_runs_of_duo(name, kind, greedy, top_p, kappa):
    replay(name, kind, "duo", torch.float64, greedy, top_p, kappa)


@pytest.mark.parametrize("name", ["mdlm_sampling_ddpm", "mdlm_sampling_ddpm_cache"])
def test_recorded_runs_of_mdlm(name):
    replay(name, "mdlm", "mdlm", torch.float32, greedy=True)


# Laws of whole runs


@pytest.mark.parametrize(
    "kind, settings, kappa",
    [
        ("mdlm", {}, 1.0),
        ("duo", {}, 1.0),
        ("mdlm", {"noise_removal": "greedy"}, 1.0),
        ("duo", {"noise_removal": "greedy"}, 1.0),
        ("mdlm", {"noise_removal": "none"}, 1.0),
        ("duo", {"noise_removal": "none"}, 1.0),
        ("mdlm", {"sampler": "psi", "psi": "pure-pc"}, 0.0),
        ("duo", {"sampler": "psi", "psi": "pure-pc"}, 0.0),
        ("mdlm", {"sampler": "psi", "psi": "constant-0.3"}, 0.3),
        ("duo", {"sampler": "psi", "psi": "constant-0.3"}, 0.3),
    ],
)
def test_whole_runs_follow_the_enumerated_law(kind, settings, kappa):
    """Three steps and noise removal on a network that sees everything, against the chain over all states."""
    model = stub(kind, V=4 if kind == "mdlm" else 3)
    laws = psi_laws(model.process, 3, [kappa] * 3, removal=settings.get("noise_removal", "ancestral"))
    assert p_value(histogram(model, num_steps=3, **settings), enumerate_run(model, laws)) > 1e-3


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
@pytest.mark.parametrize("kappa", [1.0, 0.3])
def test_each_step_follows_its_enumerated_transition(kind, kappa):
    """The joint law of x before and after the second of three steps; noise left alone instead of redrawn is found."""
    model, V = stub(kind, V=3), 3
    settings = {} if kappa == 1 else {"sampler": "psi", "psi": f"constant-{kappa}"}
    output = model.generate(
        num_samples=12000, num_steps=3, seed=3, output_history=True, return_dict_in_generate=True, **settings
    )
    before, after = (V * x[:, 0] + x[:, 1] for x in output.history[1:3])
    counts = torch.bincount(before * V**2 + after, minlength=V**4).double()

    laws = psi_laws(model.process, 3, [kappa] * 3)
    law_before = enumerate_run(model, laws[:1])
    states = torch.tensor(list(itertools.product(range(V), repeat=2)))
    t, law = laws[1]
    logits = model.prediction(states, torch.full((len(states),), t, dtype=torch.float64))
    q = law(log_probs(model.process, logits.masked_fill(mask_column(model), -1e6), states).exp(), states)
    transition = q[:, 0][:, states[:, 0]] * q[:, 1][:, states[:, 1]]
    assert p_value(counts, (law_before[:, None] * transition).flatten()) > 1e-3


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
def test_remdm_loop_follows_the_enumerated_law(kind):
    """A plateau of the time grid, where only the forward branch does anything, and three different modes."""
    model = stub(kind, V=3, seed=1)
    times = samplers.time_grid("linear-constant-linear-0.4", 5, [0.4, 0.4])
    modes = ["pure-posterior", "constant-remdm-0.3", "max-rescale-0.8"]
    kappa = samplers.kappas(modes, [0.4, 0.4], [1 - (1 - 1e-3) * t for t in times])
    assert times[2] == times[3] == times[4] == 0.4 and kappa[2] == kappa[3] < 1
    counts = histogram(
        model,
        num_steps=5,
        sampler="psi",
        psi=modes,
        psi_fractions=[0.4, 0.4],
        time_grid="linear-constant-linear-0.4",
    )
    assert p_value(counts, enumerate_run(model, psi_laws(model.process, 5, kappa, times))) > 1e-3


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
@pytest.mark.parametrize("controls", [{"temperature": 0.6}, {"top_k": 2}, {"top_p": 0.7}])
def test_controls_act_on_the_prediction_and_not_on_the_posterior(kind, controls):
    model = stub(kind, V=4, seed=2)
    counts = histogram(model, num_steps=2, **controls)
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | controls

    def truncate(logits):
        return control(logits.flatten(0, -2), **settings).view_as(logits).clamp_min(-1e6)

    assert p_value(counts, enumerate_run(model, psi_laws(model.process, 2, [1.0] * 2), truncate)) > 1e-3


def test_wrong_rates_are_found_out(monkeypatch):
    """The control: the same test fails for plausible mistakes, so it has the power to find them."""
    duo, mdlm = stub("duo", V=3), stub("mdlm", V=4)
    right = samplers.uniform_rates
    monkeypatch.setattr(samplers, "uniform_rates", lambda t, s, V: (right(t, s, V)[0] / V, *right(t, s, V)[1:]))
    law = enumerate_run(duo, psi_laws(duo.process, 3, [1.0] * 3))
    assert p_value(histogram(duo, num_steps=3), law) < 1e-9
    monkeypatch.setattr(samplers, "absorbing_rates", lambda t, s, kappa: (s - t if s < 1 else 1.0, 0.0))
    law = enumerate_run(mdlm, psi_laws(mdlm.process, 3, [1.0] * 3))
    assert p_value(histogram(mdlm, num_steps=3), law) < 1e-9


def random_order_law(model: Stub) -> torch.Tensor:
    """Masks fall one at a time in uniformly random order."""
    V, L = model.process.vocab_size, model.config.max_position_embeddings
    law = torch.zeros(V**L, dtype=torch.float64)
    place = V ** torch.arange(L - 1, -1, -1)

    def visit(x, left, probability):
        if not left:
            law[(x * place).sum()] += probability
            return
        logits = model.prediction(x[None], torch.zeros(1))[0]
        for position in left:
            p = logits[position].masked_fill(mask_column(model), -torch.inf).softmax(-1)
            for token in range(V - 1):
                new = x.clone()
                new[position] = token
                visit(new, [k for k in left if k != position], probability * p[token] / len(left))

    visit(torch.full((L,), model.process.mask_id), list(range(L)), 1.0)
    return law


def test_first_hitting_follows_the_law_of_random_order():
    model = stub("mdlm", V=3, L=3, seed=4)
    output = model.generate(num_samples=2, seed=0, sampler="first_hitting", return_dict_in_generate=True)
    assert output.num_forward_calls == 3
    assert p_value(histogram(model, sampler="first_hitting"), random_order_law(model)) > 1e-3


def test_first_hitting_times_are_those_of_the_process():
    """The time at which the last of n masks falls has P(t < s) = (1 - (masked fraction at s)) ^ ... of n independent
    masks: here the first of n = 3, so P(T <= s) = s^3 in units of the masked fraction."""
    seen = []
    model = independent_stub("mdlm", [0.5, 0.5], 3)
    for seed in range(400):
        steps = []
        model.generate(seed=seed, sampler="first_hitting", callback=lambda step, steps=steps: steps.append(step.t))
        seen.append(steps)
    first = torch.tensor(seen)[:, 0]
    assert ((torch.tensor(seen).diff(dim=1)) < 0).all()
    counts = torch.histc(first**3, bins=8, min=0, max=1).double()
    assert p_value(counts, torch.ones(8, dtype=torch.float64)) > 1e-3


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
def test_samplers_change_the_order_but_not_the_marginals(kind):
    """When the prediction depends on nothing, all samplers give it at every position."""
    p = [0.5, 0.3, 0.15, 0.05]
    model = independent_stub(kind, p, 6)
    extra = ["first_hitting", "confidence", "margin", "entropy"] if kind == "mdlm" else []
    for sampler in ["ancestral", "psi", *extra]:
        steps = {} if sampler == "first_hitting" else {"num_steps": 4}
        x = model.generate(num_samples=2000, sampler=sampler, seed=11, **steps)
        counts = torch.bincount(x.flatten(), minlength=len(p))[: len(p)].double()
        assert p_value(counts, torch.tensor(p, dtype=torch.float64)) > 1e-3, sampler


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
@pytest.mark.parametrize("N", [1, 2, 4, 16])
def test_a_certain_network_leaves_no_noise_and_no_mask(kind, N):
    """Also where the steps exceed the length or do not divide it."""
    L, V = 7, 6
    truth = torch.tensor([4, 0, 1, 3, 3, 2, 0])
    table = torch.full((1, L, V), -torch.inf, dtype=torch.float64).scatter(-1, truth[None, :, None], 0.0)
    model = Stub(AbsorbingProcess(V, V - 1) if kind == "mdlm" else UniformProcess(V), table)
    extra = ["first_hitting", "confidence", "margin", "entropy"] if kind == "mdlm" else []
    for sampler in ["ancestral", "psi", *extra]:
        steps = {} if sampler == "first_hitting" else {"num_steps": N}
        x = model.generate(num_samples=20, sampler=sampler, seed=N, **steps)
        assert (x == truth).all(), sampler


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
def test_greedy_gives_the_likeliest_token_everywhere(kind):
    """Greedy decoding acts on the prediction: a token of probability 0.6 wins also under the noise of DUO."""
    model = independent_stub(kind, [0.1, 0.6, 0.2, 0.1], 8)
    for controls in ({"temperature": 0.0}, {"top_k": 1}):
        assert (model.generate(num_samples=10, num_steps=4, seed=0, **controls) == 1).all()


def test_neutral_controls_change_nothing():
    model = stub("duo", V=4)
    plain = model.generate(num_samples=50, num_steps=4, seed=0)
    assert model.generate(num_samples=50, num_steps=4, seed=0, temperature=1.0, top_p=1.0, top_k=0).equal(plain)
    assert model.generate(num_samples=50, num_steps=4, seed=0, top_k=4).equal(plain)


def test_the_head_runs_only_where_a_token_is_needed():
    """MDLM projects each position once in a run of any length; DUO far fewer than all in every step."""
    for kind, most in (("mdlm", 1.0), ("duo", 7.5)):
        model = independent_stub(kind, [0.4, 0.3, 0.3], 512)
        count, inner = [], model.logits
        model.logits = lambda hidden, c, count=count, inner=inner: (count.append(len(hidden)), inner(hidden, c))[1]
        model.generate(num_steps=16, seed=0)
        assert sum(count) == 512 if kind == "mdlm" else sum(count) < most * 512, sum(count) / 512


def test_chunks_and_rows_of_the_denoiser_cover_what_is_wanted():
    model = stub("duo", V=3, L=4)
    x = torch.randint(3, (5, 4), generator=torch.Generator().manual_seed(0))
    t, wanted = torch.rand(5), torch.rand(5, 4) < 0.5
    wanted[2] = False
    p = model.prediction(x, t).softmax(-1)
    for chunk_size in (1, 3, None):
        denoiser = Denoiser(model, temperature=1.0, top_k=0, top_p=1.0, chunk_size=chunk_size)
        denoiser.tokens_per_call = 8
        seen = torch.zeros_like(p)
        for prediction in denoiser(x, t, wanted, 1):
            seen[prediction.rows, prediction.columns] += prediction.p[prediction.source]
        torch.testing.assert_close(seen, p * wanted[..., None])
        assert denoiser.num_calls == 1
        assert list(denoiser(x, t, wanted & False, 1)) == [] and denoiser.num_calls == 1


def test_bounds_of_the_prediction_hold_and_change_no_token(monkeypatch):
    """DUO's head is skipped where a bound of p(x_t) settles the outcome: the same text from fewer rows of the head.

    A bound that is too low is found out.
    """
    model, inner, rows = tiny_model("duo", vocab_size=1000), DUOForMaskedLM.logits, []
    monkeypatch.setattr(DUOForMaskedLM, "logits", lambda *args: (rows.append(len(args[1])), inner(*args))[1])
    with torch.no_grad():
        model.backbone.output_layer.linear.weight *= 0.3
        x, t = torch.randint(1000, (1, 16), generator=torch.Generator().manual_seed(0)), torch.tensor([0.5])
        for temperature in (1.0, 0.5):
            denoiser = Denoiser(model, temperature=temperature, top_k=0, top_p=1.0)
            hidden, c = model(x, timesteps=t, positions=torch.arange(16)[None]).hidden_states
            p = (model(x, timesteps=t).logits[0] / temperature).softmax(-1)
            bounds = denoiser.log_p_bounds(hidden[0], c.expand(16, -1), x[0])
            assert (bounds > p.gather(1, x.T)[:, 0].log()).all()

    def text(**settings):
        rows.clear()
        return model.generate(num_samples=20, num_steps=8, seed=0, **settings), sum(rows)

    screened = [text(), text(sampler="psi", psi="constant-0.5"), text(temperature=0.7)]
    bound = Denoiser.log_p_bounds
    monkeypatch.setattr(Denoiser, "log_p_bounds", lambda *args: bound(*args) - 3)
    assert not text()[0].equal(screened[0][0])
    monkeypatch.setattr(Denoiser, "blocks", None)
    whole = [text(), text(sampler="psi", psi="constant-0.5"), text(temperature=0.7)]
    for (few, few_rows), (all_, all_rows) in zip(screened, whole, strict=True):
        assert few.equal(all_) and few_rows < 0.9 * all_rows


def test_a_masked_model_never_sees_the_same_input_twice():
    """A call is made only for tokens that will be put in, so no cache of predictions could save one."""
    model, seen = independent_stub("mdlm", [0.4, 0.3, 0.3], 12), []
    forward = model.forward
    model.forward = lambda input_ids, **kwargs: (seen.append(input_ids), forward(input_ids, **kwargs))[1]
    for settings in ({}, {"sampler": "psi"}, {"noise_removal": "greedy"}, {"sampler": "confidence"}):
        seen.clear()
        model.generate(seed=0, **{"num_steps": 40} | settings)
        assert 4 < len(seen) <= 41
        assert all(not a.equal(b) for a, b in itertools.pairwise(seen))


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
def test_a_network_that_predicts_nan_is_an_error(kind):
    model = tiny_model(kind)
    with torch.no_grad():
        model.backbone.blocks[0].mlp[0].weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="predicts nan"):
        model.generate(num_steps=2, seed=0)


def test_noise_of_a_row_is_its_own():
    def noise(rows, seed=0):
        return RowStreams(torch.Generator().manual_seed(seed), rows, torch.float64, "cpu")

    several, one = noise(3), noise(1)
    a, b = several.positions([4, 2, 3], 2, 4), one.positions([4], 2, 4)
    assert a[:1].equal(b) and (a[1, 2:] == 0).all() and a[1, :2].ne(a[0, :2]).all()
    all_rows, one_row = torch.ones(3, dtype=torch.bool), torch.ones(1, dtype=torch.bool)
    assert several.rows(all_rows, 2)[:1].equal(one.rows(one_row, 2))
    at_rest = several.rows(torch.tensor([False, True, True]), 2)[0]
    assert at_rest.tolist() == [0, 0]
    assert several.rows(all_rows, 2)[:1].equal(one.rows(one_row, 2)), "the stream of a row at rest has moved on"
