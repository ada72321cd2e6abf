"""The corruption processes: against recorded runs of the reference code, by enumeration, and by each other."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import recorded
from reference import log_probs, posterior

from tokendrift_hf.hub.process_tokendrift import (
    AbsorbingProcess,
    LogLinearSchedule,
    UniformProcess,
    check_times,
    stratified_times,
)

V = 98  # of the recorded files; the mask is the last id
PROCESSES = {"mdlm": AbsorbingProcess(V, V - 1), "duo": UniformProcess(V)}
SMALL = {"mdlm": AbsorbingProcess(4, 2), "duo": UniformProcess(3)}  # 3 real ids each; a mask in the middle of the ids


def transition(process, alpha: float) -> torch.Tensor:
    """The slow twin: q(x_t | x_s) as a V x V matrix, rows x_s, where `alpha` is alpha_t / alpha_s."""
    size = process.vocab_size
    if isinstance(process, AbsorbingProcess):
        noise = torch.zeros(size, dtype=torch.float64)
        noise[process.mask_id] = 1
    else:
        noise = torch.full((size,), 1 / size, dtype=torch.float64)
    return alpha * torch.eye(size, dtype=torch.float64) + (1 - alpha) * noise


def all_pairs(process) -> tuple[torch.Tensor, torch.Tensor]:
    """Every (x_0, x_t) that can occur with 0 < alpha_t < 1, both [n, 1]."""
    size = process.vocab_size
    mask_id = process.mask_id
    pairs = [(a, b) for a in range(size) if a != mask_id for b in range(size) if mask_id is None or b in (a, mask_id)]
    return torch.tensor(pairs)[:, :1], torch.tensor(pairs)[:, 1:]


def one_hot(ids: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(ids, size).double()


# Schedule


def test_schedule_matches_recorded_runs():
    schedule = LogLinearSchedule()
    for file in (recorded("mdlm_losses"), recorded("duo_losses")):
        t = file["schedule.t"]
        torch.testing.assert_close(schedule.sigma(t), file["schedule.sigma"], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(schedule.alpha(t), file["schedule.alpha"], rtol=1e-12, atol=0)
    torch.testing.assert_close(schedule.d_alpha(t), file["schedule.dalpha"], rtol=1e-12, atol=0)
    mdlm = recorded("mdlm_losses")
    t, alpha = mdlm["schedule.t"], schedule.alpha(mdlm["schedule.t"])
    torch.testing.assert_close(1 - alpha, mdlm["schedule.move_chance"], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(-schedule.d_alpha(t) / alpha, mdlm["schedule.dsigma"], rtol=1e-12, atol=0)
    torch.testing.assert_close(-schedule.d_alpha(t) / (1 - alpha), mdlm["schedule.loss_weight"], rtol=1e-9, atol=0)


def test_schedule_is_consistent_with_itself():
    """d_alpha is the derivative of alpha, time_of_alpha its inverse, sigma = -ln alpha, and alpha(0) = 1."""
    schedule = LogLinearSchedule(eps=1e-2)
    t = torch.linspace(0, 1, 21, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(schedule.alpha(t).sum(), t)
    torch.testing.assert_close(schedule.d_alpha(t), gradient)
    torch.testing.assert_close(schedule.time_of_alpha(schedule.alpha(t)), t, rtol=0, atol=1e-15)
    torch.testing.assert_close(schedule.sigma(t), -schedule.alpha(t).log(), rtol=0, atol=1e-14)
    assert schedule.alpha(t)[0] == 1 and schedule.sigma(t)[0] == 0


def test_sigma_is_accurate_at_small_times_in_float32():
    t = torch.tensor([1e-6, 1e-4])
    exact = LogLinearSchedule().sigma(t.double())
    torch.testing.assert_close(LogLinearSchedule().sigma(t).double(), exact, rtol=1e-6, atol=0)


def test_stratified_times():
    """Equal to both references, and one time falls in each stratum whatever the draws."""
    for file in (recorded("mdlm_losses"), recorded("duo_losses")):
        torch.testing.assert_close(stratified_times(file["sample_t.uniform"]), file["sample_t.antithetic"])
    uniforms = torch.rand(16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    unit = (stratified_times(uniforms, eps=0.1) - 0.1) / 0.9
    assert (unit.sort().values * 16).floor().tolist() == list(range(16))


# Corruption


def test_corruption_matches_recorded_runs():
    mdlm, duo = recorded("mdlm_losses"), recorded("duo_losses")
    t, uniform, x_0 = mdlm["q_xt.t"], mdlm["q_xt.uniform"], mdlm["q_xt.x0"]
    assert PROCESSES["mdlm"].corrupt(x_0, t, uniform).equal(mdlm["q_xt.xt"])
    arguments = [duo[f"q_xt.{name}"] for name in ("x0", "t", "uniform", "random_tokens")]
    for kind, process in PROCESSES.items():
        assert process.corrupt(*arguments).equal(duo[f"q_xt.{kind}.xt"])


@pytest.mark.parametrize("kind", SMALL)
def test_corruption_follows_the_transition_matrix(kind):
    """Over an even grid of draws, the share of each x_t is q(x_t | x_0), at t = 0 and t = 1 as well."""
    process, n = SMALL[kind], 1200
    uniforms = ((torch.arange(n, dtype=torch.float64) + 0.5) / n).repeat_interleave(process.vocab_size)
    random_tokens = torch.arange(process.vocab_size).repeat(n)
    for t in (0.0, 0.3, 1.0):
        alpha = float(process.schedule.alpha(torch.tensor(t, dtype=torch.float64)))
        for x_0 in (0, 1):
            clean, time = torch.full((1, len(uniforms)), x_0), torch.tensor([t], dtype=torch.float64)
            x_t = process.corrupt(clean, time, uniforms[None], random_tokens[None])
            share = torch.bincount(x_t.flatten(), minlength=process.vocab_size) / x_t.numel()
            torch.testing.assert_close(share.double(), transition(process, alpha)[x_0], rtol=0, atol=1.5 / n)


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("t", [6.9, -1e-6, 1.0001, math.inf, math.nan])
def test_times_outside_0_to_1_are_refused(kind, t):
    process, ids, times = SMALL[kind], torch.zeros(2, 3, dtype=torch.long), torch.tensor([0.5, t])
    with pytest.raises(ValueError, match=r"timesteps run from .* A diffusion time is from 0 .* to 1"):
        process.corrupt(ids, times, torch.rand(2, 3), ids)
    with pytest.raises(ValueError, match=r"timesteps run from .* A diffusion time is from 0 .* to 1"):
        process.nelbo(torch.zeros(2, 3, process.vocab_size), ids, ids, times)


def test_the_smallest_time_is_a_time():
    for eps in (-0.1, 1.0, 6.9, math.nan):
        with pytest.raises(ValueError, match=f"eps={eps}. The smallest time must be in"):
            stratified_times(torch.rand(4), eps=eps)


def test_the_host_waits_for_no_other_device_to_check_a_time():
    """A value of a meta tensor cannot be read, so this would raise."""
    check_times(torch.empty(3, device="meta"))


def test_prior_and_predicted_positions():
    ids = torch.tensor([[0, 1, 97], [3, 97, 5]])
    assert PROCESSES["mdlm"].prior(ids).eq(97).all() and PROCESSES["duo"].prior(ids).equal(ids)
    assert PROCESSES["mdlm"].predicted_positions(ids).equal(ids == 97)
    assert PROCESSES["duo"].predicted_positions(ids).all()


# Posterior


@pytest.mark.parametrize("kind", PROCESSES)
def test_posterior_matches_recorded_runs(kind):
    """The recorded alphas are float32, hence the tolerance; a recorded s of -1 is the last step, alpha_s = 1."""
    file = recorded(f"posterior_{kind}")
    for i in range(5):
        alpha_t, alpha_s = file[f"{i}.alpha_t"].flatten().double(), file[f"{i}.alpha_s"].flatten().double()
        q = posterior(PROCESSES[kind], file[f"{kind}.p_x0"], file[f"{kind}.x_t"], alpha_t, alpha_s)
        torch.testing.assert_close(q, file[f"{kind}.{i}.q_xs"], rtol=1e-5, atol=1e-6)


def test_posterior_matches_the_reverse_steps_of_mdlm():
    """All three recorded predictors draw from one law; they differ in normalisation only."""
    file = recorded("mdlm_reverse_steps")
    process, x_t = PROCESSES["mdlm"], file["x_t"]
    masked = process.predicted_positions(x_t)
    log_p = log_probs(process, file["logits"].double(), x_t)
    p_x0 = log_p.exp()
    for i, (t, s) in enumerate(file["t_s"].double()):
        alpha_t, alpha_s = process.schedule.alpha(t).expand(3), process.schedule.alpha(s).expand(3)
        q = posterior(process, p_x0, x_t, alpha_t, alpha_s)
        for predictor in ("ddpm", "ddpm_cache", "analytic"):
            weights = file[f"{predictor}.{i}.unnormalised"][masked].double()
            weights = weights / weights.sum(-1, keepdim=True)
            torch.testing.assert_close(q[masked], weights, rtol=1e-4, atol=2e-6)
    last = posterior(
        process, p_x0, x_t, process.schedule.alpha(torch.full((3,), 1e-5).double()), torch.ones(3).double()
    )
    weights = file["denoiser.unnormalised"][masked].double()
    torch.testing.assert_close(last[masked], weights / weights.sum(-1, keepdim=True), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("alphas", [(0.2, 0.5), (0.999, 0.9999), (0.001, 0.002), (0.3, 1.0)])
def test_posterior_is_bayes_rule(kind, alphas):
    """For every x_0 and x_t: q(x_s | x_t, x_0) = q(x_t | x_s) q(x_s | x_0) / q(x_t | x_0), and it sums to 1."""
    process = SMALL[kind]
    x_0, x_t = all_pairs(process)
    alpha_t, alpha_s = (torch.full((len(x_0),), a, dtype=torch.float64) for a in alphas)
    q = posterior(process, one_hot(x_0, process.vocab_size), x_t, alpha_t, alpha_s)
    step, to_s, to_t = (transition(process, alpha) for alpha in (alphas[0] / alphas[1], alphas[1], alphas[0]))
    for row, a, b in zip(q[:, 0], x_0.flatten(), x_t.flatten(), strict=True):
        torch.testing.assert_close(row, step[:, b] * to_s[a] / to_t[a, b], rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(q.sum(-1), torch.ones(len(x_0), 1).double())


@pytest.mark.parametrize("kind", SMALL)
def test_posterior_keeps_the_marginals(kind):
    """sum over x_t of q(x_t|x_0) q(x_s|x_t, x_0) = q(x_s|x_0), and over x_s of q(x_t|x_s) q(x_s|x_0) = q(x_t|x_0)."""
    process, alpha_t, alpha_s = SMALL[kind], 0.3, 0.7
    size = process.vocab_size
    x_0, x_t = all_pairs(process)
    alphas = (torch.full((len(x_0),), a, dtype=torch.float64) for a in (alpha_t, alpha_s))
    q = posterior(process, one_hot(x_0, size), x_t, *alphas)[:, 0]
    joint = transition(process, alpha_t)[x_0.flatten(), x_t.flatten(), None] * q
    marginal = torch.zeros(size, size, dtype=torch.float64).index_add(0, x_0.flatten(), joint)
    real = x_0.unique()
    torch.testing.assert_close(marginal[real], transition(process, alpha_s)[real])
    chained = transition(process, alpha_s) @ transition(process, alpha_t / alpha_s)
    torch.testing.assert_close(chained, transition(process, alpha_t))


def test_posterior_of_a_soft_prediction():
    """MDLM mixes the posteriors of the clean tokens; DUO puts the soft prediction into the posterior of one token."""
    alpha_t, alpha_s = (torch.tensor([a], dtype=torch.float64) for a in (0.3, 0.6))
    p = torch.tensor([0.2, 0.5, 0.0, 0.3], dtype=torch.float64)
    process = SMALL["mdlm"]
    mask = torch.tensor([[2]])
    mixed = sum(p[k] * posterior(process, one_hot(torch.tensor([[k]]), 4), mask, alpha_t, alpha_s) for k in (0, 1, 3))
    torch.testing.assert_close(posterior(process, p[None, None], mask, alpha_t, alpha_s), mixed)

    p, process = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64), SMALL["duo"]
    for x_t in range(3):
        step, to_s = transition(process, 0.5), p @ transition(process, 0.6)
        expected = step[:, x_t] * to_s / (step[:, x_t] * to_s).sum()
        q = posterior(process, p[None, None], torch.tensor([[x_t]]), alpha_t, alpha_s)
        torch.testing.assert_close(q[0, 0], expected)


# Log-probabilities


def test_log_probs_match_recorded_runs():
    """SUBS and plain log-softmax; the mask column of the reference is only "below -9e5"."""
    file = recorded("mdlm_reverse_steps")
    log_p = log_probs(PROCESSES["mdlm"], file["logits"], file["x_t"])
    torch.testing.assert_close(log_p[..., : V - 1], file["log_x_theta"][..., : V - 1], rtol=1e-5, atol=1e-5)
    assert log_p[..., V - 1][file["x_t"] == V - 1].max() < -9e5
    file = recorded("duo_losses")
    for kind, process in PROCESSES.items():
        log_p = log_probs(process, file["loss.logits"], file[f"q_xt.{kind}.xt"])[..., : V - 1]
        torch.testing.assert_close(log_p, file[f"loss.{kind}.log_x_theta"][..., : V - 1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", PROCESSES)
def test_low_precision_logits_are_normalised_in_float32(kind):
    file = recorded("duo_losses")
    process, logits = PROCESSES[kind], file["loss.logits"].bfloat16()
    x_0, x_t, t = file["q_xt.x0"], file[f"q_xt.{kind}.xt"], file["loss.t"]
    assert process.nelbo(logits, x_0, x_t, t).equal(process.nelbo(logits.float(), x_0, x_t, t))


# NELBO


@pytest.mark.parametrize("kind", PROCESSES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 2e-6)])
def test_nelbo_matches_recorded_runs(kind, dtype, tolerance):
    """The recorded alphas are those of float32 times, so the float64 agreement is limited by them."""
    file = recorded("duo_losses")
    nelbo = PROCESSES[kind].nelbo(
        file["loss.logits"].to(dtype), file["q_xt.x0"], file[f"q_xt.{kind}.xt"], file["loss.t"].to(dtype)
    )
    expected = file[f"loss.{kind}.per_token_f64"]
    torch.testing.assert_close(nelbo.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize("kind", SMALL)
def test_nelbo_is_the_rate_of_the_divergence_of_the_reverse_step(kind):
    """nelbo = lim KL(q(x_s | x_t, x_0) || q(x_s | x_t, prediction)) / (t - s): loss and sampler belong together."""
    process = SMALL[kind]
    x_0, x_t = all_pairs(process)
    n = len(x_0)
    logits = torch.randn(n, 1, process.vocab_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    t, step = torch.linspace(0.1, 0.9, n, dtype=torch.float64), 1e-7
    alpha_t, alpha_s = process.schedule.alpha(t), process.schedule.alpha(t - step)
    true = posterior(process, one_hot(x_0, process.vocab_size), x_t, alpha_t, alpha_s)
    predicted = posterior(process, log_probs(process, logits, x_t).exp(), x_t, alpha_t, alpha_s)
    divergence = torch.special.xlogy(true, true / predicted.clamp_min(1e-300)).sum(-1)
    nelbo = process.nelbo(logits, x_0, x_t, t)
    torch.testing.assert_close(nelbo, divergence / step, rtol=1e-4, atol=2e-6)
    assert (nelbo >= 0).all() and (nelbo > 0.01).any()


def slow_duo_nelbo(logits, x_0, x_t, t, eps=1e-3):
    """DUO's loss for one position, term by term as in the paper (equation 15), in float64."""
    K, alpha = len(logits), 1 - (1 - eps) * t
    p = torch.softmax(logits, -1)
    bar = lambda y: K * alpha * y + 1 - alpha  # noqa: E731
    r = bar(one_hot(x_0, K)) / bar(one_hot(x_0, K))[x_t]
    r_model = bar(p) / bar(p)[x_t]
    return (1 - eps) / (K * alpha) * (r_model - r + r * (r / r_model).log()).sum()


