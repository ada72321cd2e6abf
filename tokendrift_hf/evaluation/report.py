"""Results for people: tables and pictures of what the harness measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..files import write_text, written_whole
from ..markdown import shown, table
from .comparison import AtEntropy, Comparison, ResultRow

PLOT = "plot.png"


def write_report(comparison: Comparison, folder: Path) -> str:
    """Write table.md and plot.png of a comparison into a folder that exists. Returns the Markdown."""
    markdown = markdown_table(comparison.rows, comparison.real_text)
    if any(row.seconds is not None for row in comparison.rows):
        markdown += f"\n{cost_table(comparison.rows)}"
    if comparison.at_text_entropy:
        markdown += f"\n{entropy_table(comparison.at_text_entropy)}"
    if comparison.nelbo is not None:
        lines = [["model", "NELBO perplexity of the real text"]]
        for label, value in comparison.nelbo.items():
            error = "" if value["nelbo_ppl_se"] is None else f" ± {value['nelbo_ppl_se']:.2f} (standard error)"
            lines.append([shown(label), f"{value['nelbo_ppl']:.2f}{error}"])
        markdown += f"\n{table(lines)}"
    write_text(folder / "table.md", markdown)
    plot(comparison.rows, folder / PLOT, comparison.real_text, comparison.curve)
    return markdown


def markdown_table(rows: Sequence[ResultRow], real_text: Mapping | None = None) -> str:
    """The paper's table in Markdown: a line a model, Gen.-PPL and entropy (mean and SD over seeds) at each NFE.

    Args:
        rows: of a comparison. MAUVE, where it was measured, becomes a column.
        real_text: record of `GenPPL` for real text: a last line.
    """
    labels, steps, cells = _cells(rows)
    mauve = ["MAUVE"] if any(row.mauve is not None for row in rows) else []
    lines = [["model"]]
    for n in steps:
        lines[0] += [f"NFE {n}: Gen.-PPL", "entropy", *mauve]
    for label in labels:
        lines.append([shown(label)])
        for n in steps:
            row = cells.get((label, n))
            lines[-1] += [""] * (2 + len(mauve)) if row is None else _line(row)[: 2 + len(mauve)]
    if real_text is not None:
        own = [f"{real_text['gen_ppl']:.1f}", f"{real_text['entropy']:.3f}", *("" for _ in mauve)]
        lines.append(["real text", *own * len(steps)])
    return table(lines)


def cost_table(rows: Sequence[ResultRow]) -> str:
    """A line a model: at each NFE tokens a second, seconds for a seed's samples, and network calls a sample.

    A line at equal entropy is read off others, and took nothing of its own.
    """
    rows = [row for row in rows if row.matched_to is None]
    labels, steps, cells = _cells(rows)
    lines = [["model", *(f"NFE {n}: tokens/s (seconds, calls a sample)" for n in steps)]]
    for label in labels:
        lines.append([shown(label), *(_cost(cells.get((label, n))) for n in steps)])
    return table(lines)


def _cost(row: ResultRow | None) -> str:
    if row is None or row.seconds is None:
        return ""
    return f"{row.tokens_per_second:,.0f} ({row.seconds:.1f} s, {row.calls_per_row:.3g})"


def entropy_table(values: Sequence[AtEntropy]) -> str:
    """A line a model: at each NFE its Gen.-PPL at one entropy with the standard error. "-" beyond its temperatures."""
    steps = sorted({value.num_steps for value in values})
    lines = [["model, at the entropy of real text", *(f"NFE {n}: Gen.-PPL (standard error)" for n in steps)]]
    for label in dict.fromkeys(value.model for value in values):
        own = {value.num_steps: value for value in values if value.model == label}
        lines.append([shown(label), *(_at_entropy(own[n]) if n in own else "" for n in steps)])
    return table(lines)


def _at_entropy(value: AtEntropy) -> str:
    if value.gen_ppl is None:
        return "-"
    error = "" if value.gen_ppl_se is None else f" ± {value.gen_ppl_se:.1f}"
    return f"{value.gen_ppl:.1f}{error} (T = {value.temperature:.2f})"


def _label(row: ResultRow) -> str:
    # The base model at equal entropy is one line, although each number of steps has its own temperature.
    at_one = row.temperature == 1 or row.matched_to is not None
    return row.model if at_one else f"{row.model} (T = {row.temperature:g})"


def _cells(rows: Sequence[ResultRow]) -> tuple[list[str], list[int], dict[tuple[str, int], ResultRow]]:
    labels = list(dict.fromkeys(_label(row) for row in rows))
    steps = sorted({row.num_steps for row in rows})
    return labels, steps, {(_label(row), row.num_steps): row for row in rows}


def _line(row: ResultRow) -> list[str]:
    # Where no temperature tried gives the entropy, the row is not what its label says.
    reached = ", the nearest tried" if row.beyond else ""
    note = f" (T = {row.temperature:g}{reached})" if row.matched_to is not None else ""
    note += " (degenerate)" if row.degenerate else ""
    return [
        _mean_and_sd(row.gen_ppl, row.gen_ppl_sd, 1) + note,
        _mean_and_sd(row.entropy, row.entropy_sd, 3),
        "" if row.mauve is None else _mean_and_sd(row.mauve, row.mauve_sd, 3),
    ]


def _mean_and_sd(value: float, deviation: float | None, digits: int) -> str:
    return f"{value:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")


def plot(rows: Sequence[ResultRow], path: Path, real_text: Mapping | None = None, curve: Sequence[ResultRow] = ()):
    """Two pictures in one PNG: Gen.-PPL over the number of steps, and Gen.-PPL over entropy (the frontier).

    The first shows the rows at temperature 1 and those matched in entropy, or all rows if there are none.
    On the frontier every line is a model at one number of steps over its temperatures. A model with one temperature is
    a point. Further down at equal entropy is better.

    Args:
        rows: of a comparison.
        path: of the PNG.
        real_text: record of `GenPPL` for real text, the frontier's end point.
        curve: more rows for the frontier only.

    Returns:
        The matplotlib figure.
    """
    from matplotlib.figure import Figure  # not pyplot, which would choose a backend for the whole program

    labels, _, cells = _cells([row for row in rows if row.temperature == 1 or row.matched_to is not None] or rows)
    steps = sorted({row.num_steps for row in rows})
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    over_steps, frontier = figure.subplots(1, 2)
    for label in labels:
        own = [cells[label, n] for n in steps if (label, n) in cells]
        x, y, error = ([getattr(row, name) or 0 for row in own] for name in ("num_steps", "gen_ppl", "gen_ppl_sd"))
        over_steps.errorbar(x, y, yerr=error, marker="o", capsize=3, label=label)
    draw_frontier(frontier, rows, real_text, curve)
    if real_text is not None:
        over_steps.axhline(real_text["gen_ppl"], color="black", linestyle=":", label="real text")
    over_steps.set(xscale="log", xlabel="sampling steps (NFE)", ylabel="Gen.-PPL", xticks=steps, xticklabels=steps)
    over_steps.minorticks_off()
    for axes in (over_steps, frontier):
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        add_legend(axes, fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)  # over nothing
    with written_whole(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    return figure


def add_legend(axes, **how) -> None:
    """Add a legend in which labels are text: a formula, as matplotlib takes what is between dollars for, may be bad."""
    for text in axes.legend(**how).get_texts():
        text.set_parse_math(False)


def draw_frontier(
    axes, rows: Sequence[ResultRow], real_text: Mapping | None = None, curve: Sequence[ResultRow] = ()
) -> None:
    """Draw Gen.-PPL over entropy into matplotlib axes. The rows, `real_text` and `curve` are those of `plot`."""
    steps = sorted({row.num_steps for row in rows})
    for i, model in enumerate(dict.fromkeys(row.model for row in rows)):
        for n, style in zip(steps, ("-", "--", ":", "-.") * len(steps), strict=False):
            own = [row for row in (*rows, *curve) if row.model == model and row.num_steps == n]
            own = sorted({row.entropy: row for row in own}.items())
            if not own:
                continue
            x, y = [h for h, _ in own], [row.gen_ppl for _, row in own]
            axes.plot(x, y, style, marker="o", color=f"C{i}", label=f"{model}, NFE {n}")
    if real_text is not None:
        axes.plot(real_text["entropy"], real_text["gen_ppl"], "k*", markersize=12, label="real text")
    axes.set(xlabel="entropy of a sample (nats)", ylabel="Gen.-PPL")
