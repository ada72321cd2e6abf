"""The objectives against literal twins in float64, and the propositions of the paper's theory sections."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tokendrift_hf.objective.drift import drift_field
from tokendrift_hf.objective.lift import soft_lift
from tokendrift_hf.objective.losses import feature_loss, mirror_loss

B, L, V, D, M = 3, 5, 9, 6, 8
DIVERGENCES = ["kl", "mse"]


class Encoder:
    """phi(softmax(l) E) with a random two-layer network: mean over tokens, unit norm."""

    def __init__(self, vocab=V, dtype=torch.float64, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.embedding = torch.randn(vocab, D, generator=g, dtype=torch.float64).to(dtype)
        self.w_1 = torch.randn(D, 16, generator=g, dtype=torch.float64).to(dtype)
        self.w_2 = (torch.randn(16, M, generator=g, dtype=torch.float64) / 4).to(dtype)

    def __call__(self, embeds):
        hidden = torch.tanh(embeds @ self.w_1) @ self.w_2
        return F.normalize(hidden.to(torch.promote_types(hidden.dtype, torch.float32)).mean(dim=1), dim=-1)

    def lift(self, logits, predicted):
        input_ids = torch.zeros(logits.shape[:2], dtype=torch.long)
        return self(soft_lift(logits, self.embedding, input_ids, predicted))

    def plain(self, logits, predicted):
        soft = torch.softmax(logits, dim=-1) @ self.embedding
        return self(torch.where(predicted[..., None], soft, self.embedding[0]))


def setting(dtype=torch.float64, length=L, mask_logit=None):
    g = torch.Generator().manual_seed(1)
    logits = 1.5 * torch.randn(B, length, V, generator=g, dtype=torch.float64)
    if mask_logit is not None:
        logits[..., -1] = mask_logit
    predicted = torch.rand(B, length, generator=g) < 0.7
    predicted[:, 0], predicted[:, 1] = True, False
    field = torch.randn(B, M, generator=g, dtype=torch.float64)
    field /= field.square().sum(dim=-1).mean().sqrt()
    return logits.to(dtype).requires_grad_(), predicted, field.to(dtype)


def jacobian(encoder, logits, predicted):
    """J: [B, m, L, V] of h_i with respect to its own logits, through the plain softmax."""

    def one(row, mask):
        return torch.autograd.functional.jacobian(lambda x: encoder.plain(x[None], mask[None])[0], row)

    return torch.stack([one(row, mask) for row, mask in zip(logits.detach(), predicted, strict=True)])


# ---- feature loss -----------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_feature_loss_is_its_formula_and_its_gradient_follows_the_drift(alpha):
    """Proposition (drift gradient): dL/dh = -alpha V / B and dL/dl = -alpha J^T V / B."""
    encoder, (logits, predicted, field) = Encoder(), setting()
    features = encoder.lift(logits, predicted)
    loss = feature_loss(features, field, alpha)
    target = (features + alpha * field).detach()
    torch.testing.assert_close(loss, ((features - target) ** 2).sum() / (2 * B), rtol=1e-12, atol=0)
    assert float(loss.detach()) == pytest.approx(alpha**2 / 2)
    grad_h, grad_l = torch.autograd.grad(loss, [features, logits])
    torch.testing.assert_close(grad_h, -alpha * field / B, rtol=1e-12, atol=1e-15)
    pulled_back = torch.einsum("bmlv,bm->blv", jacobian(encoder, logits, predicted), field)
    torch.testing.assert_close(grad_l, -alpha * pulled_back / B, rtol=1e-10, atol=1e-13)


def test_one_step_on_the_feature_loss_moves_features_along_the_drift():
    """<h(l+) - h(l), V> = gamma alpha |J^T V|^2 + O(gamma^2), sample by sample."""
    encoder, (logits, predicted, field) = Encoder(), setting()
    features = encoder.lift(logits, predicted)
    (grad,) = torch.autograd.grad(feature_loss(features, field), logits)
    gamma = 1e-4 * B
    moved = encoder.lift(logits - gamma * grad, predicted)
    progress = ((moved - features) * field).sum(dim=-1)
    assert (progress > 0).all()
    pulled_back = torch.einsum("bmlv,bm->blv", jacobian(encoder, logits, predicted), field)
    torch.testing.assert_close(progress, gamma / B * pulled_back.square().sum(dim=(1, 2)), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", ["paper", "drifting"])
def test_equilibrium_gives_no_loss_and_no_gradient(dtype, kernel):
    """Corollary (equilibrium), through the whole chain: equal reference sets, in another order."""
    encoder, (logits, predicted, _) = Encoder(dtype=dtype), setting(dtype)
    g = torch.Generator().manual_seed(2)
    u = F.normalize(torch.randn(20, M, generator=g, dtype=torch.float64), dim=-1).to(dtype)
    features = encoder.lift(logits, predicted)
    field = drift_field(features, u, u[torch.randperm(20, generator=g)], kernel=kernel).field
    other = drift_field(features, u, -u, kernel=kernel).field
    for objective in (
        lambda v: feature_loss(encoder.lift(logits, predicted), v),
        *(
            lambda v, name=name: mirror_loss(
                logits, encoder.lift(logits, predicted), v, predicted, divergence=name, step_size=1.0
            )[0]
            for name in DIVERGENCES
        ),
    ):
        loss, away = objective(field), objective(other)
        (grad,), (grad_away,) = torch.autograd.grad(loss, logits), torch.autograd.grad(away, logits)
        assert loss < 1e-4 * away
        assert grad.norm() < 1e-2 * grad_away.norm()


# ---- mirror teacher ---------------------------------------------------------------------------------


def literal_mirror(encoder, logits, field, predicted, divergence, eta):
    """The paper's equations, one after the other."""
    (g,) = torch.autograd.grad((encoder.plain(logits, predicted) * field).sum(), logits)
    target = (logits + eta * g).detach()
    if divergence == "kl":
        log_p, log_p_star = logits.log_softmax(dim=-1), target.log_softmax(dim=-1)
        per_position = F.kl_div(log_p, log_p_star, reduction="none", log_target=True).sum(dim=-1)
    else:
        per_position = (target - logits).square().sum(dim=-1)
    return per_position[predicted].sum() / B, g


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("eta", [0.5, 20.0])
@pytest.mark.parametrize("chunk_size", [2, 512])
def test_mirror_loss_equals_the_literal_equations(divergence, eta, chunk_size):
    encoder, (logits, predicted, field) = Encoder(), setting()
    expected, g = literal_mirror(encoder, logits, field, predicted, divergence, eta)
    (expected_grad,) = torch.autograd.grad(expected, logits)
    untouched = field.clone()
    features = encoder.lift(logits, predicted)
    loss, statistics = mirror_loss(
        logits, features, field, predicted, divergence=divergence, eta=eta, chunk_size=chunk_size
    )
    (grad,) = torch.autograd.grad(3 * loss, logits)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(grad, 3 * expected_grad, rtol=1e-9, atol=1e-13)
    torch.testing.assert_close(field, untouched, rtol=0, atol=0)
    assert float(statistics["mirror_eta"]) == eta
    p = logits.softmax(dim=-1).detach()
    variance = (p * g**2).sum(dim=-1) - (p * g).sum(dim=-1) ** 2
    step = eta * variance[predicted].mean().sqrt()
    torch.testing.assert_close(statistics["mirror_step"], step, rtol=1e-10, atol=0)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("chunk_size", [2, 512])
