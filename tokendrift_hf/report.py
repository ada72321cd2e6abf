"""Results for people: tables and plots of what the harness measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def _row_label(row: dict, base_temperature: float = 1.0) -> str:
    return row["model"] if row["temperature"] == base_temperature else f"{row['model']} (T = {row['temperature']:.3g})"


def _cells(rows: Sequence[dict]) -> tuple[list[str], list[int], dict[tuple[str, int], dict]]:
    labels = list(dict.fromkeys(_row_label(row) for row in rows))
    steps = sorted({row["num_steps"] for row in rows})
    return labels, steps, {(_row_label(row), row["num_steps"]): row for row in rows}


def markdown_table(rows: Sequence[dict], real_text: dict | None = None) -> str:
    """The paper's table in Markdown: a line a model, Gen.-PPL and entropy (mean and SD over seeds) at each NFE."""
    labels, steps, cells = _cells(rows)
    lines = [
        "| model | " + " | ".join(f"NFE {n}: Gen.-PPL | entropy" for n in steps) + " |",
        "|---|" + "---|" * (2 * len(steps)),
    ]
    for label in labels:
        parts = [label]
        for n in steps:
            row = cells.get((label, n))
            parts += (
                [""] * 2
                if row is None
                else [
                    f"{row['gen_ppl']:.1f} ± {row['gen_ppl_sd']:.1f}" + (" (degenerate)" if row["degenerate"] else ""),
                    f"{row['entropy']:.3f} ± {row['entropy_sd']:.3f}",
                ]
            )
        lines.append("| " + " | ".join(parts) + " |")
    if real_text is not None:
        values = [f"{real_text['gen_ppl']:.1f} | {real_text['entropy']:.3f}"] * len(steps)
        lines.append("| " + " | ".join(["real text", *values]) + " |")
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[dict], path: Path, real_text: dict | None = None) -> None:
    """Two pictures in one PNG: Gen.-PPL over the number of steps, and Gen.-PPL over entropy."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels, steps, cells = _cells(rows)
    figure, (over_steps, frontier) = plt.subplots(1, 2, figsize=(11, 4.5), constrained_layout=True)
    for label in labels:
        own = [cells[label, n] for n in steps if (label, n) in cells]
        over_steps.errorbar(
            [row["num_steps"] for row in own],
            [row["gen_ppl"] for row in own],
            yerr=[row["gen_ppl_sd"] for row in own],
            marker="o",
            capsize=3,
            label=label,
        )
        frontier.plot([row["entropy"] for row in own], [row["gen_ppl"] for row in own], marker="o", label=label)
        for row in own:
            at = (row["entropy"], row["gen_ppl"])
            frontier.annotate(row["num_steps"], at, textcoords="offset points", xytext=(4, 4))
    if real_text is not None:
        over_steps.axhline(real_text["gen_ppl"], color="black", linestyle=":", label="real text")
        frontier.plot(real_text["entropy"], real_text["gen_ppl"], "k*", markersize=12, label="real text")
    over_steps.set(xscale="log", xlabel="sampling steps (NFE)", ylabel="Gen.-PPL", xticks=steps, xticklabels=steps)
    over_steps.minorticks_off()
    frontier.set(xlabel="entropy of a sample (nats)", ylabel="Gen.-PPL")
    for axes in (over_steps, frontier):
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
    over_steps.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)
