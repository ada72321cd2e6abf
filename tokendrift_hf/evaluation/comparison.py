"""What makes models comparable: means over seeds, equal entropy, the entropy of real text."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, stdev

import torch

from .grid import COSTS, Harness

# Temperatures at which a model's entropy is measured to find the one that equals another model's.
ENTROPY_CURVE = [0.7, 0.8, 0.9, 1.0]
# The same beyond temperature 1, one after the other, as far as it takes.
LOWER_TEMPERATURES, HIGHER_TEMPERATURES = (0.9, 0.8, 0.7), (1.1, 1.2)


@dataclass(frozen=True)
class ResultRow:
    """The samples of a model at one number of steps and one temperature: means over the sampling seeds.

    Attributes:
        model: label of the line in the table.
        num_steps: sampling steps.
        temperature: of the clean-token prediction.
        num_seeds: how many seeds the means are over. One seed has no standard deviation: None.
        gen_ppl, gen_ppl_sd: Gen.-PPL and its standard deviation, NaN if no sample had any text.
        entropy, entropy_sd: entropy of the tokens within a sample in nats.
        mauve, mauve_sd: MAUVE against real text in [0, 1]. None: not measured.
        degenerate: whether the metric flagged the samples of some seed.
        num_forward_calls: predictions that sampling asked for, the most over the seeds.
        calls_per_row: in how many of them a sample took part, on average. This and what follows is None where a cell
            was drawn by a version that did not measure it.
        num_forward_passes: of the network for the samples of a seed. A large batch needs several for one prediction.
        seconds: wall-clock time of the samples of a seed.
        tokens_per_second: sampled in that time.
        matched_to: label of the model whose entropy this temperature gives. None: the user asked for the temperature.
        beyond: whether that entropy lies beyond all temperatures tried, so that this one is only the nearest.
    """

    model: str
    num_steps: int
    temperature: float
    num_seeds: int
    gen_ppl: float
    gen_ppl_sd: float | None
    entropy: float
    entropy_sd: float | None
    mauve: float | None
    mauve_sd: float | None
    degenerate: bool
    num_forward_calls: int
    calls_per_row: float | None = None
    num_forward_passes: float | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    matched_to: str | None = None
    beyond: bool = False


@dataclass(frozen=True)
class AtEntropy:
    """What a model gives at one entropy, between the two temperatures around it.

    Attributes:
        model: label of the model.
        num_steps: sampling steps.
        entropy: in nats.
        temperature: at which the model has this entropy. None: the entropy lies beyond its temperatures.
        gen_ppl, gen_ppl_se: Gen.-PPL there and its standard error over seeds. None: beyond, or of one seed.
    """

    model: str
    num_steps: int
    entropy: float
    temperature: float | None = None
    gen_ppl: float | None = None
    gen_ppl_se: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Everything that was measured of some models.

    Attributes:
        rows: of the table.
        curve: more rows, from looking for the temperatures of equal entropy.
        records: of all cells.
        real_text: record of `GenPPL` for real text.
        nelbo: label -> `nelbo_perplexity` of the model on real text.
        at_text_entropy: every model at the entropy of real text, given several temperatures.
    """

    rows: list[ResultRow]
    curve: list[ResultRow] = field(default_factory=list)
    records: list[dict] = field(default_factory=list)
    real_text: dict | None = None
    nelbo: dict[str, dict] | None = None
    at_text_entropy: list[AtEntropy] = field(default_factory=list)


def summarise(records: Iterable[dict]) -> list[ResultRow]:
    """A row for each (model, num_steps, temperature), in the order of the records."""
    return [_row(group) for group in _groups(records, "model", "num_steps", "temperature").values()]


def _groups(records: Iterable[dict], *names: str) -> dict[tuple, list[dict]]:
    groups: dict[tuple, list[dict]] = {}
    for record in records:
        groups.setdefault(tuple(record[name] for name in names), []).append(record)
    return groups


def _mean(group: Sequence[dict], name: str) -> float | None:
    values = [record[name] for record in group if record.get(name) is not None]
    return mean(values) if values else None