def test_duo_nelbo_and_its_gradient_match_a_slow_twin():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(2, 5, 11, generator=generator, dtype=torch.float64).mul(3).requires_grad_()
    x_0 = torch.randint(11, (2, 5), generator=generator)
    x_t = torch.where(torch.rand(2, 5, generator=generator) < 0.5, x_0, torch.randint(11, (2, 5), generator=generator))
    t = torch.tensor([0.05, 0.95], dtype=torch.float64)
    nelbo = UniformProcess(11).nelbo(logits, x_0, x_t, t)
    twin = torch.stack(
        [torch.stack([slow_duo_nelbo(logits[b, i], x_0[b, i], x_t[b, i], t[b]) for i in range(5)]) for b in range(2)]
    )
    torch.testing.assert_close(nelbo, twin, rtol=1e-9, atol=1e-9)
    gradients = (torch.autograd.grad(y.sum(), logits, retain_graph=True)[0] for y in (nelbo, twin))
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-8)


def test_mdlm_nelbo_is_cross_entropy_over_t():
    """At masked positions exactly -log p(x_0) / t, elsewhere 0, and no gradient reaches the mask's own logit."""
    process = AbsorbingProcess(5, 4)
    logits = torch.randn(1, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    x_0, x_t = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[4, 1, 4, 4]])
    nelbo = process.nelbo(logits, x_0, x_t, torch.tensor([0.25], dtype=torch.float64))
    expected = -4 * torch.log_softmax(logits[..., :4], -1).gather(-1, x_0[..., None])[..., 0]
    expected = torch.where(x_t == 4, expected, 0.0)
    torch.testing.assert_close(nelbo, expected)
    (gradient,) = torch.autograd.grad(nelbo.sum(), logits)
    assert gradient[..., 4].eq(0).all() and gradient[0, 1].eq(0).all() and gradient[0, 0, 0] < 0


