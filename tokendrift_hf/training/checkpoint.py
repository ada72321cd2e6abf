"""ResumableTrainer: a run that can be cut off anywhere, and goes on as if nothing had happened.

Everything that overrides private methods of transformers' Trainer for the sake of what lies on disk is in this file.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer

from ..models.adaptation import ADAPTATION
from .drift_config import recorded_settings
from .ema import EMACallback, WeightEMA
from .manifest import MANIFEST, changed_settings, last_complete_checkpoint, read_manifest, write_manifest

logger = logging.getLogger(__name__)

EMA = "drift_ema"


class ResumableTrainer(Trainer):
    """A `Trainer` whose checkpoints hold all that a run needs, and say when they are complete.

    A subclass says what else there is to remember (`extra_state`) and what a reader should know (`write_card`).

    Attributes:
        ema: the averages of the weights, with which models are evaluated and saved; None without `ema_decay`.

    Raises:
        ValueError: ema_decay together with FSDP or DeepSpeed.
    """

    def __init__(self, *, args, **kwargs):
        super().__init__(args=args, **kwargs)
        # Only now is it known whether the weights will be split.
        self.ema = None
        if args.ema_decay is not None:
            if self.is_fsdp_enabled or self.is_deepspeed_enabled:
                raise ValueError("ema_decay does not work with FSDP or DeepSpeed, which split or replace the weights.")
            self.ema = WeightEMA(self.model, args.ema_decay)
            self.add_callback(EMACallback(self.ema))

    # What a subclass adds

    def extra_state(self) -> dict[str, dict[str, Tensor]]:
        """File stem -> tensors that a checkpoint holds besides the Trainer's own. The same on every process."""
        return {}

    def load_extra_state(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Restore `extra_state()`. A file that the checkpoint lacks is an empty dictionary here."""

    def write_card(self, folder: str | os.PathLike) -> None:
        """Write README.md into a folder with saved weights. Called on the process that saves."""

    # Resume

    def train(self, resume_from_checkpoint: str | os.PathLike | bool | None = None, **kwargs):
        """As in `Trainer`; `resume_from_checkpoint=True` takes the newest complete checkpoint.

        Raises:
            ValueError: no complete checkpoint, or the one that is named is incomplete.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete_checkpoint(self.args.output_dir)
        if resume_from_checkpoint:
            changed = changed_settings(read_manifest(Path(resume_from_checkpoint))["settings"], self._settings())
            if changed:
                logger.warning("Resuming with other settings than the checkpoint's (old, new): %s", changed)
            resume_from_checkpoint = str(resume_from_checkpoint)
        return super().train(resume_from_checkpoint=resume_from_checkpoint or None, **kwargs)

    def _settings(self) -> dict:
        return recorded_settings(self.args, self.accelerator.num_processes)

    def _load_optimizer_and_scheduler(self, checkpoint):
        # Of all loading it alone happens on every backend, once the weights are in place.
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.load_extra_state({name: _read(checkpoint, name) for name in self.extra_state()})
            self._load_ema(checkpoint)

    def _load_ema(self, checkpoint: str | os.PathLike) -> None:
        """The averages; of a checkpoint written without them, they begin at its weights."""
        if self.ema is not None:
            state = _read(checkpoint, EMA)
            self.ema.load_state_dict(state) if state else self.ema.reset(self.model)

    def _load_best_model(self):
        super()._load_best_model()
        self._load_ema(self.state.best_model_checkpoint)

    # Save

    def averaged(self) -> AbstractContextManager:
        """Inside, the model has the averaged weights, if there are any."""
        return nullcontext() if self.ema is None else self.ema.applied(self.model)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in `Trainer`; unlike a checkpoint, a save by the user or for a push holds the averaged weights, if any."""
        if _internal_call and output_dir is not None:  # a checkpoint begins: what lies there already no longer counts
            if self.args.should_save:
                Path(output_dir, MANIFEST).unlink(missing_ok=True)
            super().save_model(output_dir, _internal_call)
        else:
            with self.averaged():
                super().save_model(output_dir, _internal_call)

    def _save(self, output_dir=None, state_dict=None):
        sharded = type(self.model)
        # FSDP2 puts a class of torch's in front of the model's own; its code must not travel with the weights.
        self.model.__class__ = next(c for c in sharded.__mro__ if not issubclass(c, FSDPModule))
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.model.__class__ = sharded
        if self.args.should_save:
            self.write_card(output_dir or self.args.output_dir)

    def _save_rng_state(self, output_dir):
        # The last of the Trainer's own files before trainer_state.json, written on every process and backend.
        super()._save_rng_state(output_dir)
        if self.args.should_save:
            averages = {} if self.ema is None else {EMA: self.ema.state_dict()}
            for name, tensors in (self.extra_state() | averages).items():
                save_file({key: x.contiguous() for key, x in tensors.items()}, _file(output_dir, name))
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            write_manifest(Path(output_dir), {"global_step": self.state.global_step, "settings": self._settings()})

    def _push_from_checkpoint(self, checkpoint_folder):
        # The Trainer copies the files whose names it knows; code, card and adaptation are not among them.
        if self.is_world_process_zero():
            for pattern in ("*_tokendrift.py", "README.md", ADAPTATION):
                for path in Path(checkpoint_folder).glob(pattern):
                    shutil.copy(path, self.args.output_dir)
        super()._push_from_checkpoint(checkpoint_folder)


@contextmanager
def temporarily(target, **values) -> Iterator[None]:
    """Inside, attributes of `target` have these values; afterwards their own."""
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
