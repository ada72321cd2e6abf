"""What we add to a checkpoint, and which checkpoints are complete: a killed run may leave the newest half-written."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.trainer import TRAINER_STATE_NAME as TRAINER_STATE
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .drift_config import DriftConfig
from .ema import WeightEMA

logger = logging.getLogger(__name__)

MANIFEST = "drift_state.json"  # written after every other file of ours, and before trainer_state.json
QUEUES, EMA = "drift_queues.safetensors", "drift_ema.safetensors"
# Settings whose silent change would make a resumed run another run.
RECORDED = (
    "seed objective base_loss_weight drift_scale mirror_step_size mirror_eta encoder_input drift_kernel temperatures "
    "attraction repulsion queue_size gather_features feature_layers feature_pooling feature_tokens encoder_timestep "
    "ema_decay gradient_accumulation_steps learning_rate lr_scheduler_type warmup_steps weight_decay "
    "max_grad_norm optim"
).split()


def recorded_settings(args: DriftConfig, num_processes: int) -> dict:
    """The settings that a resumed run should share with its checkpoint."""
    # Rows are shared out among processes without changing the run: what counts is how many a micro-batch has.
    return {name: getattr(args, name) for name in RECORDED} | {
        "global_micro_batch": args.train_batch_size * num_processes
    }


def changed_settings(old: dict, new: dict) -> dict:
    """Name -> (old, new) of the settings that differ."""
    return {name: (old.get(name), value) for name, value in new.items() if old.get(name) != value}


def warn_of_changes(folder: Path, settings: dict) -> None:
    """Warn if the checkpoint in `folder` has other `settings`.

    Raises:
        ValueError: as `read_manifest`.
    """
    changed = changed_settings(read_manifest(folder)["settings"], settings)
    if changed:
        logger.warning("Resuming with other settings than the checkpoint's (old, new): %s", changed)


def save_state(folder: Path, objective: dict[str, Tensor], ema: WeightEMA | None) -> None:
    """Write what the objective remembers (its two queues) and the averaged weights, if any."""
    if objective:
        save_file({name: x.contiguous() for name, x in objective.items()}, folder / QUEUES)
    if ema is not None:
        save_file(ema.state_dict(), folder / EMA)


def load_objective(folder: Path) -> dict[str, Tensor]:
    """What the objective remembered; nothing if the checkpoint was written without an objective."""
    path = folder / QUEUES
    return load_file(path) if path.is_file() else {}


def load_ema(folder: Path, ema: WeightEMA, model: nn.Module) -> None:
    """Restore the averaged weights; of a checkpoint written without them, begin at the weights of `model`."""
    path = folder / EMA
    if path.is_file():
        ema.load_state_dict(load_file(path))
    else:
        ema.reset(model)


def write_manifest(folder: Path, record: dict) -> None:
    """Write `record` and the sizes of the files now in `folder`, in one step that cannot be seen half-done."""
    temporary = folder / f".{MANIFEST}.tmp"
    # Left over from an earlier save into the same folder, and about to be written anew.
    for stale in (MANIFEST, temporary.name, TRAINER_STATE):
        (folder / stale).unlink(missing_ok=True)
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    record = record | {"files": dict(sorted(files.items()))}
    temporary.write_text(json.dumps(record, indent=2), encoding="utf-8")
    os.replace(temporary, folder / MANIFEST)


def read_manifest(folder: Path) -> dict:
    """The manifest of a complete checkpoint.

    Raises:
        ValueError: the checkpoint is incomplete or not from `DriftTrainer`; the message says what is wrong.
    """
    for name in (MANIFEST, TRAINER_STATE):
        try:
            record = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{folder} is not a complete DriftTrainer checkpoint: {name} is missing or damaged ({error}). Resume "
                "from an older checkpoint, or use from_pretrained to start a new run from its weights."
            ) from error
        if name == MANIFEST:
            manifest = record
    for name, size in manifest["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            found = f"{path.stat().st_size} bytes" if path.is_file() else "nothing"
            raise ValueError(f"{folder} is not complete: {name} should have {size} bytes, found {found}.")
    return manifest


def last_complete_checkpoint(output_dir: str | os.PathLike) -> Path:
    """The newest complete checkpoint in a run's output directory; incomplete newer ones are skipped with a warning.

    Raises:
        ValueError: there is none.
    """
    found = [
        path
        for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if path.is_dir() and path.name.rpartition("-")[2].isdigit()
    ]
    for path in sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
        try:
            read_manifest(path)
        except ValueError as error:
            logger.warning("Skipping %s", error)
            continue
        return path
    raise ValueError(
        f"There is no complete checkpoint to resume from in {output_dir} (looked at {len(found)}). To begin anew, "
        "remove the incomplete ones, or name another output directory."
    )
