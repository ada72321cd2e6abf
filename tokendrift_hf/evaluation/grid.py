"""The harness: sample models over a grid of steps, temperatures and seeds, and score every cell with Gen.-PPL.

A finished cell is a JSON file, so a run that is killed loses at most the cell in flight and goes on where it was. Its
name holds a digest of all that decides its content, weights and judge included. Under `accelerate launch` the processes
share the cells out among themselves; `folder` must then be on a disk they all see.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import __version__
from ..files import write_json
from ..hub.process_tokendrift import stratified_times
from ..objective.corruption import corrupt, row_nelbo
from ..objective.noise import EVALUATE, row_noise

# Temperatures at which a model's entropy is measured to find the one that equals another model's.
ENTROPY_CURVE = (0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True)
class Cell:
    """One entry of the grid: a model, and how its samples are drawn.

    Attributes:
        model: the model's label in the tables.
        weights: digest of the model's weights, its generation defaults and its attention.
        scoring: digest of the judge, of both tokenizers and of all settings of `GenPPL`.
        num_steps: sampling steps, which papers label NFE.
        temperature: of the clean-token prediction; 0 is greedy.
        seed: of the sampler.
        num_samples: sequences drawn.
        length: tokens of a sequence.
        sampler: of `generate()`.
        dtype: of the network while sampling ("float32" or "bfloat16").
        precision: of random numbers and draws, of `generate()`.
    """

    model: str
    weights: str
    scoring: str
    num_steps: int
    temperature: float
    seed: int
    num_samples: int
    length: int
    sampler: str = "ancestral"
    dtype: str = "float32"
    precision: str = "float64"

    def __post_init__(self):
        if self.num_steps < 1:
            raise ValueError(f"num_steps={self.num_steps}: a sample takes at least 1 step.")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature}: it must be >= 0 (0 is greedy, 1 the model as it is).")

    @property
    def file_name(self) -> str:
        """Unique for the settings: a label for people and a digest of everything."""
        digest = _digest(asdict(self))
        label = "".join(c if c.isalnum() else "-" for c in self.model)
        return f"{label}-steps{self.num_steps}-T{self.temperature:g}-seed{self.seed}-{digest}.json"


def _digest(settings) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _defaults(model: PreTrainedModel) -> dict:
    """What decides a model's samples beside its weights and the arguments of `generate()`."""
    defaults = {k: v for k, v in model.generation_config.to_diff_dict().items() if k != "transformers_version"}
    return defaults | {"attn_implementation": model.config._attn_implementation}


def weights_digest(model: torch.nn.Module) -> str:
    """First digits of a SHA-256 over names and bytes of all weights: equal for equal models, whatever their path."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:12]


class Harness:
    """Samples and scores cells.

    Args:
        models: label -> model, of one tokenizer.
        tokenizer: of the models.
        judge: arguments of `GenPPL`: the judge, such as {"model_id": "gpt2-large"}, and how it scores.
        folder: where finished cells are kept; cells found there are not computed again.
        batch_size: sequences drawn at a time; does not change them.
        dtype: "float32", or "bfloat16" for networks under autocast.
        sampler: of `generate()`.
    """

    def __init__(
        self,
        models: Mapping[str, PreTrainedModel],
        tokenizer: PreTrainedTokenizerBase,
        judge: dict,
        folder: Path,
        batch_size: int = 64,
        dtype: str = "float32",
        sampler: str = "ancestral",
    ):
        from ..metrics import GenPPL  # needs evaluate, an extra

        self.models, self.tokenizer, self.folder = models, tokenizer, folder
        self.batch_size, self.dtype, self.sampler = batch_size, dtype, sampler
        self.metric = GenPPL(keep_in_memory=True, tokenizer=tokenizer, **judge)
        sizes = {label: model.config.vocab_size - hasattr(model.process, "mask_id") for label, model in models.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"The models have different numbers of tokens, so different tokenizers: {sizes}.")
        self.weights = {label: _digest([weights_digest(m), _defaults(m)]) for label, m in models.items()}
        scorer = self.metric.judge
        how = [judge.get(name) for name in ("mode", "max_length", "mauve_references", "mauve_settings")]
        readers = [reader.get_vocab() for reader in (tokenizer, scorer.tokenizer)]
        self.scoring = _digest([weights_digest(scorer.model), scorer.dtype, how, readers])

    def cell(self, model: str, num_steps: int, temperature: float, seed: int, num_samples: int) -> Cell:
        length = self.models[model].config.max_position_embeddings
        settings = (num_steps, temperature, seed, num_samples, length, self.sampler, self.dtype)
        return Cell(model, self.weights[model], self.scoring, *settings)

    def grid(
        self,
        num_steps: Iterable[int],
        temperatures: Iterable[float],
        num_seeds: int,
        num_samples: int,
        models: Iterable[str] | None = None,
    ) -> list[Cell]:
        """The cells of every model (or of those named) at every temperature, number of steps and seed."""
        return [
            self.cell(model, steps, temperature, seed, num_samples)
            for model in (self.models if models is None else models)
            for temperature in temperatures
            for steps in num_steps
            for seed in range(num_seeds)
        ]

    def run(self, cells: Iterable[Cell], description: str = "Sampling") -> list[dict]:
        """One record a cell: its settings, `num_forward_calls`, the version of this package and the record of `GenPPL`.

        Every process gets all of them.
        """
        cells, state = list(cells), PartialState()
        own = cells[state.process_index :: state.num_processes]
        for cell in tqdm(own, desc=description, unit="cell", disable=not state.is_local_main_process):
            self._record(cell)
        state.wait_for_everyone()
        return [self._record(cell) for cell in cells]

    def _record(self, cell: Cell) -> dict:
        path = self.folder / cell.file_name
        if path.is_file():
            return json.loads(path.read_text(encoding="utf-8"))
        ids, calls = self.draw(cell)
        scores = self.metric.compute(predictions=ids)
        scores["judge_dtype"] = scores.pop("dtype")  # `dtype` is the sampled network's
        record = asdict(cell) | {"num_forward_calls": calls} | scores
        record["versions"] |= {"tokendrift_hf": __version__}
        write_json(path, record)
        return record

    def draw(self, cell: Cell) -> tuple[list[list[int]], int]:
        """The token ids of the cell's samples and the number of network calls for one sample."""
        model = self.models[cell.model]
        generator = torch.Generator().manual_seed(cell.seed)
        half = torch.autocast(model.device.type, torch.bfloat16)
        ids, calls = [], 0
        for start in range(0, cell.num_samples, self.batch_size):
            with half if cell.dtype == "bfloat16" else contextlib.nullcontext():
                output = model.generate(
                    num_samples=min(self.batch_size, cell.num_samples - start),
                    num_steps=cell.num_steps,
                    temperature=cell.temperature,
                    sampler=cell.sampler,
                    precision=cell.precision,
                    generator=generator,
                    return_dict_in_generate=True,
                )
            ids += output.sequences.tolist()
            calls = output.num_forward_calls
        return ids, calls

    def nelbo(self, rows: torch.Tensor, num_draws: int) -> dict[str, dict]:
        """label -> `nelbo_perplexity` of every model on real text [N, L]; the processes share the models out."""
        state, labels = PartialState(), list(self.models)
        own = labels[state.process_index :: state.num_processes]
        bar = tqdm(own, desc="NELBO", unit="model", disable=not state.is_local_main_process)
        # A process without a model takes part all the same: each gives a list, and gets all of them as one.
        measured = dict(gather_object([(name, nelbo_perplexity(self.models[name], rows, num_draws)) for name in bar]))
        return {label: measured[label] for label in labels}

    def score_text(self, rows: list[list[int]]) -> dict:
        """The record of real text, the end point of every frontier."""
        return self.metric.compute(predictions=rows)


