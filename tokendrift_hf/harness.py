"""The harness: sample models over a grid of steps, temperatures and seeds, and score every cell with Gen.-PPL.

A finished cell is a JSON file, so a run that is killed loses at most the cell in flight and goes on where it was. Under
`accelerate launch` the processes share the cells out among themselves; `folder` must then be on a disk they all see.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev

import torch
from accelerate import PartialState
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .hub.process_tokendrift import stratified_times
from .metrics import GenPPL
from .noise import EVALUATE, row_noise


@dataclass(frozen=True)
class Cell:
    """One entry of the grid: a model, and how its samples are drawn.

    Attributes:
        model: the model's label in the tables.
        num_steps: sampling steps, which papers label NFE.
        temperature: of the clean-token prediction, > 0.
        seed: of the sampler.
        num_samples: sequences drawn.
        sampler: of `generate()`.
        length: tokens of a sequence.
        dtype: of the network while sampling ("float32" or "bfloat16"; probabilities and draws are float64).
    """

    model: str
    num_steps: int
    temperature: float
    seed: int
    num_samples: int
    length: int
    sampler: str = "ancestral"
    dtype: str = "float32"

    def __post_init__(self):
        if self.num_steps < 1:
            raise ValueError(f"num_steps={self.num_steps}: a sample takes at least 1 step.")
        if self.temperature <= 0:
            raise ValueError(f"temperature={self.temperature}: it must be above 0 (1 is the model as it is).")

    @property
    def file_name(self) -> str:
        """Unique for the settings: a label for people and a digest of everything."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]
        label = "".join(c if c.isalnum() else "-" for c in self.model)
        return f"{label}-steps{self.num_steps}-T{self.temperature:g}-seed{self.seed}-{digest}.json"


class Harness:
    """Samples and scores cells.

    Args:
        models: label -> model, of one tokenizer.
        tokenizer: of the models.
        judge: arguments of `GenPPL` that name the judge, such as {"model_id": "gpt2-large"}.
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
        self.models, self.tokenizer, self.folder = models, tokenizer, folder
        self.batch_size, self.dtype, self.sampler = batch_size, dtype, sampler
        self.metric = GenPPL(tokenizer=tokenizer, **judge)

    def cell(self, model: str, num_steps: int, temperature: float, seed: int, num_samples: int) -> Cell:
        length = self.models[model].config.max_position_embeddings
        return Cell(model, num_steps, temperature, seed, num_samples, length, self.sampler, self.dtype)

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
        """One record a cell: its settings, `num_forward_calls`, and the record of `GenPPL`. On every process."""
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
        record = asdict(cell) | {"num_forward_calls": calls} | self.metric.compute(predictions=ids)
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(record, indent=2), encoding="utf-8")
        os.replace(temporary, path)
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
                    generator=generator,
                    return_dict_in_generate=True,
                )
            ids += output.sequences.tolist()
            calls = output.num_forward_calls
        return ids, calls

    def score_text(self, rows: list[list[int]]) -> dict:
        """The record of real text, the end point of every frontier."""
        return self.metric.compute(predictions=rows)


@torch.no_grad()
def nelbo_perplexity(
    model: PreTrainedModel, rows: torch.Tensor, num_draws: int = 1, seed: int = 0, batch_size: int = 32
) -> dict[str, float]:
    """exp of the NELBO per token on real text, an upper bound on the model's perplexity, with its standard error.

    Args:
        model: an MDLM or DUO model.
        rows: clean ids [N, L], N >= 2.
        num_draws: draws of t and x_t for every row (n_mc). The times are stratified over all of them.
        seed: of the noise, which is the same for every model and batch size.
        batch_size: rows at a time.

    Returns:
        `nelbo` in nats per token, `nelbo_ppl` and `nelbo_ppl_se` (over rows, delta method).

    Raises:
        ValueError: fewer than two rows.
    """
    N, L = rows.shape
    if N < 2:
        raise ValueError(f"A standard error needs at least 2 rows of text; found {N}.")
    model.eval()
    sums = torch.zeros(N, dtype=torch.float64)
    for draw in range(num_draws):
        for start in range(0, N, batch_size):
            x_0 = rows[start : start + batch_size].to(model.device)
            noise = row_noise((seed, EVALUATE, draw), range(start, start + len(x_0)), L, model.config.vocab_size)
            t = stratified_times(noise.time, first_row=draw * N + start, num_rows=num_draws * N).float()
            t, uniforms, random_tokens = (x.to(model.device) for x in (t, noise.uniforms.float(), noise.random_tokens))
            x_t = model.process.corrupt(x_0, t, uniforms, random_tokens)
            nelbo = model.process.nelbo(model(input_ids=x_t, timesteps=t).logits, x_0, x_t, t)
            sums[start : start + len(x_0)] += nelbo.sum(1).double().cpu() / (num_draws * L)
    perplexity = math.exp(sums.mean())
    error = float(perplexity * sums.std() / math.sqrt(N))
    return {"nelbo": float(sums.mean()), "nelbo_ppl": perplexity, "nelbo_ppl_se": error}


def summarise(records: list[dict]) -> list[dict]:
    """Mean and standard deviation over seeds for each (model, num_steps, temperature), in the order of the records."""
    groups: dict[tuple, list[dict]] = {}
    for record in records:
        groups.setdefault((record["model"], record["num_steps"], record["temperature"]), []).append(record)
    rows = []
    for (model, num_steps, temperature), group in groups.items():
        row = {"model": model, "num_steps": num_steps, "temperature": temperature, "num_seeds": len(group)}
        for name in ("gen_ppl", "entropy"):
            values = [record[name] for record in group if record[name] is not None] or [math.nan]  # no text, no score
            row[name], row[f"{name}_sd"] = mean(values), stdev(values) if len(values) > 1 else 0.0
        row["degenerate"] = any(record["degenerate"] for record in group)
        row["num_forward_calls"] = max(record["num_forward_calls"] for record in group)
        rows.append(row)
    return rows


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
