"""The harness: cells are reproducible and kept, tables say what the records say."""

from __future__ import annotations

import json
import math

import pytest
import torch
from conftest import tiny_model

from tokendrift_hf.harness import (
    Cell,
    Harness,
    gen_ppl_at_entropy,
    matching_temperature,
    nelbo_perplexity,
    summarise,
)
from tokendrift_hf.report import latex_table, markdown_table, plot


@pytest.fixture
def harness(tmp_path, text_model, text_judge):
    return Harness({"base": text_model[0]}, text_model[1], text_judge, tmp_path / "cells", batch_size=3)


def test_cells_are_drawn_once_and_equal_whatever_the_batch_size(harness, tmp_path, text_model, text_judge):
    cell = harness.cell("base", 2, 1.0, 0, 4)
    (record,) = harness.run([cell])
    assert record["num_samples"] == 4 and record["gen_ppl"] > 1 and 0 < record["num_forward_calls"] <= 3
    kept = json.loads((tmp_path / "cells" / cell.file_name).read_text())
    assert kept == json.loads(json.dumps(record))
    kept["gen_ppl"] = -1.0
    (tmp_path / "cells" / cell.file_name).write_text(json.dumps(kept))
    assert harness.run([cell])[0]["gen_ppl"] == -1.0, "a finished cell is read, not computed again"
    whole = Harness({"base": text_model[0]}, text_model[1], text_judge, tmp_path / "other", batch_size=4)
    assert whole.run([cell])[0]["gen_ppl"] == pytest.approx(record["gen_ppl"], rel=1e-6)


def test_every_setting_has_a_file_of_its_own():
    cell = dict(model="a", num_steps=4, temperature=1.0, seed=0, num_samples=8, length=16)
    others = [cell | change for change in ({"seed": 1}, {"num_steps": 8}, {"num_samples": 9}, {"dtype": "bfloat16"})]
    assert len({Cell(**settings).file_name for settings in (cell, *others)}) == 5


@pytest.mark.parametrize(("change", "message"), [({"num_steps": 0}, "num_steps=0"), ({"temperature": 0}, "above 0")])
def test_impossible_cells_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Cell(**dict(model="a", num_steps=4, temperature=1.0, seed=0, num_samples=8, length=16) | change)


def _record(model, seed, gen_ppl, entropy, num_steps=4, temperature=1.0):
    return dict(
        model=model,
        num_steps=num_steps,
        temperature=temperature,
        seed=seed,
        gen_ppl=gen_ppl,
        entropy=entropy,
        degenerate=False,
        num_forward_calls=num_steps + 1,
    )


def test_summary_is_mean_and_sample_standard_deviation():
    rows = summarise([_record("a", 0, 10.0, 3.0), _record("a", 1, 14.0, 3.2), _record("b", 0, 5.0, 1.0)])
    assert [row["model"] for row in rows] == ["a", "b"]
    assert rows[0]["gen_ppl"] == 12.0 and rows[0]["gen_ppl_sd"] == pytest.approx(8**0.5)
    assert rows[0]["entropy"] == pytest.approx(3.1) and rows[1]["gen_ppl_sd"] == 0.0


def test_matching_temperature_interpolates_and_stays_on_the_curve():
    curve = {0.5: 2.0, 0.75: 3.0, 1.0: 4.0}
    assert matching_temperature(curve, 3.5) == pytest.approx(0.875)
    assert matching_temperature(curve, 3.0) == pytest.approx(0.75)
    assert matching_temperature(curve, 1.0) == 0.5 and matching_temperature(curve, 9.0) == 1.0


