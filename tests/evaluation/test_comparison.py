"""What is made of records: means, models at one entropy, and the lines of the base at equal entropy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from toys import record

from tokendrift_hf.evaluation.comparison import (
    at_entropy,
    evaluate_models,
    matching_temperature,
    summarise,
)
from tokendrift_hf.evaluation.grid import Harness
from tokendrift_hf.evaluation.likelihood import nelbo_perplexity
from tokendrift_hf.evaluation.sampling import Sampling


def words(tokenizer, count: int) -> list[list[int]]:
    """Rows of 16 tokens of real words."""
    return [tokenizer(" ".join(dir(str)[i : i + 9]))["input_ids"][:16] for i in range(count)]


def test_summary_is_mean_and_sample_standard_deviation():
    rows = summarise([record("a", 0, 10.0, 3.0), record("a", 1, 14.0, 3.2), record("b", 0, 5.0, 1.0)])
    assert [row.model for row in rows] == ["a", "b"]
    assert rows[0].gen_ppl == 12.0 and rows[0].gen_ppl_sd == pytest.approx(8**0.5)
    assert rows[0].entropy == pytest.approx(3.1) and rows[1].gen_ppl_sd is None, "of one seed"


def test_matching_temperature_interpolates_and_stays_on_the_curve():
    curve = {0.5: 2.0, 0.75: 3.0, 1.0: 4.0}
    assert matching_temperature(curve, 3.5) == pytest.approx(0.875)
    assert matching_temperature(curve, 3.0) == pytest.approx(0.75)
    assert matching_temperature(curve, 1.0) == 0.5 and matching_temperature(curve, 9.0) == 1.0


def test_samples_without_text_have_no_score_and_leave_the_mean_to_the_others():
    rows = summarise([record("a", 0, None, 0.0), record("a", 1, 8.0, 3.0), record("b", 0, None, 0.0)])
    assert rows[0].gen_ppl == 8.0
    assert rows[0].gen_ppl_sd is None
    assert math.isnan(rows[1].gen_ppl)


def test_gen_ppl_at_an_entropy_is_log_linear_between_temperatures():
    records = [record("a", 0, 100.0, 4.0), record("a", 0, 10.0, 3.0, temperature=0.5), record("b", 0, 7.0, 2.0)]
    a, b = at_entropy(records, 3.5)
    assert a.gen_ppl == pytest.approx(1000**0.5)
    assert a.temperature == pytest.approx(0.75)
    assert a.gen_ppl_se is None, "of one seed"
    assert b.gen_ppl is None, "no extrapolation from one temperature"
    assert at_entropy(records, 4.5)[0].gen_ppl is None, "nor beyond them all"
    assert at_entropy(records, 4.0)[0].gen_ppl == pytest.approx(100)


def test_a_seed_without_text_has_no_part_in_the_value_at_an_entropy():
    records = [record("a", seed, p, h, temperature=t) for seed in (0, 1) for t, p, h in ((0.5, 10, 3), (1, 100, 4))]
    (value,) = at_entropy([*records, record("a", 2, None, 0.0, temperature=0.5)], 3.5)
    assert value.gen_ppl == pytest.approx(1000**0.5)
    assert value.gen_ppl_se == 0


def test_the_standard_error_at_an_entropy_is_the_spread_of_the_values():
    """300 evaluations of 8 seeds: Gen.-PPL and entropy of a seed go together, at both temperatures."""
    generator = np.random.default_rng(0)
    estimates, errors = [], []
    for _ in range(300):
        records = []
        for seed in range(8):
            shared = generator.normal()
            for temperature, log_ppl, entropy in ((0.8, 4.0, 3.8), (1.0, 5.0, 4.2)):
                noise = generator.normal(size=2)
                p = math.exp(log_ppl + 0.05 * shared + 0.05 * noise[0])
                h = entropy + 0.02 * shared + 0.01 * noise[1]
                records.append(record("a", seed, p, h, temperature=temperature))
        (value,) = at_entropy(records, 4.05)
        estimates.append(value.gen_ppl)
        errors.append(value.gen_ppl_se)
    estimates, errors = np.array(estimates), np.array(errors)
    assert np.square(errors).mean() ** 0.5 == pytest.approx(estimates.std(), rel=0.1)
    covered = np.abs(estimates - math.exp(4.0 + 0.25 / 0.4)) < 2.36 * errors  # 95 % of Student's t with 7 degrees
    assert 0.91 < covered.mean() < 0.98


def test_evaluating_models_with_real_text(text_model, text_judge, tmp_path):
    """The value at the text's entropy, the matched rows and the NELBO come from the harness's own records."""
    model, tokenizer = text_model
    text = words(tokenizer, 4)
    assert {len(row) for row in text} == {16}
    sampling = Sampling(num_steps=[2], temperatures=[0.1, 1.0], num_seeds=2, num_samples=3)
    harness = Harness({"base": model, "twin": model}, tokenizer, text_judge, tmp_path, sampling)
    results = evaluate_models(harness, text, num_draws=2, match_entropy=["twin"])
    cold, warm, *twin, matched = results.rows
    assert [row.temperature for row in (cold, warm)] == [0.1, 1.0]
    assert (matched.model, matched.matched_to) == ("base at equal entropy (twin)", "twin")
    assert matched.num_seeds == 2
    assert not matched.beyond
    own = [r for r in results.records if r["model"] == "base" and r["temperature"] in (0.1, 1.0)]
    assert results.at_text_entropy[:1] == at_entropy(own, results.real_text["entropy"])
    assert results.nelbo["base"] == nelbo_perplexity(model, torch.tensor(text), 2)
    assert matched.gen_ppl == pytest.approx(warm.gen_ppl), "a twin has the base's entropy"
    assert matched.temperature == 1
    assert results.curve == [], "for which no further temperature is needed"
    assert len(results.records) == 2 * 2 * 2


class ByTemperature:
    """A harness whose base has entropy 4 + T - 1 and Gen.-PPL 100^T, and whose other models have what they are told."""

    def __init__(self, entropies: dict[str, dict[int, float]]):
        self.sampling = Sampling(num_steps=[4, 8], num_seeds=2)
        self.models, self.entropies, self.asked = {"base": None} | entropies, entropies, []

    def grid(self, sampling: Sampling | None = None, models: list[str] | None = None) -> list[tuple]:
        sampling = sampling or self.sampling
        axes = (models or self.models, sampling.num_steps, sampling.temperatures, range(sampling.num_seeds))
        return list(itertools.product(*axes))

    def run(self, cells: list[tuple], description: str = "") -> list[dict]:
        self.asked += [(num_steps, t) for model, num_steps, t, seed in cells if model == "base" and seed == 0]
        made = []
        for model, num_steps, t, seed in cells:
            entropy = 3 + t if model == "base" else self.entropies[model][num_steps]
            made.append(record(model, seed, 100**t * (1.1 if seed else 0.9), entropy, num_steps, temperature=t))
        return made


def test_the_base_is_sampled_at_no_more_temperatures_than_the_entropies_need():
    harness = ByTemperature({"cold": {4: 3.75, 8: 4.0}, "warm": {4: 3.95, 8: 4.05}})
    results = evaluate_models(harness, match_entropy=["cold", "warm"])
    assert harness.asked == [(4, 1.0), (8, 1.0), (4, 0.9), (4, 0.8), (4, 0.7), (8, 1.1)]
    assert [(row.num_steps, row.temperature) for row in results.curve] == [(4, 0.9), (4, 0.8), (4, 0.7), (8, 1.1)]
    assert len(results.records) == 2 * (3 * 2 + 4)


def test_a_line_at_equal_entropy_is_read_off_between_two_temperatures():
    results = evaluate_models(ByTemperature({"b": {4: 3.96, 8: 4.0}}), match_entropy=["b"])
    between, equal = (row for row in results.rows if row.matched_to == "b")
    assert between.entropy == 3.96 and between.temperature == pytest.approx(0.96)
    assert between.gen_ppl == pytest.approx(100**0.96)
    assert between.gen_ppl_sd == pytest.approx(100**0.96 * 0.2 / 2**0.5), "of two seeds, 0.9 and 1.1 of the mean"
    assert (between.num_seeds, between.beyond, between.seconds) == (2, False, None)
    assert equal.gen_ppl == pytest.approx(100) and equal.temperature == 1


def test_beyond_all_temperatures_the_nearest_is_shown_and_says_so():
    results = evaluate_models(ByTemperature({"b": {4: 2.0, 8: 6.0}}), match_entropy=["b"])
    low, high = (row for row in results.rows if row.matched_to == "b")
    assert low.beyond and low.temperature == 0.7
    assert high.beyond and high.temperature == 1.2


def test_mauve_at_equal_entropy_lies_between_that_of_the_two_temperatures(monkeypatch):
    harness = ByTemperature({"b": {4: 3.96, 8: 3.96}})
    run = harness.run
    monkeypatch.setattr(harness, "run", lambda *a: [made | {"mauve": made["temperature"]} for made in run(*a)])
    row = evaluate_models(harness, match_entropy=["b"]).rows[-1]
    assert row.mauve == pytest.approx(0.96)


def test_text_that_is_none_is_noticed_before_any_sampling(text_model, text_judge, tmp_path, monkeypatch):
    harness = Harness({"base": text_model[0]}, text_model[1], text_judge, tmp_path, Sampling())
    monkeypatch.setattr(harness, "run", None)
    with pytest.raises(ValueError, match="at least one"):
        evaluate_models(harness, [])


def test_one_temperature_makes_no_curve(text_model, text_judge, tmp_path):
    sampling = Sampling(num_steps=[1], num_seeds=1, num_samples=2)
    harness = Harness({"base": text_model[0]}, text_model[1], text_judge, tmp_path, sampling)
    assert evaluate_models(harness, words(text_model[1], 2)).at_text_entropy == []


@pytest.mark.parametrize(
    ("labels", "temperatures", "message"),
    [(["c"], [1.0], "'c' is none of .'b'."), (["a"], [1.0], "'a' is none of"), (["b"], [0.9], "Add 1 to them")],
)
def test_what_cannot_be_matched_is_refused_before_any_sampling(
    labels, temperatures, message, text_model, text_judge, tmp_path, monkeypatch
):
    models = {"a": text_model[0], "b": text_model[0]}
    harness = Harness(models, text_model[1], text_judge, tmp_path, Sampling(temperatures=temperatures))
    monkeypatch.setattr(harness, "run", None)
    with pytest.raises(ValueError, match=message):
        evaluate_models(harness, match_entropy=labels)


def test_mauve_of_every_cell_against_real_text(text_model, text_judge, tmp_path):
    model, tokenizer = text_model
    text, sampling = words(tokenizer, 8), Sampling(num_steps=[2], num_seeds=2, num_samples=8)
    harness = Harness({"base": model}, tokenizer, text_judge | {"mauve_references": text}, tmp_path, sampling)
    (row,) = evaluate_models(harness).rows
    assert 0 <= row.mauve <= 1
    assert row.mauve_sd >= 0
    assert harness.score_text(text)["mauve"] == pytest.approx(1)
    assert harness.scoring != Harness({"base": model}, tokenizer, text_judge, tmp_path, sampling).scoring
