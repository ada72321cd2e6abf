"""The drift field: recorded outputs of the original code, a float64 double loop, the paper's properties, precision."""

from __future__ import annotations

import json
import math
import traceback
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from reference import double_loop, drifting_force
from safetensors import safe_open

from tokendrift_hf.objective.drift import drift_field, unchecked_drift_field

FIXTURES = Path(__file__).parents[1] / "fixtures"
KERNELS = ["paper", "drifting"]
RATIOS = [(1.0, 1.0), (2.0, 1.0), (1.0, 2.0), (1.0, 0.0), (0.0, 1.0)]


def unit(*shape, seed=0, dtype=torch.float64):
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype), dim=-1)


def sets(num_anchors=5, num_positives=7, num_queued=4, m=6, dtype=torch.float64):
    """Anchors, positives, negatives that begin with the anchors, self_index."""
    h = unit(num_anchors, m, seed=1, dtype=dtype)
    u = unit(num_positives, m, seed=2, dtype=dtype)
    v = torch.cat([h, unit(num_queued, m, seed=3, dtype=dtype)])
    return h, u, v, torch.arange(num_anchors)


def relative_error(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


# ---- the original code ---------------------------------------------------------------------------


def recorded_cases(weighted: bool):
    """Those with weights for the references, which `drift_field` does not have, or those without."""
    cases = []
    for name in ("drift_a", "drift_b"):
        with safe_open(FIXTURES / f"{name}.safetensors", "pt") as file:
            for case, settings in json.loads(file.metadata()["json"])["cases"].items():
                keys = [key for key in file.keys() if key.startswith(case + ".")]
                tensors = {key.removeprefix(case + "."): file.get_tensor(key) for key in keys}
                if any(name.startswith("weight_") for name in tensors) == weighted:
                    cases.append(pytest.param(settings["R_list"], tensors, case, id=case))
    return cases


@pytest.mark.parametrize(("temperatures", "recorded", "case"), recorded_cases(weighted=False))
def test_drifting_kernel_reproduces_the_original_code(temperatures, recorded, case):
    tolerance = {"unit_similar": 1e-3, "unit_very_similar": 2e-2}.get(case, 1e-5)
    gen, positives = recorded["gen"], recorded["fixed_pos"]
    fixed_negatives = recorded.get("fixed_neg", gen[:, :0])
    (_, num_anchors, m), negatives = gen.shape, torch.cat([gen, fixed_negatives], dim=1)

    def force(temperatures):
        drift = drift_field(
            gen,
            positives,
            negatives,
            temperatures=temperatures,
            self_index=torch.arange(num_anchors),
            kernel="drifting",
        )
        return math.sqrt(m) * len(temperatures) * drift.field, drift

    def check(actual, expected):
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * float(expected.abs().max()))

    total, drift = force(temperatures)
    check(total, recorded["force_scaled"])
    check(total + gen / recorded["scale_inputs"], recorded["goal_scaled"])
    check(total.square().mean(dim=(1, 2)), recorded["loss"])
    check(-2 * total / (num_anchors * m * recorded["scale_inputs"]), recorded["grad_of_loss_sum_wrt_gen"])
    check((drift.rms_per_temperature / recorded["info.scale"]).square().float(), recorded["info.loss_R"])
    for tau in temperatures:
        check(force([tau])[0], recorded[f"force_scaled_R_{tau}"])


@pytest.mark.parametrize(
    ("temperatures", "recorded", "case"), recorded_cases(weighted=False) + recorded_cases(weighted=True)
)
def test_the_original_algorithm_written_out_reproduces_what_was_recorded(temperatures, recorded, case):
    """The oracle in float64, with weights as well. The recording has the rounding of its own float32 distances."""
    tolerance = {"unit_similar": 1e-3, "unit_very_similar": 2e-2}.get(case, 1e-5)
    names = ("gen", "fixed_pos", "fixed_neg", "weight_gen", "weight_pos", "weight_neg")
    force = drifting_force(*(recorded.get(name) for name in names), temperatures=temperatures)
    expected = recorded["force_scaled"]
    torch.testing.assert_close(force.float(), expected, rtol=0, atol=tolerance * float(expected.abs().max()))