def test_gradient_reaches_the_weights_behind_the_logits(divergence, chunk_size):
    encoder, (inputs, predicted, field) = Encoder(), setting()
    weight = torch.eye(V, dtype=torch.float64, requires_grad=True)
    logits = inputs.detach() @ weight
    features = encoder.lift(logits, predicted)
    settings = dict(divergence=divergence, step_size=1.0, chunk_size=chunk_size)
    loss, statistics = mirror_loss(logits, features, field, predicted, **settings)
    (grad,) = torch.autograd.grad(loss, weight, retain_graph=True)
    grad = grad.clone()
    eta = float(statistics["mirror_eta"])
    expected, _ = literal_mirror(encoder, inputs.detach() @ weight, field, predicted, divergence, eta)
    torch.testing.assert_close(grad, torch.autograd.grad(expected, weight)[0], rtol=1e-9, atol=1e-12)
    # A second backward is right or refused, and never a gradient that is scaled twice.
    if chunk_size == 2:
        with pytest.raises(RuntimeError, match="inplace"):
            torch.autograd.grad(2 * loss, weight)
    else:
        torch.testing.assert_close(torch.autograd.grad(2 * loss, weight)[0], 2 * grad)


def teacher(logits, features, field, predicted, eta):
    """p* and l* of the implementation, read off the gradients (p - p*)/B and 2 (l - l*)/B."""
    kl, _ = mirror_loss(logits, features(logits), field, predicted, divergence="kl", eta=eta)
    mse, _ = mirror_loss(logits, features(logits), field, predicted, divergence="mse", eta=eta)
    (grad_kl,), (grad_mse,) = torch.autograd.grad(kl, logits), torch.autograd.grad(mse, logits)
    p_star = logits.softmax(dim=-1) - len(logits) * grad_kl
    return p_star.detach(), (logits - len(logits) / 2 * grad_mse).detach()