@pytest.mark.parametrize("kind", PROCESSES)
def test_nelbo_is_finite_at_both_ends_of_time(kind):
    """t = 0 has nothing masked and, for DUO, the limit of small t; gradients are finite too, in float32."""
    file = recorded("duo_losses")
    x_0, logits = file["q_xt.x0"], file["loss.logits"].clone().requires_grad_()
    for t, x_t in ((0.0, x_0), (1.0, file[f"q_xt.{kind}.xt"])):
        nelbo = PROCESSES[kind].nelbo(logits, x_0, x_t, torch.full((3,), t))
        (gradient,) = torch.autograd.grad(nelbo.sum(), logits)
        assert nelbo.isfinite().all() and gradient.isfinite().all()
        if t == 0 and kind == "mdlm":
            assert nelbo.eq(0).all() and gradient.eq(0).all()
        if t == 0 and kind == "duo":
            limit = PROCESSES[kind].nelbo(logits.double(), x_0, x_t, torch.full((3,), 1e-5).double())
            torch.testing.assert_close(nelbo.double(), limit, rtol=2e-2, atol=1e-3)


def test_nelbo_of_a_perfect_prediction_is_zero():
    x_0, x_t = torch.tensor([[0, 1, 2]]), torch.tensor([[0, 2, 2]])
    logits = one_hot(x_0, 3).float() * 200
    assert UniformProcess(3).nelbo(logits, x_0, x_t, torch.tensor([0.5])).abs().max() < 1e-6
    masked = AbsorbingProcess(4, 3).nelbo(one_hot(x_0, 4) * 200, x_0, torch.full((1, 3), 3), torch.tensor([0.5]))
    assert masked.abs().max() < 1e-6