# ---- the formulas, one pair at a time ------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("attraction", "repulsion"), RATIOS)
@pytest.mark.parametrize("with_self", [True, False])
def test_equals_the_double_loop(kernel, attraction, repulsion, with_self):
    h, u, v, self_index = sets()
    settings = dict(
        temperatures=(0.02, 0.05, 0.2, 1.0),
        self_index=self_index if with_self else None,
        attraction=attraction,
        repulsion=repulsion,
        kernel=kernel,
    )
    field, rms, effective = double_loop(h, u, v, **settings)
    drift = drift_field(h, u, v, **settings)
    torch.testing.assert_close(drift.field, field, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(drift.rms_per_temperature, rms, rtol=1e-9, atol=0)
    torch.testing.assert_close(drift.effective_references, effective.double(), rtol=1e-6, atol=0)
    single_precision = drift_field(h.float(), u.float(), v.float(), **settings)
    assert single_precision.field.dtype == torch.float32
    assert relative_error(single_precision.field, field) < 1e-5


def test_the_paper_form_is_the_difference_of_barycenters_at_equal_weights():
    """V = sum_j W+ u_j - sum_k W- v_k, without the h that the general form subtracts."""
    h, u, v, self_index = sets()
    tau = 0.05
    s = -torch.cdist(h, torch.cat([u, v])).square() / tau
    s[torch.arange(5), 7 + self_index] = -math.inf
    affinity = (s.softmax(dim=1) * s.softmax(dim=0)).sqrt()
    plus, minus = affinity[:, :7], affinity[:, 7:]
    expected = (plus * minus.sum(1, keepdim=True)) @ u - (minus * plus.sum(1, keepdim=True)) @ v
    expected /= expected.square().sum(dim=1).mean().sqrt()
    actual = drift_field(h, u, v, temperatures=[tau], self_index=self_index).field
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


# ---- properties ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
def test_exchanging_the_sets_reverses_the_field(kernel):
    h, u, v, _ = sets()
    forward, backward = drift_field(h, u, v, kernel=kernel), drift_field(h, v, u, kernel=kernel)
    torch.testing.assert_close(forward.field, -backward.field, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(forward.rms_per_temperature, backward.rms_per_temperature)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 1e-10), (torch.float64, 1e-3)])
