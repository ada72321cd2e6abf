"""Tables and pictures: they say what the records say."""

from __future__ import annotations

import configparser
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest
from toys import record

from tokendrift_hf.evaluation.comparison import AtEntropy, Comparison, summarise
from tokendrift_hf.evaluation.report import cost_table, entropy_table, markdown_table, plot, write_report
from tokendrift_hf.markdown import shown

ROOT = Path(__file__).parents[2]
TEXT = {"gen_ppl": 7.25, "entropy": 3.5}


def two_models():
    models = (("base", 90.0), ("new", 9.0))
    return summarise([record(m, seed, p + seed, 3.0, n) for m, p in models for n in (4, 8) for seed in (0, 1)])


def test_the_table_shows_every_row_in_equally_many_cells():
    lines = markdown_table(two_models(), TEXT).splitlines()
    assert lines[0] == "| model | NFE 4: Gen.-PPL | entropy | NFE 8: Gen.-PPL | entropy |"
    assert lines[2] == "| base | 90.5 ± 0.7 | 3.000 ± 0.000 | 90.5 ± 0.7 | 3.000 ± 0.000 |"
    assert lines[-1] == "| real text | 7.2 | 3.500 | 7.2 | 3.500 |"
    assert len({line.count("|") for line in lines}) == 1 and len(lines) == 5


def test_a_temperature_that_does_not_reach_the_entropy_is_said():
    (row,) = summarise([record("a", 0, 2.0, 1.0, temperature=0.7)])
    assert "(T = 0.7, the nearest tried)" in markdown_table([replace(row, matched_to="b", beyond=True)])
    assert "(T = 0.7)" in markdown_table([replace(row, matched_to="b")])


def test_a_degenerate_row_and_a_missing_cell_are_visible():
    rows = summarise([record("a", 0, 2.0, 1.0, degenerate=True), record("b", 0, 3.0, 1.0, num_steps=8)])
    lines = markdown_table(rows).splitlines()
    assert lines[2] == "| a | 2.0 (degenerate) | 1.000 |  |  |", "one seed has no deviation"
    assert lines[3] == "| b |  |  | 3.0 | 1.000 |"


def test_a_column_for_mauve_and_the_matched_row():
    rows = summarise([record("a", 0, 100.0, 4.0, mauve=0.5), record("a", 1, 100.0, 4.0, mauve=0.7)])
    rows += summarise([record("a", 0, 9.0, 3.0, temperature=0.8)])
    rows += [replace(rows[1], model="a at equal entropy (b)", matched_to="b")]
    lines = markdown_table(rows, TEXT).splitlines()
    assert lines[0] == "| model | NFE 4: Gen.-PPL | entropy | MAUVE |"
    assert lines[2] == "| a | 100.0 ± 0.0 | 4.000 ± 0.000 | 0.600 ± 0.141 |"
    assert lines[3] == "| a (T = 0.8) | 9.0 | 3.000 |  |"
    assert lines[4] == "| a at equal entropy (b) | 9.0 (T = 0.8) | 3.000 |  |"
    assert lines[5] == "| real text | 7.2 | 3.500 |  |"


def test_the_models_at_the_entropy_of_text_have_a_table_of_their_own(tmp_path):
    values = [AtEntropy("a|b", 4, 3.5, 0.85, 31.62, 0.5), AtEntropy("a|b", 8, 3.5), AtEntropy("c", 8, 3.5, 0.9, 20.0)]
    table = entropy_table(values)
    header, _, first, second = table.splitlines()
    assert header.startswith("| model, at the entropy of real text | NFE 4: Gen.-PPL (standard error) | NFE 8")
    assert first == r"| `a\|b` | 31.6 ± 0.5 (T = 0.85) | - |", "a dash beyond the model's temperatures"
    assert second == "| c |  | 20.0 (T = 0.90) |", "one seed has no standard error"
    assert table in write_report(Comparison(two_models(), at_text_entropy=values), tmp_path)


def test_what_sampling_took_has_a_table_of_its_own(tmp_path):
    took = {"calls_per_row": 4.5, "num_forward_passes": 9, "seconds": 2.0, "tokens_per_second": 1234.5}
    rows = summarise([record("a", 0, 9.0, 3.0, **took), record("a", 1, 9.0, 3.0, **took | {"seconds": 4.0})])
    rows += summarise([record("made before", 0, 9.0, 3.0)])
    rows += [replace(rows[0], model="a at equal entropy (b)", matched_to="b")]
    assert (rows[0].seconds, rows[0].num_forward_passes, rows[1].seconds) == (3.0, 9, None)
    table = cost_table(rows)
    assert table.splitlines()[0] == "| model | NFE 4: tokens/s (seconds, calls a sample) |"
    assert table.splitlines()[2:] == ["| a | 1,234 (3.0 s, 4.5) |", "| made before |  |"]
    assert table in write_report(Comparison(rows), tmp_path)


