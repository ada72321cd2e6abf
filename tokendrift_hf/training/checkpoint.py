"""ResumableTrainer: a run that can be cut off anywhere, and goes on as if nothing had happened.

Everything that overrides private methods of transformers' Trainer for the sake of what lies on disk is in this file.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import NoReturn

import torch
from accelerate.utils import broadcast_object_list
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME as TRAINER_STATE

from ..files import read_json, write_json
from ..lock import locked_by_first
from ..models.adaptation import ADAPTATION
from ..models.lora import hide_local_base
from .drift_config import recorded_settings, shown_to_others
from .ema import EMACallback, WeightEMA
from .epoch_sampler import EpochSampler
from .gather import sum_over_processes
from .manifest import (
    changed_settings,
    checkpoint_asked_for,
    checkpoints,
    last_complete_checkpoint,
    read_manifest,
    remove_old_checkpoints,
    replacing,
    set_aside_incomplete,
    write_manifest,
)
from .restart import Restart
from .stopping import StopCallback, StopSignals, TrainingStopped

logger = logging.getLogger(__name__)

EMA = "drift_ema"


class ResumableTrainer(Trainer):
    """A `Trainer` whose checkpoints hold all that a run needs, and say when they are complete.

    A subclass says what else there is to remember (`extra_state`, `process_state`), and what a reader should know
    (`write_card`).

    Attributes:
        ema: the averages of the weights, with which models are evaluated and saved. None without `ema_decay`.
        frozen: what -> digest of weights that no checkpoint holds, and that must be the same after a resume.

    Raises:
        ValueError: ema_decay or auto_find_batch_size together with FSDP or DeepSpeed.
    """

    def __init__(self, *, args, **kwargs):
        handler = signal.getsignal(signal.SIGTERM)
        super().__init__(args=args, **kwargs)
        if args.enable_jit_checkpoint:
            # transformers would save in the middle of a step. A stop signal is heeded anyway, after the step.
            from transformers.trainer_jit_checkpoint import JITCheckpointCallback

            self.remove_callback(JITCheckpointCallback)
            signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)
        # Only now is it known whether the weights will be split.
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            if args.ema_decay is not None:
                raise ValueError("ema_decay does not work with FSDP or DeepSpeed, which split or replace the weights.")
            if args.auto_find_batch_size:
                raise ValueError(
                    "auto_find_batch_size does not work with FSDP or DeepSpeed, whose weights cannot be brought back "
                    "to where a failed attempt began. Set per_device_train_batch_size."
                )
        self.ema = None if args.ema_decay is None else WeightEMA(self.model, args.ema_decay)
        if self.ema is not None:
            self.add_callback(EMACallback(self.ema))
        self.stop = StopCallback(self._stop_asked)
        self.add_callback(self.stop)
        self.frozen: dict[str, str] = {}
        self._signals = StopSignals()
        self._before_step: dict[str, dict[str, Tensor]] | None = None  # extra state when the step under way began
        self._start: Restart | None = None
        self._held_back: dict[str, object] = {}  # arguments that have other values while a checkpoint is written

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # The order of the rows follows the run's seed, not what else has drawn from torch's generator.
        config = self.accelerator.dataloader_config
        config.data_seed = self.args.seed if config.data_seed is None else config.data_seed

    def _get_train_sampler(self, *args, **kwargs):
        sampler = super()._get_train_sampler(*args, **kwargs)
        config = self.accelerator.dataloader_config
        seeded = config.use_seedable_sampler and isinstance(sampler, torch.utils.data.RandomSampler)
        return sampler if seeded or not hasattr(sampler, "generator") else EpochSampler(sampler, config.data_seed)

    # What a subclass adds

    def extra_state(self) -> dict[str, dict[str, Tensor]]:
        """File stem -> tensors that a checkpoint holds besides the Trainer's own. The same on every process."""
        return {}

    def process_state(self) -> dict[str, dict[str, Tensor]]:
        """The same for what differs between processes: each has a file of its own."""
        return {}

    def load_extra_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Restore `extra_state()` and `process_state()`. A file that the checkpoint lacks is an empty dictionary."""

    def write_card(self, folder: str | os.PathLike) -> None:
        """Write README.md into a folder with saved weights. Called on the process that saves."""

    # Run

    def train(self, resume_from_checkpoint: str | os.PathLike | bool | None = None, **kwargs):
        """As in `Trainer`. `resume_from_checkpoint=True` takes the newest complete checkpoint.

        SIGTERM and SIGUSR1 stop the run after the step under way: its checkpoint is saved, whatever the save strategy.

        Raises:
            ValueError: there is no complete checkpoint, or the one that is named is incomplete. Frozen weights are not
                those of the checkpoint. Another process trains into the same folder. Weights, gradients or a loss
                are not finite.
            TrainingStopped: a signal asked for it. It is an exit with status 75.
        """
        with ExitStack() as stack:
            stack.enter_context(locked_by_first(Path(self.args.output_dir)))
            checkpoint = self._on_first(lambda: self._checkpoint_to_resume(resume_from_checkpoint))
            self._signals = stack.enter_context(StopSignals())
            try:
                output = super().train(resume_from_checkpoint=checkpoint, **kwargs)
            finally:
                # After an error as well: a later call of this method begins like the first one.
                self.is_in_train, self._before_step, self._start = False, None, None
                self.model.zero_grad()
        if self.stop.stopping:
            stopped = TrainingStopped(self._farewell())
            logger.warning("%s", stopped)
            raise stopped
        return output

    def newest_checkpoint(self) -> str | None:
        """The newest complete checkpoint in the output directory. None: there is none, so a run begins anew."""
        folder = self.args.output_dir
        try:
            return self._on_first(lambda: str(last_complete_checkpoint(folder)) if checkpoints(folder) else None)
        except ValueError as error:
            logger.warning("%s", error)
            return None

    def _checkpoint_to_resume(self, asked: str | os.PathLike | bool | None) -> str | None:
        """The checkpoint to go on from, checked. Newer ones that are incomplete are set aside."""
        path, step = checkpoint_asked_for(self.args.output_dir, asked), 0
        if path is not None:
            manifest = read_manifest(path)
            step = manifest["global_step"]
            self._refuse_other_run(manifest)
            if changed := changed_settings(manifest["settings"], self._settings()):
                logger.warning("Resuming with other settings than the checkpoint's (old, new): %s", changed)
        set_aside_incomplete(self.args.output_dir, after=step)
        return None if path is None else str(path)

    def _refuse_other_run(self, manifest: dict) -> None:
        for what, digest in self.frozen.items():
            if manifest.get("frozen", {}).get(what, digest) != digest:
                raise ValueError(
                    f"The {what} is not the one that the run began with: their weights differ. Build the trainer with "
                    "the same model and encoder as at first. The checkpoint itself is no substitute: what was learned "
                    "comes from it anyway, but a frozen encoder is a copy of the model at the start."
                )
        before, now = manifest.get("processes_with_own_state"), self._processes_with_own_state
        if before is not None and before != now:
            raise ValueError(
                f"The checkpoint holds queues of {before} processes of their own (gather_features=False), and now "
                f"{now} processes have their own. Resume with {before}, or begin anew with gather_features=True."
            )

    def _settings(self) -> dict:
        return recorded_settings(self.args, self.accelerator.num_processes)

    @property
    def _processes_with_own_state(self) -> int:
        return self.accelerator.num_processes if self.process_state() else 0

    def _inner_training_loop(self, batch_size=None, args=None, resume_from_checkpoint=None, **kwargs):
        # Entered again with a smaller batch after running out of memory (auto_find_batch_size).
        if self.args.auto_find_batch_size:
            if self._start is None:
                self._start = Restart(self)
            else:
                self._start.restore()
        self.begin()
        return super()._inner_training_loop(batch_size, args, resume_from_checkpoint, **kwargs)

    def begin(self) -> None:
        """Called before the first step of every attempt at a run: forget what is no part of its state."""

    def _run_epoch(self, *args, **kwargs):
        if self.state.global_step >= self.state.max_steps:  # resumed at its end: nothing is left to do
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _evaluate(self, trial, ignore_keys_for_eval, skip_scheduler=False):
        if skip_scheduler and self.state.global_step > 0:  # eval_on_start, but this is no start
            return {}
        return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)

    # Stop

    def _stop_asked(self) -> bool:
        asked = torch.tensor(float(self._signals.received is not None), device=self.args.device)
        return bool(sum_over_processes(self.accelerator, asked) > 0)

    def _farewell(self) -> str:
        """What a stopped run says."""
        how = f"It is saved in {self._checkpoint_folder()}: resume to go on exactly there."
        if self.args.save_only_model:
            how = "save_only_model=True leaves nothing to resume from."
        step, last = self.state.global_step, self.state.max_steps
        return f"Stopped by {self._signals.received or 'a signal'} after step {step} of {last}. {how}"

    def _determine_best_metric(self, metrics, trial):
        # The answer decides, where only the best is saved, whether anything is: a run that stops is saved as well.
        return super()._determine_best_metric(metrics, trial) or self.stop.stopping

    def _finalize_training(self, *args, **kwargs):
        # A run that stops before its end keeps its newest checkpoint, also where only the best one would be kept.
        unfinished = {"save_total_limit": None, "load_best_model_at_end": False} if self.stop.stopping else {}
        with temporarily(self.args, **unfinished):
            return super()._finalize_training(*args, **kwargs)

    # Nothing that is not finite

    def get_batch_samples(self, *args, **kwargs):
        self._before_step = self.extra_state() | self.process_state()
        return super().get_batch_samples(*args, **kwargs)

    def abandon_step(self, what: str, value: str) -> NoReturn:
        """Take back what the step under way has left in the state of the run, and stop.

        Raises:
            ValueError: always: what is not finite, and in which step.
        """
        if self._before_step is not None:
            self.load_extra_state(self._before_step)
        step = self.state.global_step
        raise ValueError(
            f"The {what} at optimizer step {step + 1} is not finite ({value}). Training stopped before any weight took "
            f"it in; checkpoints up to step {step} in {self.args.output_dir} are untouched. A lower learning rate, "
            "max_grad_norm or float32 instead of float16 usually help."
        )

    def _get_grad_norm(self, model, grad_norm=None):
        # Called on every backend between the gradients and the step. Of a split norm torch 2.7 would read a part alone.
        grad_norm = super()._get_grad_norm(model, grad_norm)
        grad_norm = grad_norm.full_tensor() if hasattr(grad_norm, "full_tensor") else grad_norm
        scaled = getattr(self.accelerator, "scaler", None) is not None  # which leaves out such a step by itself
        if grad_norm is not None and not scaled and not math.isfinite(float(grad_norm)):
            self.abandon_step("gradient", f"its norm is {float(grad_norm)}, although the loss is finite")
        return grad_norm

    def _refuse_bad_weights(self) -> None:
        weights = [p.detach() for p in self.model.parameters() if p.requires_grad]
        finite = [(w.to_local() if hasattr(w, "to_local") else w).isfinite().all() for w in weights]
        bad = ~torch.stack(finite).all()
        if self.is_fsdp_enabled:  # every process has its own part
            bad = sum_over_processes(self.accelerator, bad.float()) > 0
        if bad:
            raise ValueError(
                f"The weights after step {self.state.global_step} are not finite, so they are not saved. Earlier "
                f"checkpoints in {self.args.output_dir} are untouched."
            )

    # Save

    def averaged(self) -> AbstractContextManager:
        """Inside, the model has the averaged weights, if there are any."""
        return nullcontext() if self.ema is None else self.ema.applied(self.model)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in `Trainer`. Unlike a checkpoint, a save by the user or for a push holds the averaged weights, if any.

        Raises:
            ValueError: a weight is not finite. Nothing is written.
        """
        if _internal_call and output_dir is not None:  # a checkpoint
            super().save_model(output_dir, _internal_call)
        else:
            self._refuse_bad_weights()
            with self.averaged():
                super().save_model(output_dir, _internal_call)

    def _checkpoint_folder(self, trial=None) -> Path:
        return Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")

    def _save_checkpoint(self, model, trial):
        self._refuse_bad_weights()
        folder, resumable = self._checkpoint_folder(trial), not self.args.save_only_model
        # The Trainer would push, and remove older checkpoints, before this one is known to be complete.
        held_back = {"save_total_limit": self.args.save_total_limit, "push_to_hub": self.args.push_to_hub}
        with (
            self._writing(folder),
            temporarily(self, _held_back=held_back),
            temporarily(self.args, save_total_limit=None, push_to_hub=False),
        ):
            super()._save_checkpoint(model, trial)
            if self.args.should_save:
                # Where the best checkpoint lies follows from its step, so the folder of this machine stays out.
                state = read_json(folder / TRAINER_STATE)
                write_json(folder / TRAINER_STATE, state | {"best_model_checkpoint": None})
            if self.args.should_save and resumable:
                write_manifest(folder, self._record())
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            keep = [folder] if best is None else [folder, Path(best)]
            remove_old_checkpoints(folder.parent, self.args.save_total_limit, keep, have_manifests=resumable)

    @contextmanager
    def _writing(self, folder: Path) -> Iterator[None]:
        """Inside, all processes write a checkpoint into this folder, which is empty at first."""
        with replacing(folder) if self.args.should_save else nullcontext():
            self.accelerator.wait_for_everyone()
            yield

    def _record(self) -> dict:
        return {
            "global_step": self.state.global_step,
            "settings": self._settings(),
            "frozen": self.frozen,
            "processes_with_own_state": self._processes_with_own_state,
        }

    def _save(self, output_dir=None, state_dict=None):
        sharded = type(self.model)
        # FSDP2 puts a class of torch's in front of the model's own; its code must not travel with the weights.
        self.model.__class__ = next(c for c in sharded.__mro__ if not issubclass(c, FSDPModule))
        try:
            with shown_to_others(), temporarily(self.args, **self._held_back):
                super()._save(output_dir, state_dict)
        finally:
            self.model.__class__ = sharded
        if self.args.should_save:
            self.write_card(output_dir or self.args.output_dir)

    def _save_rng_state(self, output_dir):
        # The last of the Trainer's own files before trainer_state.json, written on every process and backend.
        super()._save_rng_state(output_dir)
        states = {f"{name}_{self.args.process_index}": state for name, state in self.process_state().items()}
        if self.args.should_save:
            states |= self.extra_state() | ({} if self.ema is None else {EMA: self.ema.state_dict()})
        for name, tensors in states.items():
            save_file({key: x.contiguous() for key, x in tensors.items()}, _file(output_dir, name))
        self.accelerator.wait_for_everyone()

    def _push_from_checkpoint(self, checkpoint_folder):
        # The Trainer copies the files whose names it knows; code, card and adaptation are not among them.
        if self.is_world_process_zero():
            for pattern in ("*_tokendrift.py", "README.md", ADAPTATION):
                for path in Path(checkpoint_folder).glob(pattern):
                    shutil.copy(path, self.args.output_dir)
        with shown_to_others():  # the Trainer pickles the arguments once more
            super()._push_from_checkpoint(checkpoint_folder)

    def create_model_card(self, *args, **kwargs) -> None:
        """Write the card of this run instead of the Trainer's draft, whose arguments have no effect."""
        if self.is_world_process_zero():
            self.write_card(self.args.output_dir)

    def push_to_hub(self, *args, **kwargs):
        """As in `Trainer`. Adapters never name a directory of this machine as their base."""
        hide_local_base(self.model)
        return super().push_to_hub(*args, **kwargs)

    # Load

    def _load_optimizer_and_scheduler(self, checkpoint):
        # Of all loading it alone happens on every backend, once the weights are in place.
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            state = {name: _read(checkpoint, name) for name in self.extra_state()}
            rank = self.args.process_index
            self.load_extra_state(state | {name: _read(checkpoint, f"{name}_{rank}") for name in self.process_state()})
            self._load_ema(checkpoint)

    def _load_callback_state(self):
        # Called once the state of the run has been read.
        super()._load_callback_state()
        best = Path(self._get_output_dir(None), f"checkpoint-{self.state.best_global_step}")
        self.state.best_model_checkpoint = str(best) if best.is_dir() else None

    def _load_ema(self, checkpoint: str | os.PathLike) -> None:
        """Load the averages. If the checkpoint was written without them, they begin at its weights."""
        if self.ema is not None:
            state = _read(checkpoint, EMA)
            self.ema.load_state_dict(state) if state else self.ema.reset(self.model)

    def _load_best_model(self):
        super()._load_best_model()
        self._load_ema(self.state.best_model_checkpoint)

    def _on_first(self, action: Callable[[], object]):
        """Run `action` on the first process, and give what it returns or raises to all of them."""
        if self.args.world_size == 1:
            return action()
        result = error = None
        if self.is_world_process_zero():
            try:
                result = action()
            except (ValueError, OSError) as problem:
                error = str(problem)
        [result, error] = broadcast_object_list([result, error])
        if error is not None:
            raise ValueError(error)
        return result


@contextmanager
def temporarily(target, **values) -> Iterator[None]:
    """Inside, attributes of `target` have these values. Afterwards they have their own again."""
    own = {name: getattr(target, name) for name in values}
    try:
        for name, value in values.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in own.items():
            setattr(target, name, value)


def _file(folder: str | os.PathLike, name: str) -> Path:
    return Path(folder, f"{name}.safetensors")


def _read(folder: str | os.PathLike, name: str) -> dict[str, Tensor]:
    path = _file(folder, name)
    return load_file(path) if path.is_file() else {}
