"""The harness: sample models over a grid of steps, temperatures and seeds, and score every cell with Gen.-PPL.

A finished cell is a JSON file, so a run that is killed loses at most the cell in flight and goes on where it was. Its
name holds a digest of all that decides its content, weights and judge included. Under `accelerate launch` the processes
share the cells out among themselves. `folder` must then be on a disk they all see.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import __version__
from ..data.decoding import check_one_vocabulary, ids_to_suppress
from ..files import read_json, write_json
from ..models.digest import weights_digest
from .likelihood import nelbo_perplexity
from .sampling import Sampling

logger = logging.getLogger(__name__)

MOST_LABEL_BYTES = 100
COSTS = ("calls_per_row", "num_forward_passes", "seconds", "tokens_per_second")


@dataclass(frozen=True)
class Cell:
    """One entry of the grid: a model, and how its samples are drawn.

    Attributes:
        model: the model's label in the tables.
        weights: digest of the model's weights, its generation defaults and its attention.
        scoring: digest of the judge, of both tokenizers and of all settings of `GenPPL`.
        num_steps: sampling steps, which papers label NFE.
        temperature: of the clean-token prediction. 0 is greedy.
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


def check_label(label: str) -> None:
    """Raise ValueError for a label of a model that cannot be part of the names of files, or of a table.

    A name takes 255 bytes at most, and those of cells and temporary files need a few dozen beside the label.
    Tables have lines of their own for real text, for other temperatures and for equal entropy.
    """
    if not label.strip():
        raise ValueError(
            "A label has no letters. Give each model or training one: label=MODEL, or label: {field: value}."
        )
    if not label.isprintable():  # half characters, as of a name that is not UTF-8, cannot be written either
        raise ValueError(f"The label {ascii(label[:40])} cannot be shown in one line of text. Take letters and digits.")
    if (size := len(label.encode("utf-8", "surrogatepass"))) > MOST_LABEL_BYTES:
        raise ValueError(
            f"The label {label[:40]!r}... has {size} bytes, but folders and files are named after it: at most "
            f"{MOST_LABEL_BYTES} are possible. Shorten it."
        )
    if label.strip() == "real text" or " at equal entropy (" in label or " (T = " in label:
        raise ValueError(f"No model can be called {label!r}: the tables have lines of such names. Take another label.")


def _is_measured(record: dict) -> bool:
    """Whether a record has the figures that tables are made of, within their bounds. Old cells have no costs."""

    def number(name: str, least: float) -> bool:
        value = record.get(name)
        return isinstance(value, int | float) and not isinstance(value, bool) and value >= least

    costs = [name for name in COSTS if name in record]
    return (
        (number("gen_ppl", 1) or record.get("gen_ppl") is None and record.get("num_tokens") == 0)
        and number("entropy", 0)
        and number("num_forward_calls", 0)
        and isinstance(record.get("degenerate"), bool)
        and costs in ([], list(COSTS))
        and all(number(name, 0) for name in costs)
        and all(record.get(name) is None or number(name, 0) for name in ("gen_ppl_se", "pooled_entropy", "mauve"))
    )


def _digest(settings) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _defaults(model: PreTrainedModel) -> dict:
    """What decides a model's samples beside its weights and the arguments of `generate()`."""
    defaults = {k: v for k, v in model.generation_config.to_diff_dict().items() if k != "transformers_version"}
    if defaults.get("block_length") is None:  # cells of before this setting count as well
        defaults.pop("block_length", None)
    return defaults | {"attn_implementation": model.config._attn_implementation}