@pytest.mark.parametrize("kind", SMALL)
def test_nelbo_averages_to_the_entropy_of_a_known_source(kind):
    """With the best possible prediction the mean NELBO over t and x_t is the entropy of the data: the bound is tight.

    One token with law pi. No neighbour tells anything, so the best prediction is pi itself: in DUO as well, where the
    prediction leaves out what the token shows of itself. At t = 1 a share eps of signal is left: eps ln V at most.
    """
    process = SMALL[kind]
    pi = torch.tensor([0.6, 0.3, 0.0, 0.1] if kind == "mdlm" else [0.6, 0.3, 0.1], dtype=torch.float64)
    x_0, x_t = all_pairs(process)
    logits = pi.clamp_min(1e-300).log().expand(len(x_0), 1, -1)
    nodes = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    total = 0.0
    for t in nodes:
        to_t = transition(process, float(process.schedule.alpha(t)))
        joint = pi[x_0[:, 0]] * to_t[x_0[:, 0], x_t[:, 0]]
        total += float((joint * process.nelbo(logits, x_0, x_t, t.expand(len(x_0)))[:, 0]).sum()) / len(nodes)
    entropy = -float(torch.special.xlogy(pi, pi).sum())
    assert math.isclose(total, entropy, abs_tol=2e-3)