def project_to_simplex(x):
    """Euclidean projection of each row, by sorting."""
    ordered = x.sort(dim=-1, descending=True).values
    excess = ordered.cumsum(dim=-1) - 1
    index = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype)
    support = (ordered - excess / index > 0).sum(dim=-1, keepdim=True)
    return (x - excess.gather(-1, support - 1) / support).clamp(min=0)


@pytest.mark.parametrize("eta", [0.5, 10.0])
def test_the_mirror_teacher_is_the_best_point_of_the_simplex(eta):
    """Proposition (mirror teacher): p* maximises <g, q> - KL(q || p) / eta, position by position."""
    encoder, (logits, predicted, field) = Encoder(), setting()
    logits = (0.4 * logits).detach().requires_grad_()  # flat enough for projected gradients to get somewhere
    _, g = literal_mirror(encoder, logits, field, predicted, "mse", eta)
    p_star, _ = teacher(logits, lambda x: encoder.lift(x, predicted), field, predicted, eta)
    g, p, p_star = g[predicted], logits.softmax(dim=-1)[predicted].detach(), p_star[predicted]
    torch.testing.assert_close(p_star.sum(dim=-1), torch.ones(len(p), dtype=torch.float64))
    assert (p_star > 0).all()

    def value(q):
        return (g * q).sum(dim=-1) - (torch.xlogy(q, q) - q * p.log()).sum(dim=-1) / eta

    best = value(p_star)
    generator = torch.Generator().manual_seed(3)
    for _ in range(300):
        random = torch.rand(p.shape, generator=generator, dtype=torch.float64).pow(4)
        random /= random.sum(dim=-1, keepdim=True)
        for nearness in (0.0, 0.9, 0.999):
            assert (value(nearness * p_star + (1 - nearness) * random) < best).all()
    q, rate = torch.full_like(p, 1 / V), torch.full_like(best, 0.1)
    for _ in range(1000):
        direction = g - (q.clamp(min=1e-9).log() - p.log()) / eta
        candidate = project_to_simplex(q + rate[:, None] * direction)
        better = value(candidate) > value(q)
        q, rate = torch.where(better[:, None], candidate, q), rate * torch.where(better, 1.5, 0.5)
    assert (value(q) <= best + 1e-12).all()
    torch.testing.assert_close(q, p_star, rtol=0, atol=2e-3)  # the competitor is a serious one