@torch.no_grad()
def nelbo_perplexity(
    model: PreTrainedModel, rows: torch.Tensor, num_draws: int = 1, seed: int = 0, batch_size: int = 32
) -> dict[str, float]:
    """exp of the NELBO per token on real text, an upper bound on the model's perplexity, with its standard error.

    The times of all N * num_draws losses are stratified: draw d of the row of rank i, the ranks being a random order of
    the rows, has its time in stratum d N + i. So the mean s_i over a row's draws has a trend in i, which does not make
    the mean over rows uncertain, and noise, which does. The standard error sees the noise alone, in the differences
    between neighbours in rank (on a ring, so that each row counts twice): Var = sum_i (s_i - s_(i-1))^2 / (2 N^2). It
    covers the draws of t and x_t, and the choice of the rows as far as they are independent.

    Args:
        model: an MDLM or DUO model.
        rows: clean ids [N, L], N >= 2.
        num_draws: draws of t and x_t for every row (n_mc).
        seed: of the noise, which is the same for every model and batch size.
        batch_size: rows at a time.

    Returns:
        `nelbo` in nats per token with `nelbo_se`; `nelbo_ppl` = exp(nelbo) with `nelbo_ppl_se` (delta method).

    Raises:
        ValueError: fewer than two rows.
    """
    N, L = rows.shape
    if N < 2:
        raise ValueError(f"A standard error needs at least 2 rows of text; found {N}.")
    model.eval()
    rows = rows[torch.from_numpy(np.random.default_rng((seed, EVALUATE)).permutation(N))]
    sums = torch.zeros(N, dtype=torch.float64)
    for draw in range(num_draws):
        for start in range(0, N, batch_size):
            x_0 = rows[start : start + batch_size].to(model.device)
            noise = row_noise((seed, EVALUATE, draw), range(start, start + len(x_0)), L, model.config.vocab_size)
            t = stratified_times(noise.time, first_row=draw * N + start, num_rows=num_draws * N)
            batch = corrupt(model.process, {"input_ids": x_0}, noise, t)
            totals, _ = row_nelbo(model.process, model(input_ids=batch.x_t, timesteps=batch.t).logits, batch)
            sums[start : start + len(x_0)] += totals.double().cpu() / (num_draws * L)
    nelbo, error = float(sums.mean()), float((sums - sums.roll(1)).square().sum().sqrt()) / (math.sqrt(2) * N)
    perplexity = math.exp(nelbo)
    return {"nelbo": nelbo, "nelbo_se": error, "nelbo_ppl": perplexity, "nelbo_ppl_se": perplexity * error}


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