def test_table_and_plot_show_every_row(tmp_path):
    models = (("base", 90.0), ("new", 9.0))
    rows = summarise([_record(m, seed, p, 3.0, n) for m, p in models for n in (4, 8) for seed in (0, 1)])
    table = markdown_table(rows, {"gen_ppl": 7.25, "entropy": 3.5})
    lines = table.splitlines()
    assert lines[0] == "| model | NFE 4: Gen.-PPL | entropy | NFE 8: Gen.-PPL | entropy |"
    assert lines[2] == "| base | 90.0 ± 0.0 | 3.000 ± 0.000 | 90.0 ± 0.0 | 3.000 ± 0.000 |"
    assert lines[-1] == "| real text | 7.2 | 3.500 | 7.2 | 3.500 |"
    assert len({len(line.split("|")) for line in lines}) == 1, "a Markdown table has equally many cells in each line"
    plot(rows, tmp_path / "plot.png", {"gen_ppl": 7.25, "entropy": 3.5})
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_gen_ppl_at_entropy_is_log_linear_between_temperatures():
    rows = summarise(
        [_record("a", 0, 100.0, 4.0), _record("a", 0, 10.0, 3.0, temperature=0.5), _record("b", 0, 7.0, 2.0)]
    )
    values = gen_ppl_at_entropy(rows, 3.5)
    assert values["a", 4] == pytest.approx(1000**0.5)
    assert values["b", 4] is None, "no extrapolation"
    assert gen_ppl_at_entropy(rows, 4.5)["a", 4] is None


def test_column_at_equal_entropy_and_matched_row():
    rows = summarise([_record("a", 0, 100.0, 4.0)])
    rows += [
        row | {"model": "a at equal entropy", "matched": True} for row in summarise([_record("a", 0, 9, 3, 4, 0.8)])
    ]
    lines = markdown_table(rows, None, {("a", 4): 31.62}).splitlines()
    assert lines[2] == "| a | 100.0 ± 0.0 | 4.000 ± 0.000 | 31.6 |"
    assert lines[3] == "| a at equal entropy | 9.0 ± 0.0 (T = 0.8) | 3.000 ± 0.000 | - |"


def test_latex_table_has_the_same_cells():
    rows = summarise([_record("my_model", 0, 100.0, 4.0)])
    assert latex_table(rows).splitlines()[4] == r"my\_model & 100.0 $\pm$ 0.0 & 4.000 $\pm$ 0.000 \\"


def _nelbo_of_uniform_prediction(kind, K=23):
    """By integrating the losses of the two processes over t and x_t, for a prediction that is the same for all ids."""
    if kind == "mdlm":
        return math.log(K - 1)  # the mask is ruled out; the weight 1/t is the inverse of the share that is masked
    t = torch.linspace(1e-3, 1, 100_001, dtype=torch.float64)
    a = 1 - (1 - 1e-3) * t
    noise, clean = 1 - a, K * a + 1 - a
    kept = (K - 1) * (1 - noise / clean + noise / clean * (noise / clean).log())
    changed = 1 - clean / noise + clean / noise * (clean / noise).log()
    density = (1 - 1e-3) / (K * a) * ((a + (1 - a) / K) * kept + (1 - a) * (K - 1) / K * changed)
    return float(torch.trapezoid(density, t)) / (1 - 1e-3)


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
def test_nelbo_of_a_uniform_prediction(kind):
    """A model that predicts all tokens alike has a known NELBO, and more draws lower the standard error."""
    model = tiny_model(kind)
    with torch.no_grad():
        model.backbone.output_layer.linear.weight.zero_()
        model.backbone.output_layer.linear.bias.zero_()
    rows = torch.randint(0, 20, (64, 16), generator=torch.Generator().manual_seed(0))
    few, many = (nelbo_perplexity(model, rows, num_draws=n, seed=1, batch_size=24) for n in (1, 32))
    assert many["nelbo"] == pytest.approx(_nelbo_of_uniform_prediction(kind), abs=0.1)
    assert many["nelbo_ppl"] == pytest.approx(math.exp(many["nelbo"]))
    assert 0 < many["nelbo_ppl_se"] < few["nelbo_ppl_se"]
    assert nelbo_perplexity(model, rows, seed=1, batch_size=64)["nelbo"] == pytest.approx(few["nelbo"], rel=1e-6)


def test_nelbo_needs_two_rows():
    with pytest.raises(ValueError, match="at least 2 rows"):
        nelbo_perplexity(tiny_model("mdlm"), torch.zeros(1, 16, dtype=torch.long))
