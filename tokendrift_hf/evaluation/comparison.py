"""What makes models comparable: means over seeds, equal entropy, the entropy of real text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev

import torch

from .grid import Harness

# Temperatures at which a model's entropy is measured to find the one that equals another model's.
ENTROPY_CURVE = (0.7, 0.8, 0.9, 1.0)


def summarise(records: list[dict]) -> list[dict]:
    """Mean and standard deviation over seeds for each (model, num_steps, temperature), in the order of the records.

    One seed has no deviation: None.
    """
    groups: dict[tuple, list[dict]] = {}
    for record in records:
        groups.setdefault((record["model"], record["num_steps"], record["temperature"]), []).append(record)
    rows = []
    for (model, num_steps, temperature), group in groups.items():
        row = {"model": model, "num_steps": num_steps, "temperature": temperature, "num_seeds": len(group)}
        for name in ("gen_ppl", "entropy", "mauve"):
            if name not in group[0]:
                continue
            values = [record[name] for record in group if record[name] is not None] or [math.nan]  # no text, no score
            row[name], row[f"{name}_sd"] = mean(values), stdev(values) if len(values) > 1 else None
        row["degenerate"] = any(record["degenerate"] for record in group)
        row["num_forward_calls"] = max(record["num_forward_calls"] for record in group)
        rows.append(row)
    return rows


def evaluate_models(
    harness: Harness,
    num_steps: Sequence[int],
    temperatures: Sequence[float],
    num_seeds: int,
    num_samples: int,
    text: Sequence[Sequence[int]] | None = None,
    num_draws: int = 1,
    match: tuple[str, str] | None = None,
) -> dict:
    """Score every model over the grid, and with real text all that makes the models comparable.

    Lowering the temperature is free, so a refinement is worth having only as far as it wins at equal entropy.

    Args:
        harness: with the models.
        num_steps, temperatures, num_seeds, num_samples: the grid.
        text: rows of real text [N, L]: the end point of the frontier, and what the NELBO is of.
        num_draws: for every row of `text`, see `nelbo_perplexity`.
        match: labels of two models: the first is also sampled at the temperatures that give it the entropy that the
            second has at temperature 1.

    Returns:
        dict with `rows` (of `summarise`), `curve` (more rows, from looking for the temperatures), `records`, and for
        real text `real_text` (record), `nelbo` (a model each) and, given several temperatures, in one row of each model
        `at_text_entropy`: its Gen.-PPL at the entropy of real text, None beyond its temperatures.
    """
    compared = {}
    if text is not None:  # first, so that a text which is too short is noticed before any sampling
        ids = torch.tensor(text)
        compared["nelbo"] = harness.nelbo(ids, num_draws)
        compared["real_text"] = harness.score_text([list(row) for row in text])
    records = harness.run(harness.grid(num_steps, temperatures, num_seeds, num_samples))
    rows, curve = summarise(records), []
    if text is not None and len(set(temperatures)) > 1:
        for (model, steps), value in gen_ppl_at_entropy(rows, compared["real_text"]["entropy"]).items():
            own = [row for row in rows if (row["model"], row["num_steps"]) == (model, steps)]
            min(own, key=lambda row: abs(row["temperature"] - 1))["at_text_entropy"] = value
    if match is not None:
        base, refined = match
        target = {row["num_steps"]: row for row in rows if row["model"] == refined and row["temperature"] == 1}
        lowered = harness.grid(num_steps, ENTROPY_CURVE, 1, num_samples, [base])
        curve = harness.run(lowered, f"{base} at lower temperatures")
        matched, beyond = [], {}
        for steps in num_steps:
            entropies = {record["temperature"]: record["entropy"] for record in curve if record["num_steps"] == steps}
            wanted = target[steps]["entropy"]
            beyond[steps] = not min(entropies.values()) <= wanted <= max(entropies.values())
            temperature = round(matching_temperature(entropies, wanted), 3)
            matched += harness.grid([steps], [temperature], num_seeds, num_samples, [base])
        found = harness.run(matched, f"{base} at equal entropy")
        records = records + [record for record in curve + found if record not in records]
        rows += [
            row | {"model": f"{base} at equal entropy", "matched": True, "beyond": beyond[row["num_steps"]]}
            for row in summarise(found)
        ]
    return {"rows": rows, "curve": summarise(curve), "records": records} | compared


def matching_temperature(curve: Mapping[float, float], entropy: float) -> float:
    """The temperature at which a model has this entropy, by linear interpolation; the nearest one beyond the curve.

    Args:
        curve: temperature -> mean entropy of samples, at two temperatures or more.
        entropy: the entropy to match, in nats.
    """
    points = sorted((h, t) for t, h in curve.items())
    return _interpolate(points, min(max(entropy, points[0][0]), points[-1][0]))


def gen_ppl_at_entropy(rows: Iterable[dict], entropy: float) -> dict[tuple[str, int], float | None]:
    """(model, num_steps) -> Gen.-PPL at this entropy, log-linear between a model's temperatures; None beyond them.

    Args:
        rows: of `summarise`, at several temperatures.
        entropy: in nats; that of real text makes models comparable (lowering the temperature is free).
    """
    points: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for row in rows:
        points.setdefault((row["model"], row["num_steps"]), []).append((row["entropy"], math.log(row["gen_ppl"])))
    values = {key: _interpolate(sorted(found), entropy) for key, found in points.items()}
    return {key: None if value is None else math.exp(value) for key, value in values.items()}


def _interpolate(points: list[tuple[float, float]], x: float) -> float | None:
    """y at x on the broken line through points of rising x; None outside."""
    if len(points) == 1 and points[0][0] == x:
        return points[0][1]
    for (x_0, y_0), (x_1, y_1) in zip(points, points[1:], strict=False):
        if x_0 <= x <= x_1:
            return y_0 + (y_1 - y_0) * ((x - x_0) / (x_1 - x_0) if x_1 > x_0 else 0.0)
    return None
