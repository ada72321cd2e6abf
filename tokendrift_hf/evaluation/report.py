"""Results for people: tables and pictures of what the harness measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

Rows = Sequence[Mapping]


def write_report(results: Mapping, folder: Path) -> str:
    """Write table.md and plot.png of the results of `harness.evaluate_models`; returns the Markdown.

    Args:
        results: with `rows`, and perhaps `curve`, `real_text` and `nelbo`.
        folder: which exists.
    """
    rows, real_text = results["rows"], results.get("real_text")
    markdown = markdown_table(rows, real_text)
    if "nelbo" in results:
        markdown += "\n| model | NELBO perplexity of the real text |\n| --- | --- |\n"
        for label, value in results["nelbo"].items():
            markdown += (
                f"| {_escaped(label)} | {value['nelbo_ppl']:.2f} ± {value['nelbo_ppl_se']:.2f} (standard error) |\n"
            )
    (folder / "table.md").write_text(markdown, encoding="utf-8")
    plot(rows, folder / "plot.png", real_text, results.get("curve", ()))
    return markdown


def _label(row: Mapping) -> str:
    # The base model at equal entropy is one line, although each number of steps has its own temperature.
    at_one = row["temperature"] == 1 or row.get("matched")
    return row["model"] if at_one else f"{row['model']} (T = {row['temperature']:g})"


def _cells(rows: Rows) -> tuple[list[str], list[int], dict[tuple[str, int], Mapping]]:
    labels = list(dict.fromkeys(_label(row) for row in rows))
    steps = sorted({row["num_steps"] for row in rows})
    return labels, steps, {(_label(row), row["num_steps"]): row for row in rows}


def _escaped(cell: str) -> str:
    return cell.replace("|", r"\|")  # which would end the cell


def _mean_and_sd(row: Mapping, name: str, digits: int) -> str:
    spread = row[f"{name}_sd"]
    return f"{row[name]:.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")


def _line(row: Mapping, names: Sequence[str]) -> list[str]:
    # Where no temperature tried gives the entropy, the row is not what its label says.
    reached = ", the nearest tried" if row.get("beyond") else ""
    note = f" (T = {row['temperature']:g}{reached})" if row.get("matched") else ""
    note += " (degenerate)" if row.get("degenerate") else ""
    line = [_mean_and_sd(row, "gen_ppl", 1) + note, _mean_and_sd(row, "entropy", 3)]
    if "mauve" in names:
        line.append(_mean_and_sd(row, "mauve", 3) if "mauve" in row else "")
    if "at_text_entropy" in names:
        value = row.get("at_text_entropy", "")
        line.append("-" if value is None else f"{value:.1f}" if value else "")
    return line


def _columns(rows: Rows, real_text: Mapping | None) -> list[list[str]]:
    """The table's cells, header first. At each NFE: Gen.-PPL, entropy and, where measured, the other two columns."""
    labels, steps, cells = _cells(rows)
    names = [name for name in ("mauve", "at_text_entropy") if any(name in row for row in rows)]
    titles = {"mauve": "MAUVE", "at_text_entropy": "Gen.-PPL at text's entropy"}
    header = ["model"]
    for n in steps:
        header += [f"NFE {n}: Gen.-PPL", "entropy", *(titles[name] for name in names)]
    lines = [header]
    for label in labels:
        line = [label]
        for n in steps:
            row = cells.get((label, n))
            line += [""] * (2 + len(names)) if row is None else _line(row, names)
        lines.append(line)
    if real_text is not None:
        values = {"mauve": "", "at_text_entropy": f"{real_text['gen_ppl']:.1f}"}
        own = [values["at_text_entropy"], f"{real_text['entropy']:.3f}", *(values[name] for name in names)]
        lines.append(["real text", *own * len(steps)])
    return lines


def markdown_table(rows: Rows, real_text: Mapping | None = None) -> str:
    """The paper's table in Markdown: a line a model, Gen.-PPL and entropy (mean and SD over seeds) at each NFE.

    Args:
        rows: of `harness.evaluate_models` or `harness.summarise`. `mauve` and `at_text_entropy` become columns.
        real_text: record of `GenPPL` for real text: a last line.
    """
    header, *lines = [[_escaped(cell) for cell in line] for line in _columns(rows, real_text)]
    rule = ["---"] * len(header)
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, rule, *lines))


def plot(rows: Rows, path: Path, real_text: Mapping | None = None, curve: Rows = ()):
    """Two pictures in one PNG: Gen.-PPL over the number of steps, and Gen.-PPL over entropy (the frontier).

    The first shows the rows at temperature 1 and those matched in entropy, or all rows if there are none.
    On the frontier every line is a model at one number of steps over its temperatures; a model with one temperature is
    a point. Further down at equal entropy is better.

    Args:
        rows: of `harness.evaluate_models` or `harness.summarise`.
        path: of the PNG.
        real_text: record of `GenPPL` for real text, the frontier's end point.
        curve: more rows for the frontier only.

    Returns:
        The matplotlib figure.
    """
    from matplotlib.figure import Figure  # not pyplot, which would choose a backend for the whole program

    labels, _, cells = _cells([row for row in rows if row["temperature"] == 1 or row.get("matched")] or rows)
    steps = sorted({row["num_steps"] for row in rows})
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    over_steps, frontier = figure.subplots(1, 2)
    for label in labels:
        own = [cells[label, n] for n in steps if (label, n) in cells]
        x, y, error = ([row[name] or 0 for row in own] for name in ("num_steps", "gen_ppl", "gen_ppl_sd"))
        over_steps.errorbar(x, y, yerr=error, marker="o", capsize=3, label=label)
    models = list(dict.fromkeys(row["model"] for row in rows))
    for i, model in enumerate(models):
        for n, style in zip(steps, ("-", "--", ":", "-.") * len(steps), strict=False):
            own = [row for row in (*rows, *curve) if row["model"] == model and row["num_steps"] == n]
            own = sorted({row["entropy"]: row for row in own}.items())
            if not own:
                continue
            x, y = [h for h, _ in own], [row["gen_ppl"] for _, row in own]
            frontier.plot(x, y, style, marker="o", color=f"C{i}", label=f"{model}, NFE {n}")
    if real_text is not None:
        over_steps.axhline(real_text["gen_ppl"], color="black", linestyle=":", label="real text")
        frontier.plot(real_text["entropy"], real_text["gen_ppl"], "k*", markersize=12, label="real text")
    over_steps.set(xscale="log", xlabel="sampling steps (NFE)", ylabel="Gen.-PPL", xticks=steps, xticklabels=steps)
    over_steps.minorticks_off()
    frontier.set(xlabel="entropy of a sample (nats)", ylabel="Gen.-PPL")
    for axes in (over_steps, frontier):
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)  # below, over nothing
    figure.savefig(path, dpi=120)
    return figure
