"""The harness: cells are reproducible and kept, tables say what the records say."""

from __future__ import annotations

import json

import pytest

from tokendrift_hf.harness import Cell, Harness, matching_temperature, summarise
from tokendrift_hf.report import markdown_table, plot


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
    rows = summarise([_record(m, s, p, 3.0, n) for m, p in (("base", 90.0), ("new", 9.0)) for n in (4, 8) for s in (0, 1)])
    table = markdown_table(rows, {"gen_ppl": 7.25, "entropy": 3.5})
    lines = table.splitlines()
    assert lines[0] == "| model | NFE 4: Gen.-PPL | entropy | NFE 8: Gen.-PPL | entropy |"
    assert lines[2] == "| base | 90.0 ± 0.0 | 3.000 ± 0.000 | 90.0 ± 0.0 | 3.000 ± 0.000 |"
    assert lines[-1] == "| real text | 7.2 | 3.500 | 7.2 | 3.500 |"
    assert len({len(line.split("|")) for line in lines}) == 1, "a Markdown table has equally many cells in each line"
    plot(rows, tmp_path / "plot.png", {"gen_ppl": 7.25, "entropy": 3.5})
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