@pytest.mark.parametrize("spread", [1.0, 1e-3])
def test_equal_sets_give_no_field_in_whatever_order(kernel, dtype, largest, spread):
    """Rounding noise must not be normalised up to RMS 1; there is less of it where the result is not float64 itself."""
    u = F.normalize(unit(1, 16, seed=4) + spread * unit(40, 16, seed=5), dim=-1).to(dtype)
    h = F.normalize(unit(1, 16, seed=4) + spread * unit(8, 16, seed=6), dim=-1).to(dtype)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    for negatives in (u, u[order]):
        drift = drift_field(h, u, negatives, kernel=kernel)
        assert drift.field.norm(dim=-1).max() < largest
        assert drift.rms_per_temperature.max() < 1e-14


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("attraction", "repulsion"), RATIOS)
def test_translation_invariance(kernel, attraction, repulsion):
    h, u, v, self_index = sets()
    settings = dict(self_index=self_index, kernel=kernel, attraction=attraction, repulsion=repulsion)
    shift = 10 * unit(1, 6, seed=7)
    expected = drift_field(h, u, v, **settings)
    actual = drift_field(h + shift, u + shift, v + shift, **settings)
    torch.testing.assert_close(actual.field, expected.field, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(actual.rms_per_temperature, expected.rms_per_temperature, rtol=1e-9, atol=0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_permutation_equivariance(kernel):
    h, u, v, self_index = sets()
    expected = drift_field(h, u, v, self_index=self_index, kernel=kernel).field
    generator = torch.Generator().manual_seed(0)
    anchors, positives, negatives = (torch.randperm(len(x), generator=generator) for x in (h, u, v))
    actual = drift_field(
        h[anchors], u[positives], v[negatives], self_index=negatives.argsort()[self_index[anchors]], kernel=kernel
    ).field
    torch.testing.assert_close(actual, expected[anchors], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_temperature_counts_alike_and_the_field_has_at_most_rms_one(kernel):
    h, u, v, self_index = sets()
    temperatures = (0.02, 0.05, 0.2)
    settings = dict(self_index=self_index, kernel=kernel)
    alone = [drift_field(h, u, v, temperatures=[tau], **settings).field for tau in temperatures]
    for field in alone:
        assert float(field.square().sum(dim=-1).mean()) == pytest.approx(1, abs=1e-6)
    together = drift_field(h, u, v, temperatures=temperatures, **settings).field
    torch.testing.assert_close(together, torch.stack(alone).mean(dim=0), rtol=1e-9, atol=1e-12)
    assert float(together.square().sum(dim=-1).mean()) <= 1


@pytest.mark.parametrize("eps", [1e-2, 1.0])
def test_eps_is_relative_to_the_pull_before_the_subtraction(eps):
    """One anchor at 0, u and v orthogonal: V = A (u - v), of norm sqrt(2) A, and pull = 2 A, whatever A is."""
    for size in (1.0, 3.0):
        u, v = size * torch.tensor([[1.0, 0.0]]), size * torch.tensor([[0.0, 1.0]])
        norm = drift_field(torch.zeros(1, 2), u, v, temperatures=[0.02], eps=eps).field.norm()
        assert float(norm) == pytest.approx(math.sqrt(2 / (2 + 4 * eps**2)), rel=1e-6)


def test_effective_references_counts_from_one_to_all():
    h, u = torch.zeros(1, 2), torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    all_alike = drift_field(h, u, torch.tensor([[0.0, -1.0]]))
    torch.testing.assert_close(all_alike.effective_references, torch.full((3,), 4.0, dtype=torch.float64))
    one_near = drift_field(h, u, torch.tensor([[0.0, -0.1]]))
    torch.testing.assert_close(one_near.effective_references[0], torch.tensor(1.0, dtype=torch.float64))


# ---- small sets ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("attraction", "repulsion"), RATIOS)
def test_no_negatives_give_no_field(kernel, attraction, repulsion):
    h, u, v, _ = sets()
    drift = drift_field(h, u, v[:0], kernel=kernel, attraction=attraction, repulsion=repulsion)
    assert drift.field.shape == h.shape and (drift.field == 0).all() and (drift.rms_per_temperature == 0).all()
    assert torch.isfinite(drift.effective_references).all()


def test_a_lone_anchor_that_is_the_only_negative_gets_no_field():
    h, u, _, _ = sets(num_anchors=1)
    drift = drift_field(h, u, h, self_index=torch.tensor([0]))
    assert (drift.field == 0).all() and (drift.rms_per_temperature == 0).all()
    assert torch.isfinite(drift.effective_references).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("num_anchors", "num_positives"), [(1, 1), (1, 7), (5, 1)])
def test_one_anchor_or_one_positive(kernel, num_anchors, num_positives):
    h, u, v, self_index = sets(num_anchors, num_positives)
    settings = dict(temperatures=(0.05, 0.2), self_index=self_index, kernel=kernel)
    expected = double_loop(h, u, v, **settings)[0]
    torch.testing.assert_close(drift_field(h, u, v, **settings).field, expected, rtol=1e-9, atol=1e-10)


# ---- precision -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
def test_nearly_equal_features(kernel):
    """Unit vectors of cosine 0.999999, where |a|^2 + |b|^2 - 2ab in float32 has no correct digit left."""
    centre, spread = unit(1, 32, seed=9), 1e-3
    h, u, v = (F.normalize(centre + spread * unit(n, 32, seed=n), dim=-1).float() for n in (8, 30, 31))
    cosine = float((h.double() @ u.double().T).mean())
    assert 0.999998 < cosine < 0.9999995
    settings = dict(temperatures=(0.02, 0.05, 0.2), kernel=kernel)
    expected = double_loop(h.double(), u.double(), v.double(), **settings)[0]
    assert relative_error(drift_field(h, u, v, **settings).field, expected) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sets_so_far_apart_that_the_cross_mass_is_nothing(dtype):
    """The direction survives cross masses of 1e-12 and of 1e-25, and the logged norm is not rounded to 0."""
    pole = torch.eye(32, dtype=torch.float64)[:1]
    h, v = (F.normalize(pole + 0.3 * unit(n, 32, seed=n), dim=-1).to(dtype) for n in (8, 30))
    u = F.normalize(-pole + 0.3 * unit(31, 32, seed=31), dim=-1).to(dtype)
    for tau, largest in ((0.05, 1e-12), (0.02, 1e-25)):
        expected, rms, _ = double_loop(h.double(), u.double(), v.double(), temperatures=[tau])
        drift = drift_field(h, u, v, temperatures=[tau])
        assert 0 < float(rms) < largest
        assert relative_error(drift.field, expected) < 1e-4
        torch.testing.assert_close(drift.rms_per_temperature, rms, rtol=1e-4, atol=0)


def test_masses_below_every_float_still_have_a_direction():
    """Ten times as far: affinities of exp(-10000). With two anchors placed symmetrically the field is known."""
    h = torch.tensor([[10.0, 1.0], [10.0, -1.0]])
    u, v = torch.tensor([[-10.0, 0.0]]), torch.tensor([[10.0, 0.0]])
    drift = drift_field(h, u, v)
    torch.testing.assert_close(drift.field, torch.tensor([[-1.0, 0.0], [-1.0, 0.0]]))
    assert torch.isfinite(drift.rms_per_temperature).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_autocast_around_the_caller_changes_nothing(kernel):
    h, u, v, self_index = sets(dtype=torch.float32)
    settings = dict(self_index=self_index, kernel=kernel)
    expected = drift_field(h, u, v, **settings).field
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = drift_field(h, u, v, **settings).field
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_half_precision_features_are_widened_and_no_graph_is_built():
    h, u, v, _ = sets(dtype=torch.float32)
    h, u, v = (x.to(torch.bfloat16).requires_grad_() for x in (h, u, v))
    drift = drift_field(h, u, v)
    assert drift.field.dtype == torch.float32 and not drift.field.requires_grad
    torch.testing.assert_close(drift.field, drift_field(h.float(), u.float(), v.float()).field, rtol=0, atol=0)


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"temperatures": ()}, ValueError, "one or more positive"),
        ({"temperatures": (0.1, 0.0)}, ValueError, "one or more positive"),
        ({"temperatures": (-0.1,)}, ValueError, "one or more positive"),
        ({"temperatures": (math.nan,)}, ValueError, "one or more positive"),
        ({"temperatures": ["0.1"]}, ValueError, "one or more positive"),
        ({"temperatures": 0.1}, ValueError, "one or more positive numbers, got 0.1"),
        ({"attraction": -1.0}, ValueError, "attraction and repulsion"),
        ({"attraction": math.nan}, ValueError, "attraction and repulsion"),
        ({"attraction": "1"}, ValueError, "attraction and repulsion"),
        ({"attraction": 0.0, "repulsion": 0.0}, ValueError, "attraction and repulsion"),
        ({"kernel": "gaussian"}, ValueError, "'paper' or 'drifting', got 'gaussian'"),
        ({"eps": -1e-3}, ValueError, "eps must be a number >= 0, got -0.001"),
        ({"positives": torch.zeros(0, 6)}, ValueError, "at least one anchor and one positive"),
        ({"features": torch.zeros(0, 6), "self_index": None}, ValueError, "at least one anchor and one positive"),
        ({"positives": torch.zeros(7, 5)}, ValueError, "equal m"),
        ({"negatives": torch.zeros(6)}, ValueError, "equal m"),
        ({"features": [[0.0] * 6]}, TypeError, "features must be a floating tensor, but it is list"),
        (
            {"positives": torch.zeros(7, 6).long()},
            TypeError,
            "positives must be a floating tensor, but it is torch.int64",
        ),
        ({"negatives": torch.full((9, 6), math.inf)}, ValueError, "negatives hold 54 numbers that are NaN or infinite"),
        ({"features": torch.full((5, 6), math.nan)}, ValueError, "features hold 30 numbers that are NaN or infinite"),
        ({"self_index": torch.arange(4)}, ValueError, "one integer an anchor"),
        ({"self_index": [0, 1, 2, 3, 4]}, TypeError, "a tensor of integers, but it is list"),
        ({"self_index": torch.arange(5.0)}, TypeError, "a tensor of integers, but it is torch.float32"),
        ({"self_index": torch.arange(5) + 5}, ValueError, "rows 0 to 8 of the negatives, but it runs from 5 to 9"),
        ({"self_index": torch.arange(5) - 1}, ValueError, "rows 0 to 8 of the negatives, but it runs from -1 to 3"),
    ],
)
def test_bad_input_is_named(change, error, message):
    h, u, v, self_index = sets()
    arguments = {"features": h, "positives": u, "negatives": v, "self_index": self_index} | change
    with pytest.raises(error, match=message):
        drift_field(**arguments)