def _row(group: Sequence[dict]) -> ResultRow:
    values = {name: _mean(group, name) for name in COSTS}
    for name in ("gen_ppl", "entropy", "mauve"):
        scores = [record[name] for record in group if record.get(name) is not None]
        if not scores and name != "mauve":
            scores = [math.nan]  # no text, no score
        values[name] = mean(scores) if scores else None
        values[f"{name}_sd"] = stdev(scores) if len(scores) > 1 else None
    return ResultRow(
        **{name: group[0][name] for name in ("model", "num_steps", "temperature")},
        num_seeds=len(group),
        degenerate=any(record["degenerate"] for record in group),
        num_forward_calls=max(record["num_forward_calls"] for record in group),
        **values,
    )


def check_matches(labels: Collection[str], base: str, models: Collection[str], temperatures: Sequence[float]) -> None:
    """Raise ValueError unless a base can be sampled at the entropies of the models with these labels."""
    unknown = [label for label in labels if label not in models or label == base]
    if unknown:
        others = [label for label in models if label != base]
        if not others:
            raise ValueError(
                f"match_entropy={list(labels)}: {base!r} is the only model, so there is no other one whose entropy it "
                "could match. Name a second model, or leave match_entropy out."
            )
        raise ValueError(f"match_entropy={list(labels)}: {unknown[0]!r} is none of {others}, which {base} can match.")
    if labels and 1 not in temperatures:
        raise ValueError(
            f"match_entropy compares with models at temperature 1, but sampling_temperatures are {list(temperatures)}. "
            "Add 1 to them, or leave nothing to match (match_entropy: [])."
        )


def evaluate_models(
    harness: Harness,
    text: Sequence[Sequence[int]] | None = None,
    num_draws: int = 1,
    match_entropy: Sequence[str] = (),
) -> Comparison:
    """Score every model over the harness's grid, and with real text all that makes the models comparable.

    Lowering the temperature is free, so a refinement is worth having only as far as it wins at equal entropy.

    Args:
        harness: with the models, of which the first is the base.
        text: rows of real text [N, L]: the end point of the frontier, and what the NELBO is of.
        num_draws: for every row of `text`, see `nelbo_perplexity`.
        match_entropy: labels of models: the base is also sampled at as many temperatures as it takes to have the
            entropies of these at temperature 1 between its own, and `at_entropy` reads a line at equal entropy off.

    Raises:
        ValueError: a label that is not known, temperatures without 1, or too little text.
    """
    sampling, base = harness.sampling, next(iter(harness.models))
    check_matches(match_entropy, base, harness.models, sampling.temperatures)
    real_text = nelbo = None
    if text is not None:  # first, so that a text which is too short is noticed before any sampling
        nelbo = harness.nelbo(torch.tensor(text), num_draws)
        real_text = harness.score_text([list(row) for row in text])
    records = harness.run(harness.grid())
    rows, curve, at_text = summarise(records), [], []
    if real_text is not None and len(sampling.temperatures) > 1:
        at_text = at_entropy(records, real_text["entropy"])
    if match_entropy:
        matched = [row for row in rows if row.model in match_entropy and row.temperature == 1]
        own = [record for record in records if record["model"] == base]
        more = _beyond_their_entropies(harness, base, matched, own)
        own += [record for record in more if record not in own]
        records += [record for record in more if record not in records]
        curve = summarise(more)
        rows += [_at_equal_entropy(base, row, own) for row in matched]
    return Comparison(rows, curve, records, real_text, nelbo, at_text)


def _beyond_their_entropies(harness: Harness, base: str, matched: list[ResultRow], records: list[dict]) -> list[dict]:
    """Records of the base at further temperatures, until its entropies lie on both sides of those of `matched`."""
    more: list[dict] = []
    for ladder, side in ((LOWER_TEMPERATURES, min), (HIGHER_TEMPERATURES, max)):
        for temperature in ladder:
            missing = []
            for num_steps in harness.sampling.num_steps:
                tried = [row.entropy for row in summarise(records + more) if row.num_steps == num_steps]
                wanted = [row.entropy for row in matched if row.num_steps == num_steps]
                if side(*wanted, *tried) != side(tried):
                    missing.append(num_steps)
            if missing:
                cells = harness.grid(replace(harness.sampling, num_steps=missing, temperatures=[temperature]), [base])
                more += harness.run(cells, f"{base} at temperature {temperature:g}")
    return more


