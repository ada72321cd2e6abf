"""The frontier of a results.json with the points of the page."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from toys import record, results

from tokendrift_hf.demo.columns import BASE, REFINED
from tokendrift_hf.demo.frontier import Results, frontier, points_of, read_results, remark
from tokendrift_hf.demo.request import Request

RECORDS = [record(model, 0, 100.0 * t, 4 * t, temperature=t) for model in ("base", "TokenDrift") for t in (0.8, 1.0)]


@pytest.fixture
def evaluation(tmp_path) -> Results:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results(RECORDS, real_text={"gen_ppl": 50.0, "entropy": 3.5})))
    return read_results(path)


def column(gen_ppl, entropy, judge="sha256:a"):
    scores = {"gen_ppl": gen_ppl, "entropy": entropy, "judge_revision": judge, "judge_id": "judge"}
    return SimpleNamespace(temperature=0.9, gen_ppl=scores)


def test_points_are_drawn_where_they_were_measured(evaluation):
    points = points_of(Request(num_steps=4), {BASE: column(90.0, 3.9), REFINED: column(60.0, 3.8)})
    assert [point["temperature"] for point in points] == [0.9, 0.9], "of the column, which may be matched"
    (axes,) = frontier(evaluation, points).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert lines["base, NFE 4"] == [[3.2, 80.0], [4.0, 100.0]] == lines["TokenDrift, NFE 4"]
    assert lines["real text"] == [[3.5, 50.0]]
    assert lines["just now: base, 4 steps, T = 0.9"] == [[3.9, 90.0]]
    assert lines["just now: refined, 4 steps, T = 0.9"] == [[3.8, 60.0]]


def test_a_column_without_a_score_has_no_point():
    unscored = SimpleNamespace(temperature=1.0, gen_ppl=None)
    assert points_of(Request(), {BASE: unscored, REFINED: column(None, 0.0)}) == []


def test_what_must_be_known_about_the_plot_is_said(evaluation):
    points = points_of(Request(num_samples=2), {BASE: column(90.0, 3.9)})
    assert "started without results" in remark(None, [])
    assert "its points appear here" in remark(evaluation, [])
    assert "A point of 2 texts is far noisier" in remark(evaluation, points)
    assert "Another judge" not in remark(evaluation, points)
    others = points_of(Request(), {BASE: column(90.0, 3.9, judge="sha256:b")})
    assert "Another judge scored the evaluation" in remark(evaluation, others)


@pytest.mark.parametrize(
    "content",
    [
        None,
        "no json",
        "{}",
        "[" * 100_000,
        '{"rows": [{"model": "base"}], "curve": [], "records": [], "real_text": null}',
    ],
    ids=lambda content: str(content)[:20],
)
def test_a_file_of_another_kind_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "results.json").write_text(content)
    with pytest.raises(ValueError, match=r"results.json cannot be read as results \(.+Name a results.json"):
        read_results(tmp_path / "results.json")
