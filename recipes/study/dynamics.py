"""A plot of a training's dynamics: what its checkpoints gain at equal entropy, and what that costs in likelihood.

    tokendrift evaluate base=recipes/quickstart/base "400 steps=out/quickstart_hour/refined/checkpoint-400" ... \\
        --judge recipes/quickstart/judge --text documentation --text_split reference \\
        --match_entropy "400 steps" ... --output_dir out/dynamics
    python recipes/study/dynamics.py out/dynamics/results.json dynamics.png

Models are labelled with their number of steps. The first one is where the training began.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def read(path: Path) -> tuple[dict[int, str], dict[str, list[dict]], dict[str, dict]]:
    """Steps -> label of the checkpoints, the rows of the table by model, and the NELBO of the models."""
    results = json.loads(path.read_text())
    rows: dict[str, list[dict]] = {}
    for row in results["rows"]:
        rows.setdefault(row["model"], []).append(row)
    found = {label: re.match(r"([\d,]+) steps$", label) for label in rows}
    labels = {int(match[1].replace(",", "")): label for label, match in found.items() if match}
    if not labels:
        raise ValueError(f"{path}: no model is labelled with its number of steps, such as '400 steps'.")
    return labels, rows, results["nelbo"]


def plot(path: Path, image: Path) -> None:
    """Three panels over the steps: change at equal entropy and entropy for each NFE, and NELBO perplexity."""
    labels, rows, nelbo = read(path)
    steps, base = list(labels), next(iter(rows))
    figure, (gain, entropy, likelihood) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for num_steps in sorted({row["num_steps"] for row in rows[base]}):
        at = {label: next(r for r in found if r["num_steps"] == num_steps) for label, found in rows.items()}
        pairs = [(at[label], at[f"{base} at equal entropy ({label})"]) for label in labels.values()]
        changes = [100 * (refined["gen_ppl"] / unrefined["gen_ppl"] - 1) for refined, unrefined in pairs]
        gain.plot([0, *steps], [0, *changes], marker="o", label=f"NFE {num_steps}")
        values = [at[base]["entropy"], *(at[label]["entropy"] for label in labels.values())]
        entropy.plot([0, *steps], values, marker="o", label=f"NFE {num_steps}")
        print(f"NFE {num_steps}: " + ", ".join(f"{n} {c:+.1f} %" for n, c in zip(steps, changes, strict=True)))
    perplexities = [nelbo[label]["nelbo_ppl"] for label in (base, *labels.values())]
    likelihood.plot([0, *steps], perplexities, marker="o", color="black")
    print("NELBO perplexity: " + ", ".join(f"{x:.1f}" for x in perplexities))
    gain.axhline(0, color="grey", linewidth=0.8)
    gain.set_ylabel("Gen.-PPL against the base\nat equal entropy, %")
    entropy.set_ylabel("entropy, nats")
    likelihood.set_ylabel("NELBO perplexity of real text")
    for panel in (gain, entropy, likelihood):
        panel.set_xlabel("training steps")
    gain.legend()
    figure.savefig(image, dpi=130)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="results.json of tokendrift evaluate")
    parser.add_argument("image", type=Path, help="where the plot is written")
    options = parser.parse_args()
    plot(options.results, options.image)