def _at_equal_entropy(base: str, row: ResultRow, records: Iterable[dict]) -> ResultRow:
    """The line of the base, with these records, at the entropy of a model's row. Beyond them all it is the nearest."""
    records = [record for record in records if record["num_steps"] == row.num_steps]
    names = {"model": f"{base} at equal entropy ({row.model})", "matched_to": row.model}
    tried = summarise(records)
    (value,) = at_entropy(records, row.entropy)
    if value.gen_ppl is None:
        return replace(min(tried, key=lambda line: abs(line.entropy - row.entropy)), **names, beyond=True)
    points = sorted(((line.entropy, line.temperature, line) for line in tried), key=lambda point: point[:2])
    (_, _, low), (_, _, high), share = _segment(points, row.entropy)
    num_seeds = min(low.num_seeds, high.num_seeds)
    known = None not in (low.mauve, high.mauve)
    return ResultRow(
        **names,
        num_steps=row.num_steps,
        temperature=round(value.temperature, 3),
        num_seeds=num_seeds,
        gen_ppl=value.gen_ppl,
        gen_ppl_sd=None if value.gen_ppl_se is None else value.gen_ppl_se * math.sqrt(num_seeds),
        entropy=row.entropy,
        entropy_sd=None,
        mauve=low.mauve + share * (high.mauve - low.mauve) if known else None,
        mauve_sd=None,
        degenerate=low.degenerate or high.degenerate,
        num_forward_calls=max(low.num_forward_calls, high.num_forward_calls),
    )


def matching_temperature(curve: Mapping[float, float], entropy: float) -> float:
    """The temperature at which a model has this entropy, by linear interpolation. Beyond the curve it is the nearest.

    Args:
        curve: temperature -> mean entropy of samples, at two temperatures or more.
        entropy: the entropy to match, in nats.
    """
    points = sorted((h, t) for t, h in curve.items())
    entropy = min(max(entropy, points[0][0]), points[-1][0])
    (h_0, t_0), (h_1, t_1), share = _segment(points, entropy)
    return t_0 + share * (t_1 - t_0)


def at_entropy(records: Iterable[dict], entropy: float) -> list[AtEntropy]:
    """Every model at an entropy: Gen.-PPL log-linear in entropy between the two temperatures around it.

    The standard error is that of the interpolated value over seeds. To first order a seed moves it by how far its own
    log Gen.-PPL and entropy lie off the means, both at the two temperatures, which share their random numbers.

    Args:
        records: of the harness, at several temperatures.
        entropy: in nats. That of real text makes models comparable, since lowering the temperature is free.
    """
    values = []
    for (model, num_steps), group in _groups(records, "model", "num_steps").items():
        by_temperature = _groups((r for r in group if r["gen_ppl"] is not None), "temperature").items()
        points = sorted((mean(r["entropy"] for r in rs), t, rs) for (t,), rs in by_temperature)
        value = AtEntropy(model, num_steps, entropy)
        if points and points[0][0] <= entropy <= points[-1][0]:
            (h_0, t_0, low), (h_1, t_1, high), share = _segment(points, entropy)
            p_0, p_1 = (mean(r["gen_ppl"] for r in rs) for rs in (low, high))
            log_ppl = math.log(p_0) + share * (math.log(p_1) - math.log(p_0))
            slope = math.log(p_1 / p_0) / (h_1 - h_0) if h_1 > h_0 else 0.0
            low, high = ({r["seed"]: r for r in rs} for rs in (low, high))
            moves = [
                (1 - share) * (low[s]["gen_ppl"] / p_0 - 1 - slope * (low[s]["entropy"] - h_0))
                + share * (high[s]["gen_ppl"] / p_1 - 1 - slope * (high[s]["entropy"] - h_1))
                for s in low.keys() & high.keys()
            ]
            error = None
            if len(moves) > 1:
                error = math.exp(log_ppl) * math.sqrt(sum(x * x for x in moves) / (len(moves) * (len(moves) - 1)))
            value = AtEntropy(model, num_steps, entropy, t_0 + share * (t_1 - t_0), math.exp(log_ppl), error)
        values.append(value)
    return values


def _segment(points: list[tuple], x: float) -> tuple[tuple, tuple, float]:
    """The two points around x, of points sorted by their first value, and how far x lies between them in [0, 1]."""
    for before, after in zip(points, points[1:], strict=False):
        if before[0] <= x <= after[0]:
            return before, after, (x - before[0]) / (after[0] - before[0]) if after[0] > before[0] else 0.0
    return points[0], points[0], 0.0  # one point, which is x