class Harness:
    """Samples and scores cells.

    Args:
        models: label -> model, of one tokenizer.
        tokenizer: of the models.
        judge: arguments of `GenPPL`: the judge, such as {"model_id": "gpt2-large"}, and how it scores.
        folder: where finished cells are kept. Cells found there are not computed again, unless another version of the
            metric has scored them.
        sampling: the grid, and how every cell of it is drawn.
    """

    def __init__(
        self,
        models: Mapping[str, PreTrainedModel],
        tokenizer: PreTrainedTokenizerBase,
        judge: dict,
        folder: Path,
        sampling: Sampling,
    ):
        from ..metrics.gen_ppl.gen_ppl import VERSION, GenPPL  # needs evaluate, an extra

        self.models, self.tokenizer, self.folder, self.sampling = models, tokenizer, folder, sampling
        self.metric, self.metric_version = GenPPL(keep_in_memory=True, tokenizer=tokenizer, **judge), VERSION
        check_one_vocabulary(models)
        self.weights = {label: _digest([weights_digest(m.state_dict()), _defaults(m)]) for label, m in models.items()}
        scorer = self.metric.judge
        how = [judge.get(name) for name in ("mode", "max_length", "mauve_references", "mauve_settings")]
        readers = [reader.get_vocab() for reader in (tokenizer, scorer.tokenizer)]
        self.scoring = _digest([weights_digest(scorer.model.state_dict()), scorer.dtype, how, readers])

    def cell(self, model: str, num_steps: int, temperature: float, seed: int, sampling: Sampling | None = None) -> Cell:
        """One cell of a grid, by default of the harness's."""
        sampling = sampling or self.sampling
        length = self.models[model].longest
        settings = (sampling.num_samples, length, sampling.sampler, sampling.dtype or "float32")
        return Cell(model, self.weights[model], self.scoring, num_steps, temperature, seed, *settings)

    def grid(self, sampling: Sampling | None = None, models: Iterable[str] | None = None) -> list[Cell]:
        """The cells of every model (or of those named) at every temperature, number of steps and seed."""
        sampling = sampling or self.sampling
        return [
            self.cell(model, num_steps, temperature, seed, sampling)
            for model in (self.models if models is None else models)
            for temperature in sampling.temperatures
            for num_steps in sampling.num_steps
            for seed in range(sampling.num_seeds)
        ]

    def run(self, cells: Iterable[Cell], description: str = "Sampling") -> list[dict]:
        """One record a cell: its settings, what drawing it took, the record of `GenPPL`, and versions.

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
            try:
                record = read_json(path)
                problem = self._problem(cell, record)
            except ValueError as error:
                problem = f"is damaged ({error})"
            if problem is None:
                return record
            logger.warning("%s %s. The cell is drawn and scored anew.", path, problem)
        ids, cost = self.draw(cell)
        scores = self.metric.compute(predictions=ids)
        scores["judge_dtype"] = scores.pop("dtype")  # `dtype` is the sampled network's
        record = asdict(cell) | cost | scores
        record["versions"] |= {"tokendrift_hf": __version__}
        write_json(path, record)
        return record

    def _problem(self, cell: Cell, record: dict) -> str | None:
        """Why what lies in a cell's file does not count. None: it counts."""
        if any(record.get(name) != value for name, value in asdict(cell).items()) or "gen_ppl" not in record:
            return "is not the record of this cell"
        if not _is_measured(record):
            return "is damaged: it lacks figures, or has some that no cell has"
        versions = record.get("versions")
        version = versions.get("gen_ppl") if isinstance(versions, dict) else None
        if version != self.metric_version:
            return f"was scored by version {version} of the metric, which now is {self.metric_version}"
        return None

    def draw(self, cell: Cell) -> tuple[list[list[int]], dict]:
        """The token ids of the cell's samples, and what they took.

        What they took is a dict. `num_forward_calls` counts the predictions asked for, `calls_per_row` in how many of
        them a sample took part on average, and `num_forward_passes` those of the network for all samples. `seconds`
        is the wall-clock time for all samples, and `tokens_per_second` follows from it.
        """
        model, batch_size = self.models[cell.model], self.sampling.batch_size
        generator = torch.Generator().manual_seed(cell.seed)
        half = torch.autocast(model.device.type, torch.bfloat16)
        suppressed = ids_to_suppress(model, self.tokenizer)
        ids, outputs, start = [], [], time.perf_counter()
        for first in range(0, cell.num_samples, batch_size):
            with half if cell.dtype == "bfloat16" else contextlib.nullcontext():
                output = model.generate(
                    num_samples=min(batch_size, cell.num_samples - first),
                    num_steps=cell.num_steps,
                    temperature=cell.temperature,
                    sampler=cell.sampler,
                    precision=cell.precision,
                    generator=generator,
                    suppress_tokens=suppressed,
                    return_dict_in_generate=True,
                )
            ids += output.sequences.tolist()  # waits for the device
            outputs.append(output)
        seconds = time.perf_counter() - start
        return ids, {
            "num_forward_calls": max(output.num_forward_calls for output in outputs),
            "calls_per_row": float(torch.cat([output.calls_per_row for output in outputs]).double().mean()),
            "num_forward_passes": sum(output.num_forward_passes for output in outputs),
            "seconds": seconds,
            "tokens_per_second": cell.num_samples * cell.length / seconds,
        }

    def nelbo(self, rows: torch.Tensor, num_draws: int) -> dict[str, dict]:
        """label -> `nelbo_perplexity` of every model on real text [N, L]. The processes share the models out."""
        state, labels = PartialState(), list(self.models)
        own = labels[state.process_index :: state.num_processes]
        bar = tqdm(own, desc="NELBO", unit="model", disable=not state.is_local_main_process)
        # A process without a model takes part all the same: each gives a list, and gets all of them as one.
        measured = dict(gather_object([(name, nelbo_perplexity(self.models[name], rows, num_draws)) for name in bar]))
        return {label: measured[label] for label in labels}

    def score_text(self, rows: list[list[int]]) -> dict:
        """The record of real text, the end point of every frontier."""
        return self.metric.compute(predictions=rows)