def test_the_mirror_step_ascends_locally():
    """Proposition (local ascent): Psi(l + eta g) >= Psi(l) + eta (1 - S eta / 2) |g|^2, Psi being S-smooth."""
    encoder, (logits, predicted, field) = Encoder(), setting()
    logits, predicted, field = logits[:1].detach().requires_grad_(), predicted[:1], field[:1]

    def psi(x):
        return (encoder.plain(x.view_as(logits), predicted) * field).sum()

    (g,) = torch.autograd.grad(psi(logits), logits)

    def smoothness(eta):
        """Largest curvature on the segment that the step covers: all that the proof uses."""
        points = (logits.detach() + fraction * eta * g for fraction in torch.linspace(0, 1, 9))
        hessians = (torch.autograd.functional.hessian(psi, x.flatten()) for x in points)
        return 1.02 * max(float(torch.linalg.eigvalsh(h).abs().max()) for h in hessians)

    at_start = smoothness(0.0)
    for fraction in (0.1, 1.0, 1.9):
        eta = fraction / at_start
        _, l_star = teacher(logits, lambda x: encoder.lift(x, predicted), field, predicted, eta)
        torch.testing.assert_close(l_star, logits.detach() + eta * g, rtol=1e-10, atol=1e-12)
        bound = psi(logits) + eta * (1 - smoothness(eta) * eta / 2) * g.square().sum()
        assert psi(l_star) >= bound
        if fraction < 1:
            assert psi(l_star) > psi(logits)


# ---- the unit of the mirror step --------------------------------------------------------------------


def mirror_step(batch=4, length=64, vocab=100, spread=2.0, tokens=0, predicted=0.6, **settings):
    """Mean KL(p* || p) of a predicted position, and eta, for random logits of standard deviation `spread` and a random
    encoder whose positions see one another; with `tokens` one feature a position, at that many positions a row."""
    g = torch.Generator().manual_seed(0)
    width, rows = 32, torch.rand(batch, length, generator=g) < predicted
    w_1, w_2 = (torch.randn(D, width, generator=g, dtype=torch.float64) / 2 for _ in "ab")
    w_3 = torch.randn(width, M, generator=g, dtype=torch.float64)
    embedding = torch.randn(vocab, D, generator=g, dtype=torch.float64)
    places = 0.3 * torch.randn(length, D, generator=g, dtype=torch.float64)
    logits = (spread * torch.randn(batch, length, vocab, generator=g, dtype=torch.float64)).requires_grad_()
    x = soft_lift(logits, embedding, torch.zeros(batch, length, dtype=torch.long), rows) + places
    x = torch.tanh(x @ w_1 + x.mean(dim=1, keepdim=True) @ w_2) @ w_3
    x = x[:, torch.randperm(length, generator=g)[:tokens]].flatten(0, 1) if tokens else x.mean(dim=1)
    features = F.normalize(x, dim=-1)
    field = torch.randn(features.shape, generator=g, dtype=torch.float64)
    field /= field.square().sum(dim=-1).mean().sqrt()
    loss, statistics = mirror_loss(logits, features, field, rows, divergence="kl", **settings)
    return float(loss.detach()) * batch / int(rows.sum()), float(statistics["mirror_eta"])


@pytest.mark.parametrize(
    "change",
    [
        {"length": 16},
        {"length": 256},
        {"length": 1024, "batch": 2},
        {"batch": 1},
        {"batch": 16},
        {"predicted": 0.1},
        {"vocab": 10},
        {"vocab": 1000},
        {"vocab": 10000},
        {"vocab": 1000, "spread": 0.3},
        {"vocab": 10000, "spread": 4.0},
        {"tokens": 8},
        {"tokens": 32},
    ],
    ids=str,
)
def test_a_step_size_changes_the_distribution_by_the_same_amount_everywhere(change):
    """KL(p* || p) = s^2/2 at a mean position for small s, from 16 to 1024 tokens, 10 to 10,000 words, flat or peaked
    distributions, both poolings and any batch."""
    s = 0.02
    assert mirror_step(**change, step_size=s)[0] == pytest.approx(s**2 / 2, rel=0.05)


def test_one_eta_means_another_step_at_every_length_and_vocabulary():
    """What the unit is for: at one eta the change of p differs more than a thousandfold."""
    _, eta = mirror_step(step_size=0.02)
    changes = [mirror_step(length=16, eta=eta), mirror_step(length=1024, batch=2, eta=eta)]
    assert changes[0][0] > 1000 * changes[1][0]
    assert mirror_step(eta=eta)[0] > 1000 * mirror_step(vocab=10000, spread=1.0, eta=eta)[0]


