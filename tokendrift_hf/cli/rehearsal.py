"""The rehearsal of a run, `--dry-run`: what it would cost, measured, and what a push would upload."""

from __future__ import annotations

import copy
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import TrainerCallback

from ..publishing.upload import files_to_publish
from ..training.stopping import TrainingStopped
from .measure import GIB, duration, peak_memory, reset_peak_memory
from .plan import Training
from .run import Run


class StepClock(TrainerCallback):
    """Measures the seconds of every optimizer step, in `seconds`."""

    def __init__(self):
        self.seconds, self._start = [], 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self._start = _now(args.device)

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(_now(args.device) - self._start)


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def rehearse(run: Run) -> dict:
    """Do two short steps of the main training, say what the run would cost and upload, and leave nothing.

    Returns:
        `seconds_a_step` and `peak_memory` in bytes, both measured, and `files`: name -> size of what a push uploads.

    Raises:
        TrainingStopped: a signal asked for it.
    """
    with tempfile.TemporaryDirectory() as scratch:
        training, share = _shortened(run.main, Path(scratch))
        trainer, clock = run.build_trainer(training), StepClock()
        trainer.add_callback(clock)
        reset_peak_memory(training.config.device)
        try:
            trainer.train()
        except TrainingStopped as stop:  # whose message names a checkpoint that goes with this folder
            raise TrainingStopped("The rehearsal was stopped. It leaves nothing.") from stop
        trainer.save_model()
        run.write_settings(training)
        files = files_to_publish(training.folder)
    seconds, peak = clock.seconds[-1] / share, peak_memory(training.config.device)
    if PartialState().is_main_process:
        num_steps = run.num_steps(run.main)
        total = f", {duration(seconds * num_steps)} for {num_steps} steps" if num_steps > 0 else ""
        repo = run.main.config.hub_model_id
        where = "(hub_model_id is not set)" if repo is None else f"to {repo}"
        memory = f"Peak memory of a device: {peak / GIB:.2f} GiB."
        if training.config.device.type == "cpu":  # whose allocator is not torch's
            memory = (
                f"Peak memory of the process: {peak / GIB:.2f} GiB. A long run takes more, of small models up to "
                "three times that: what a step frees stays in pieces."
            )
        print(
            run.describe(run.main, trainer),
            f"Measured in two steps: {seconds:.3g} s a step{total}, without evaluations and saves.",
            memory,
            *([f"Not rehearsed: {', '.join(others)}."] if (others := [x.label for x in run.trainings[1:]]) else []),
            f"A push would upload {where}:",
            *(f"  {size:>13,} bytes  {name}" for name, size in files.items()),
            sep="\n",
        )
    return {"seconds_a_step": seconds, "peak_memory": peak, "files": files}


def _shortened(training: Training, folder: Path) -> tuple[Training, float]:
    """Two optimizer steps, of two micro-batches at most, and the share of a whole step that each of them is.

    The second step is like all that follow: the optimizer's state is there, and gradients are accumulated.
    """
    config = copy.copy(training.config)
    config.output_dir, config.push_to_hub, config.max_steps = str(folder), False, 2
    config.gradient_accumulation_steps = min(2, config.gradient_accumulation_steps)
    config.save_strategy = config.eval_strategy = config.logging_strategy = "no"
    config.eval_on_start = config.load_best_model_at_end = False
    share = config.gradient_accumulation_steps / training.config.gradient_accumulation_steps
    return replace(training, config=config), share
