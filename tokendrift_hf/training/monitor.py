"""Samples during training: their entropy and Gen.-PPL against steps, and the guard that stops a collapse."""

from __future__ import annotations

import logging
import math
import re
import warnings
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from ..data.decoding import ids_to_suppress
from ..extras import need
from ..files import write_json, written_whole
from .drift_config import DriftConfig

logger = logging.getLogger(__name__)

DYNAMICS = "dynamics"  # .json and .png in the output directory
_ENTROPY = re.compile(r"entropy_nfe\d+$")
_SAMPLED = re.compile(r"(entropy|gen_ppl)_nfe\d+$")


class SampleMonitor:
    """Draws a few samples, always from the same seed, and measures them.

    Args:
        args: the fields gen_ppl_* and seed.
        tokenizer: of the model. None: the judge reads the ids as they are.

    Raises:
        ImportError: matplotlib is not installed, or evaluate, which a judge needs.
    """

    def __init__(self, args: DriftConfig, tokenizer: PreTrainedTokenizerBase | None):
        need("matplotlib", "eval", f"{DYNAMICS}.png")
        self.args, self.tokenizer, self.metric = args, tokenizer, None
        if args.gen_ppl_judge is not None:
            from ..metrics import GenPPL

            device = str(args.device)
            self.metric = GenPPL(keep_in_memory=True, model_id=args.gen_ppl_judge, tokenizer=tokenizer, device=device)

    def measure(self, model: PreTrainedModel) -> dict[str, float]:
        """`entropy_nfe{N}` (nats, within a sample) and, given a judge, `gen_ppl_nfe{N}` for each number of steps N.

        Gen.-PPL is nan where it has no value, as for samples that end at once. Every process draws the same samples,
        which works under FSDP as well. torch's global generators stay untouched.
        """
        measured = {}
        for num_steps in self.args.gen_ppl_num_steps:
            ids = self.draw(model, num_steps)
            measured[f"entropy_nfe{num_steps}"] = mean_entropy(ids)
            if self.metric is not None:
                with warnings.catch_warnings():  # that the samples are few is known
                    warnings.simplefilter("ignore")
                    record = self.metric.compute(predictions=ids.tolist())
                value = record["gen_ppl"]
                measured[f"gen_ppl_nfe{num_steps}"] = math.nan if value is None else value
        return measured

    def draw(self, model: PreTrainedModel, num_steps: int) -> Tensor:
        """Token ids ``[gen_ppl_num_samples, L]``."""
        generator = torch.Generator().manual_seed(self.args.seed)
        settings = {"generator": generator, "suppress_tokens": ids_to_suppress(model, self.tokenizer)}
        left, batches = self.args.gen_ppl_num_samples, []
        while left > 0:
            size = min(left, self.args.per_device_eval_batch_size)
            batches.append(model.generate(num_samples=size, num_steps=num_steps, **settings).cpu())
            left -= size
        return torch.cat(batches)


class DynamicsCallback(TrainerCallback):
    """After every evaluation, write dynamics.json and dynamics.png, and stop the run if entropy has collapsed.

    Args:
        min_entropy_ratio: the least fraction of the first measured entropy. None: never stop.
    """

    def __init__(self, min_entropy_ratio: float | None = None):
        self.min_entropy_ratio = min_entropy_ratio

    def on_evaluate(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            points = sampled_points(state.log_history)
            folder = Path(args.output_dir)
            known = [{name: value for name, value in point.items() if not math.isnan(value)} for point in points]
            write_json(folder / f"{DYNAMICS}.json", known)
            plot_dynamics(points, folder / f"{DYNAMICS}.png")
        ratio = entropy_ratio(state.log_history)
        if self.min_entropy_ratio is not None and ratio < self.min_entropy_ratio:
            logger.warning(
                "Stopping at step %d: the entropy of the samples is %.0f %% of what it was at the start, and "
                "gen_ppl_min_entropy_ratio asks for %.0f %%. Take an earlier checkpoint, or a lower learning rate.",
                state.global_step,
                100 * ratio,
                100 * self.min_entropy_ratio,
            )
            control.should_training_stop = True


def mean_entropy(ids: Tensor) -> float:
    """Entropy in nats of the tokens within a row of ids ``[N, L]``, mean over rows."""
    shares = [row.unique(return_counts=True)[1] / len(row) for row in ids]
    return float(torch.stack([torch.special.entr(p).sum() for p in shares]).mean())


def sampled_points(log_history: list[dict]) -> list[dict]:
    """The evaluations with samples in a Trainer's log: step, and what was measured under the names of the log."""
    points = [{k: v for k, v in entry.items() if k == "step" or _SAMPLED.search(k)} for entry in log_history]
    return [point for point in points if len(point) > 1]


def entropy_ratio(log_history: list[dict]) -> float:
    """The newest entropy over the first one, the smallest over the numbers of steps. 1 if nothing was measured."""
    series: dict[str, list[float]] = {}
    for point in sampled_points(log_history):
        for name, value in point.items():
            if _ENTROPY.search(name):
                series.setdefault(name, []).append(value)
    return min((values[-1] / max(values[0], 1e-12) for values in series.values()), default=1.0)


def plot_dynamics(points: list[dict], path: Path):
    """The paper's figure of training dynamics as a PNG: Gen.-PPL (if there was a judge) and entropy over steps.

    Returns:
        The matplotlib figure.
    """
    from matplotlib.figure import Figure  # not pyplot, which would choose a backend for the whole program

    names = sorted({name for point in points for name in point} - {"step"}, key=lambda name: (len(name), name))
    kinds = [kind for kind in ("gen_ppl", "entropy") if any(f"{kind}_nfe" in name for name in names)]
    figure = Figure(figsize=(5.5 * len(kinds), 4), layout="constrained")
    for axis, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        for name in (name for name in names if f"{kind}_nfe" in name):
            series = [(point["step"], point[name]) for point in points if name in point]
            axis.plot(*zip(*series, strict=True), marker="o", label=name.rpartition("nfe")[2])
        axis.set(xlabel="step", ylabel={"gen_ppl": "Gen.-PPL", "entropy": "entropy (nats)"}[kind])
        axis.set_yscale("log" if kind == "gen_ppl" else "linear")
        axis.legend(title="NFE")
    with written_whole(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    return figure