HOSTILE = "a`b|c\n\n# heading <script>alert(1)</script> ![i](http://e.vil/x) $\\frac{$"
SHOWN = r"`` a`b\|c # heading <script>alert(1)</script> ![i](http://e.vil/x) $\frac{$ ``"


def test_a_label_is_text_in_every_table_and_in_the_picture(tmp_path):
    """Markup, the end of a cell or of a line, and what matplotlib takes for a formula."""
    took = {"calls_per_row": 4.5, "num_forward_passes": 9, "seconds": 2.0, "tokens_per_second": 1234.5}
    rows = summarise([record(HOSTILE, 0, 9.0, 3.0, **took)])
    nelbo = {HOSTILE: {"nelbo_ppl": 2.0, "nelbo_ppl_se": 0.5}}
    compared = Comparison(rows, nelbo=nelbo, at_text_entropy=[AtEntropy(HOSTILE, 4, 3.5)])
    lines = write_report(compared, tmp_path).splitlines()
    about_models = [line for line in lines if "script" in line]
    assert [line[: len(SHOWN) + 4] for line in about_models] == [f"| {SHOWN} |"] * 4
    assert {line[:2] for line in lines} <= {"| ", ""}
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.parametrize("label", ["base", "TokenDrift (T = 0.9)", "mdlm-0.5_b", "modèle 2", "a+b, c"])
def test_plain_labels_are_shown_as_they_are(label):
    assert shown(label) == label


@pytest.mark.parametrize(
    "label", ["_a_", "*a*", "[a](b)", "<b>", "www.example.org", "a@b.org", "https://a", "~~a~~", "a\nb"]
)
def test_labels_that_could_be_markup_become_code(label):
    assert shown(label).startswith("`")


def test_the_frontier_has_every_temperature_and_ends_in_real_text(tmp_path):
    records = [record("a", 0, p, h, n, t) for n in (4, 8) for t, p, h in ((0.8, 20.0, 3.0), (1.0, 80.0, 4.0))]
    records += [record("b", 0, 30.0, 3.8)]
    curve = summarise([record("a", 0, 10.0, 2.5, 4, 0.7)])
    over_steps, frontier = plot(summarise(records), tmp_path / "plot.png", TEXT, curve).axes
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    found = {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in frontier.lines}
    assert found == {
        "a, NFE 4": [(2.5, 10.0), (3.0, 20.0), (4.0, 80.0)],
        "a, NFE 8": [(3.0, 20.0), (4.0, 80.0)],
        "b, NFE 4": [(3.8, 30.0)],
        "real text": [(3.5, 7.25)],
    }
    labels = [text.get_text() for text in over_steps.get_legend().get_texts()]
    assert labels == ["real text", "a", "b"]
    cold = plot(summarise(records[:1]), tmp_path / "plot.png").axes[0].get_legend().get_texts()
    assert [text.get_text() for text in cold] == ["a (T = 0.8)"]


def test_the_report_is_the_table_and_the_perplexities(tmp_path):
    nelbo = {"one": {"nelbo_ppl": 9.0, "nelbo_ppl_se": None}, "base": {"nelbo_ppl": 22.9, "nelbo_ppl_se": 0.25}}
    text = write_report(Comparison(two_models(), real_text=TEXT, nelbo=nelbo), tmp_path)
    assert text == (tmp_path / "table.md").read_text(encoding="utf-8")
    assert text.startswith(markdown_table(two_models(), TEXT))
    assert text.splitlines()[-2] == "| one | 9.00 |", "one text has no standard error"
    assert text.splitlines()[-1] == "| base | 22.90 ± 0.25 (standard error) |"
    assert {path.name for path in tmp_path.iterdir()} == {"table.md", "plot.png"}


def test_every_file_of_the_package_goes_into_the_wheel():
    """What is not Python is listed as package data."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    patterns = [pattern.strip() for pattern in setup["options.package_data"]["tokendrift_hf"].split(",")]
    package = ROOT / "tokendrift_hf"
    files = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    files = {name for name in files if not name.endswith((".py", ".pyc"))}
    assert "publishing/model_cards/full.md" in files
    assert {name for name in files if not any(fnmatch(name, pattern) for pattern in patterns)} == set()