def test_large_steps_saturate_at_every_length_alike():
    for s, share in ((1.0, 0.58), (3.0, 0.2)):
        found = [mirror_step(length=length, step_size=s)[0] / (s**2 / 2) for length in (16, 64, 256)]
        assert found == pytest.approx([share] * 3, rel=0.15)


def test_the_size_of_the_step_scales_the_gradient_of_mse_and_turns_that_of_kl():
    """So an optimizer that divides by the gradient's size sees no step size in "mse" alone."""
    encoder, (logits, predicted, field) = Encoder(), setting()
    for divergence, turns in (("mse", False), ("kl", True)):
        gradients = []
        for s in (0.1, 3.0):
            features = encoder.lift(logits, predicted)
            loss, _ = mirror_loss(logits, features, field, predicted, divergence=divergence, step_size=s)
            gradients.append(torch.autograd.grad(loss, logits)[0].flatten())
        cosine = float(torch.cosine_similarity(*gradients, dim=0))
        assert (cosine < 0.9) if turns else cosine == pytest.approx(1, abs=1e-12)
        assert turns or float(gradients[1].norm() / gradients[0].norm()) == pytest.approx(30, rel=1e-9)


def test_step_size_means_the_same_when_the_vocabulary_grows():
    """Tokens that are never predicted change neither eta nor the loss."""
    results = []
    for extra in (0, 500):
        encoder, (logits, predicted, field) = Encoder(), setting()
        encoder.embedding = F.pad(encoder.embedding, (0, 0, 0, extra), value=1.0)
        logits = F.pad(logits.detach(), (0, extra), value=-1e6).requires_grad_()
        features = encoder.lift(logits, predicted)
        loss, statistics = mirror_loss(logits, features, field, predicted, divergence="kl", step_size=1.0)
        results.append(torch.stack([loss.detach(), statistics["mirror_eta"]]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=0)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_step_shrinks_with_the_field_and_vanishes_with_it(divergence):
    encoder, (logits, predicted, field) = Encoder(), setting()
    for scale in (1.0, 1e-3, 0.0):
        features = encoder.lift(logits, predicted)
        loss, statistics = mirror_loss(logits, features, scale * field, predicted, divergence=divergence, step_size=0.5)
        assert float(statistics["mirror_step"]) == pytest.approx(0.5 * scale, rel=1e-9)
        (grad,) = torch.autograd.grad(loss, logits)
        assert torch.isfinite(grad).all()
    assert loss == 0 and (grad == 0).all()


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_two_processes_that_share_eta_equal_one(divergence):
    """With `reduce`, the mean over processes of the gradients is the gradient of the whole batch."""
    encoder, (logits, predicted, field) = Encoder(), setting()
    logits = torch.cat([logits, 0.5 * logits.flip(0)]).detach().requires_grad_()
    predicted, field = torch.cat([predicted, predicted]), torch.cat([field, 2 * field])
    halves = [slice(0, B), slice(B, 2 * B)]
    totals = []

    def run(rows, reduce=None):
        part = logits[rows]
        features = encoder.lift(part, predicted[rows])
        loss, statistics = mirror_loss(
            part, features, field[rows], predicted[rows], divergence=divergence, step_size=1.0, reduce=reduce
        )
        return torch.autograd.grad(loss, logits)[0], statistics["mirror_eta"]

    def record(x):
        totals.append(x)
        return x

    whole, whole_eta = run(slice(0, 2 * B))
    for rows in halves:
        run(rows, record)
    parts = [run(rows, lambda x: sum(totals)) for rows in halves]
    for _, eta in parts:
        torch.testing.assert_close(eta, whole_eta, rtol=1e-12, atol=0)
    torch.testing.assert_close(sum(grad for grad, _ in parts) / 2, whole, rtol=1e-10, atol=1e-14)


# ---- mask column, empty rows, precision -------------------------------------------------------------


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("mask_logit", [-1e6, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mask_column_is_safe(divergence, mask_logit, dtype):
    """Equal to the loss on the vocabulary without that column, which gets no gradient."""
    results = []
    for keep in (V, V - 1):
        encoder, (logits, predicted, field) = Encoder(dtype=dtype), setting(dtype, mask_logit=mask_logit)
        logits, encoder.embedding = logits.detach()[..., :keep].requires_grad_(), encoder.embedding[:keep]
        features = encoder.lift(logits, predicted)
        loss, _ = mirror_loss(logits, features, field, predicted, divergence=divergence, step_size=2.0)
        results.append((loss, *torch.autograd.grad(loss, logits)))
    (loss, grad), (expected_loss, expected_grad) = results
    assert torch.isfinite(loss) and torch.isfinite(grad).all() and (grad[..., -1] == 0).all()
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(grad[..., :-1], expected_grad)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_rows_with_nothing_predicted_contribute_nothing(divergence):
    encoder, (logits, predicted, field) = Encoder(), setting()
    predicted[1] = False
    features = encoder.lift(logits, predicted)
    loss, statistics = mirror_loss(logits, features, field, predicted, divergence=divergence, eta=2.0)
    (grad,) = torch.autograd.grad(loss, logits)
    assert (grad[~predicted] == 0).all() and (grad[predicted] != 0).all()
    others = [0, 2]
    part = logits.detach()[others].requires_grad_()
    expected, _ = mirror_loss(
        part, encoder.lift(part, predicted[others]), field[others], predicted[others], divergence=divergence, eta=2.0
    )
    torch.testing.assert_close(loss, expected * 2 / 3, rtol=1e-12, atol=0)

    nothing = torch.zeros_like(predicted)
    features = encoder.lift(logits, nothing)
    loss, statistics = mirror_loss(logits, features, field, nothing, divergence=divergence, step_size=1.0)
    (grad,) = torch.autograd.grad(loss, logits)
    assert loss == 0 and (grad == 0).all() and statistics["mirror_step"] == 0


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_unpredicted_positions_get_no_gradient_even_if_the_features_see_them(divergence):
    encoder, (logits, predicted, field) = Encoder(), setting()
    features = encoder.plain(logits, torch.ones_like(predicted))
    loss, _ = mirror_loss(logits, features, field, predicted, divergence=divergence, step_size=1.0)
    (grad,) = torch.autograd.grad(loss, logits)
    assert (grad[~predicted] == 0).all() and (grad[predicted] != 0).all()


@pytest.mark.parametrize("step_size", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_float32_is_right_for_small_steps_and_finite_for_absurd_ones(divergence, step_size):
    results = []
    for dtype in (torch.float32, torch.float64):
        encoder, (logits, predicted, field) = Encoder(dtype=dtype), setting(dtype)
        features = encoder.lift(logits, predicted)
        loss, _ = mirror_loss(logits, features, field, predicted, divergence=divergence, step_size=step_size)
        (grad,) = torch.autograd.grad(loss, logits)
        results.append((loss.double(), grad.double()))
    (loss, grad), (expected_loss, expected_grad) = results
    assert (grad - expected_grad).norm() < 1e-3 * expected_grad.norm()
    torch.testing.assert_close(loss, expected_loss, rtol=1e-3, atol=0)


def test_a_step_from_probability_zero_to_one_is_finite_in_float32():
    """p = (1, e^-100), eta g = (0, 300): the teacher is (0, 1), though exp(log p*/p) overflows."""
    logits = torch.tensor([[[0.0, -100.0]]], requires_grad=True)
    field, predicted = torch.tensor([[0.0, 1.0]]), torch.ones(1, 1, dtype=torch.bool)
    loss, _ = mirror_loss(logits, logits.view(1, 2), field, predicted, divergence="kl", eta=300.0)
    (grad,) = torch.autograd.grad(loss, logits)
    assert float(loss.detach()) == pytest.approx(100.0)
    torch.testing.assert_close(grad, torch.tensor([[[1.0, -1.0]]]))
    assert field.tolist() == [[0.0, 1.0]], "here autograd hands the field itself back as g"


@pytest.mark.parametrize("objective", ["feature", *DIVERGENCES])
def test_gradient_under_bfloat16_autocast_is_within_one_percent_of_float64(objective):
    """The encoder's products run in bf16; lift, field and objective must not add to that error."""
    gradients = {}
    for dtype in (torch.float32, torch.float64):
        encoder, (logits, predicted, _) = Encoder(dtype=dtype), setting(dtype, length=32)
        g = torch.Generator().manual_seed(4)
        u, queued = (F.normalize(torch.randn(30, M, generator=g, dtype=torch.float64), dim=-1).to(dtype) for _ in "ab")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.float32):
            features = encoder.lift(logits, predicted)
            negatives = torch.cat([features.detach(), queued])
            field = drift_field(features, u, negatives, self_index=torch.arange(B)).field
            if objective == "feature":
                loss = feature_loss(features, field)
            else:
                loss, _ = mirror_loss(logits, features, field, predicted, divergence=objective, step_size=1.0)
        gradients[dtype] = torch.autograd.grad(loss, logits)[0].double()
    expected = gradients[torch.float64]
    assert (gradients[torch.float32] - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.parametrize("objective", ["feature", *DIVERGENCES])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bf16_autocast"])
@pytest.mark.parametrize("apart", [False, True], ids=["nearly_equal", "far_apart"])
def test_gradient_at_the_ends_of_the_range_is_within_one_percent_of_float64(apart, autocast, objective):
    """Real and generated features of cosine 0.999999, or so far apart that the cross mass is below 1e-12."""
    gradients = {}
    for dtype in (torch.float32, torch.float64):
        encoder, (logits, predicted, _) = Encoder(dtype=dtype), setting(dtype, length=32)
        g = torch.Generator().manual_seed(4)
        pole, spread = torch.eye(M, dtype=torch.float64)[:1].to(dtype), 0.3 if apart else 1e-3
        u, queued = (torch.randn(30, M, generator=g, dtype=torch.float64).to(dtype) / 3 for _ in "ab")
        u, queued = F.normalize((-pole if apart else pole) + spread * u, dim=-1), F.normalize(pole + spread * queued)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast and dtype == torch.float32):
            features = F.normalize(pole + spread * encoder.lift(logits, predicted), dim=-1)
            negatives = torch.cat([features.detach(), queued])
            drift = drift_field(features, u, negatives, self_index=torch.arange(B))
            if objective == "feature":
                loss = feature_loss(features, drift.field)
            else:
                loss, _ = mirror_loss(logits, features, drift.field, predicted, divergence=objective, step_size=1.0)
        cosine = float((features.detach().double() @ u.double().T).mean())
        assert (cosine < -0.9 and drift.rms_per_temperature[1] < 1e-12) if apart else 0.999998 < cosine < 0.9999999
        gradients[dtype] = torch.autograd.grad(loss, logits)[0].double()
        assert drift.field.isfinite().all() and loss.isfinite()
    expected = gradients[torch.float64]
    assert (gradients[torch.float32] - expected).norm() < 1e-2 * expected.norm()


# ---- bad input --------------------------------------------------------------------------------------


def test_bad_input_is_named():
    encoder, (logits, predicted, field) = Encoder(), setting()
    features = encoder.lift(logits, predicted)
    with pytest.raises(ValueError, match="rows of this process"):
        feature_loss(features, field[:2])
    with pytest.raises(ValueError, match="drift_scale must be positive, got 0"):
        feature_loss(features, field, 0.0)

    def mirror(features=features, field=field, divergence="kl", **settings):
        return mirror_loss(logits, features, field, predicted, divergence=divergence, **settings)

    with pytest.raises(ValueError, match="rows of this process"):
        mirror(field=field[:2], step_size=1.0)
    with pytest.raises(ValueError, match="'kl' or 'mse', got 'l2'"):
        mirror(divergence="l2", step_size=1.0)
    for settings in ({}, {"step_size": 1.0, "eta": 1.0}, {"step_size": 0.0}, {"eta": -1.0}, {"eta": math.nan}):
        with pytest.raises(ValueError, match="one positive number"):
            mirror(**settings)
    for unconnected in (features.detach(), (2 * field).requires_grad_()):
        with pytest.raises(ValueError, match="features do not depend on logits"):
            mirror(features=unconnected, step_size=1.0)