# ---- the precision of a training step ---------------------------------------------------------------


def cloud(count, centre, spread, seed, m=64):
    """Unit vectors about a centre, float32, as the features of a batch are."""
    return F.normalize(centre + spread * unit(count, m, seed=seed), dim=-1).float()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("spread", [1.0, 0.1, 0.005])
@pytest.mark.parametrize("shift", [0.5, 0.0], ids=["apart", "on top of each other"])
def test_the_field_of_a_step_is_that_of_float64(kernel, spread, shift):
    """In float32 but for the distances: 64 anchors against 2 x 576 references, to 2e-6 of the field's norm."""
    centre, direction = unit(1, 64, seed=7), unit(1, 64, seed=8)
    h, queued = (cloud(n, centre + shift * spread * direction, spread, n) for n in (64, 512))
    u, v = cloud(576, centre, spread, 9), torch.cat([h, queued])
    settings = dict(temperatures=(0.02, 0.05, 0.2), self_index=torch.arange(64), kernel=kernel)
    exact = drift_field(h, u, v, **settings)
    step = unchecked_drift_field(h, u, v, attraction=1.0, repulsion=1.0, **settings)
    assert relative_error(step.field, exact.field) < 2e-6
    torch.testing.assert_close(step.rms_per_temperature, exact.rms_per_temperature, rtol=1e-5, atol=0)
    torch.testing.assert_close(step.effective_references.double(), exact.effective_references, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_field_of_a_step_does_not_make_noise_of_equal_sets(kernel):
    centre = unit(1, 64, seed=7)
    h, u = cloud(64, centre, 0.1, 1), cloud(576, centre, 0.1, 2)
    settings = dict(temperatures=(0.02, 0.05, 0.2), self_index=None, attraction=1.0, repulsion=1.0, kernel=kernel)
    step = unchecked_drift_field(h, u, u[torch.randperm(576, generator=torch.Generator().manual_seed(0))], **settings)
    assert step.field.norm(dim=-1).max() < 1e-3


NUMBERS = st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=2)
SHAPES = st.lists(st.integers(0, 3), max_size=3)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.int64, torch.bool])
TENSORS = st.builds(lambda shape, dtype, value: torch.full(shape, value).to(dtype), SHAPES, DTYPES, st.floats(width=32))
SETTINGS = {
    "temperatures": NUMBERS | st.lists(NUMBERS, max_size=3),
    "self_index": TENSORS | st.lists(st.integers(0, 2), max_size=3),
    "attraction": NUMBERS,
    "repulsion": NUMBERS,
    "kernel": NUMBERS | st.sampled_from(["paper", "drifting"]),
    "eps": NUMBERS,
}


@given(
    features=st.lists(TENSORS | NUMBERS | st.lists(NUMBERS, max_size=2), min_size=3, max_size=3)
    | st.lists(st.builds(torch.ones, st.just((2, 3))), min_size=3, max_size=3),
    arguments=st.fixed_dictionaries({}, optional=SETTINGS),
)
@hypothesis_settings(max_examples=300, derandomize=True, deadline=None, database=None)
def test_anything_gives_a_finite_field_or_is_refused_in_our_words(features, arguments):
    try:
        result = drift_field(*features, **arguments)
    except (ValueError, TypeError) as error:
        raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
        assert "tokendrift_hf" in raised_in, f"{raised_in}: {error}"
    else:
        assert result.field.isfinite().all()
