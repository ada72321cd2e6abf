"""The frontier of an evaluation, Gen.-PPL over entropy, with the points of what the page has just sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..evaluation.comparison import ResultRow
from ..evaluation.report import add_legend, draw_frontier
from ..files import read_json
from .columns import BASE, Column
from .request import Request

RESULTS = "results.json"
POINTS = 40  # of a visitor; older ones make room


@dataclass(frozen=True)
class Results:
    """What the frontier shows of an evaluation.

    Attributes:
        rows, curve, real_text: of its comparison.
        judges: revisions, or else names, of the judges that scored it.
    """

    rows: list[ResultRow]
    curve: list[ResultRow]
    real_text: dict | None
    judges: set[str]


def read_results(path: Path) -> Results:
    """What `tokendrift train` or `tokendrift evaluate` left in a results.json.

    Raises:
        ValueError: no such file, or a file of another kind or of another version.
    """
    try:
        results = read_json(path)
        rows, curve = ([ResultRow(**row) for row in results[name]] for name in ("rows", "curve"))
        judges = {record["judge_revision"] or record["judge_id"] for record in results["records"]}
        return Results(rows, curve, results["real_text"], judges)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read as results ({type(error).__name__}: {error}). Name a {RESULTS} that this version "
            "of tokendrift train or evaluate wrote."
        ) from error


def points_of(request: Request, columns: Mapping[str, Column]) -> list[dict]:
    """A point for every finished column that a judge has scored, in the form of the rows of a results.json."""
    return [
        {
            "model": title,
            "num_steps": request.num_steps,
            "temperature": column.temperature,
            "num_samples": request.num_samples,
            "entropy": column.gen_ppl["entropy"],
            "gen_ppl": column.gen_ppl["gen_ppl"],
            "judge": column.gen_ppl["judge_revision"] or column.gen_ppl["judge_id"],
        }
        for title, column in columns.items()
        if column.gen_ppl is not None and column.gen_ppl["gen_ppl"] is not None
    ]


def frontier(results: Results, points: Sequence[Mapping]):
    """The matplotlib figure: lines of the results, points of the page (the base a cross, the refined model a plus)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    axes = figure.subplots()
    draw_frontier(axes, results.rows, results.real_text, results.curve)
    for i, point in enumerate(points):
        newest = i >= len(points) - 2
        label = f"{point['model'].lower()}, {point['num_steps']} steps, T = {point['temperature']:g}"
        axes.plot(
            point["entropy"],
            point["gen_ppl"],
            marker="X" if point["model"] == BASE else "P",
            markersize=13 if newest else 9,
            markeredgecolor="black",
            color="gold" if newest else "lightgray",
            linestyle="none",
            label=f"just now: {label}" if newest else None,
        )
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    add_legend(axes, fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3)
    return figure


def remark(results: Results | None, points: Sequence[Mapping]) -> str:
    """What a reader must know about the plot, in Markdown."""
    if results is None:
        return (
            "There is no frontier to show: this page was started without results. `tokendrift train` and "
            f"`tokendrift evaluate` write a `{RESULTS}`. Name it with `--results`."
        )
    text = (
        "Further down at equal entropy is better. Lines are the evaluation's, each over the temperatures that it "
        "tried. A gold cross is what the base has just written, a gold plus the refined model, older ones are grey."
    )
    if not points:
        return f"{text} Write something, with a judge to score it, and its points appear here."
    count = points[-1]["num_samples"]
    text += f" A point of {count} text{'s' * (count > 1)} is far noisier than a line."
    if points[-1]["judge"] not in results.judges:
        text += " **Another judge scored the evaluation, so the height of the points says nothing here.**"
    return text
