"""Results for people: tables and plots of what the harness measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

Rows = Sequence[Mapping]


def _label(row: Mapping) -> str:
    # The base model at equal entropy is one line, although each number of steps has its own temperature.
    at_one = row.get("temperature", 1) == 1 or row.get("matched")
    return row["model"] if at_one else f"{row['model']} (T = {row['temperature']:g})"


def _cells(rows: Rows) -> tuple[list[str], list[int], dict[tuple[str, int], Mapping]]:
    labels = list(dict.fromkeys(_label(row) for row in rows))
    steps = sorted({row["num_steps"] for row in rows})
    return labels, steps, {(_label(row), row["num_steps"]): row for row in rows}


def _columns(rows: Rows, real_text: Mapping | None, at_entropy: Mapping | None, pm: str) -> list[list[str]]:
    """The table's cells, header first: Gen.-PPL, entropy and, with `at_entropy`, Gen.-PPL at real text's entropy."""
    labels, steps, cells = _cells(rows)
    header = ["model"]
    for n in steps:
        header += [f"NFE {n}: Gen.-PPL", "entropy"] + (["at equal entropy"] if at_entropy is not None else [])
    lines = [header]
    for label in labels:
        line = [label]
        for n in steps:
            row = cells.get((label, n))
            if row is None:
                line += [""] * (3 if at_entropy is not None else 2)
                continue
            note = f" (T = {row['temperature']:g})" if row.get("matched") else ""
            note += " (degenerate)" if row.get("degenerate") else ""
            line += [
                f"{row['gen_ppl']:.1f} {pm} {row['gen_ppl_sd']:.1f}{note}",
                f"{row['entropy']:.3f} {pm} {row['entropy_sd']:.3f}",
            ]
            if at_entropy is not None:
                value = at_entropy.get((row["model"], n))
                line.append("-" if value is None else f"{value:.1f}")
        lines.append(line)
    if real_text is not None:
        values = [f"{real_text['gen_ppl']:.1f}", f"{real_text['entropy']:.3f}"]
        values += [f"{real_text['gen_ppl']:.1f}"] if at_entropy is not None else []
        lines.append(["real text", *values * len(steps)])
    return lines


def markdown_table(rows: Rows, real_text: Mapping | None = None, at_entropy: Mapping | None = None) -> str:
    """The paper's table in Markdown: a line a model, Gen.-PPL and entropy (mean and SD over seeds) at each NFE.

    Args:
        rows: of `harness.summarise`.
        real_text: record of `GenPPL` for real text: a last line.
        at_entropy: of `harness.gen_ppl_at_entropy`: a third column.
    """
    header, *lines = _columns(rows, real_text, at_entropy, "±")
    rule = ["---"] * len(header)
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, rule, *lines))


def latex_table(rows: Rows, real_text: Mapping | None = None, at_entropy: Mapping | None = None) -> str:
    """The same table for LaTeX with booktabs."""
    header, *lines = _columns(rows, real_text, at_entropy, r"$\pm$")
    body = [" & ".join(line).replace("_", r"\_") + r" \\" for line in lines]
    return "\n".join(
        [
            rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}",
            r"\toprule",
            " & ".join(header) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def plot(rows: Rows, path: Path, real_text: Mapping | None = None, curve: Rows = ()) -> None:
    """Two pictures in one PNG: Gen.-PPL over the number of steps, and Gen.-PPL over entropy (the frontier).

    On the frontier every line is a model at one number of steps over its temperatures; a model with one temperature is
    a point. Further down at equal entropy is better.

    Args:
        rows: of `harness.summarise`.
        path: of the PNG.
        real_text: record of `GenPPL` for real text, the frontier's end point.
        curve: more rows for the frontier only.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels, steps, cells = _cells(rows)
    figure, (over_steps, frontier) = plt.subplots(1, 2, figsize=(11, 4.5), constrained_layout=True)
    for label in labels:
        own = [cells[label, n] for n in steps if (label, n) in cells]
        x, y, error = ([row[name] for row in own] for name in ("num_steps", "gen_ppl", "gen_ppl_sd"))
        over_steps.errorbar(x, y, yerr=error, marker="o", capsize=3, label=label)
    models = list(dict.fromkeys(row["model"] for row in rows))
    for i, model in enumerate(models):
        for n, style in zip(steps, ("-", "--", ":", "-.") * len(steps), strict=False):
            own = [row for row in (*rows, *curve) if row["model"] == model and row["num_steps"] == n]
            own = sorted({row["entropy"]: row for row in own}.items())
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
        axes.legend(fontsize="x-small")
    figure.savefig(path, dpi=120)
    plt.close(figure)
