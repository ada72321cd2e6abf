"""Which checkpoints are complete: a killed run may leave the newest half-written."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME as TRAINER_STATE
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

logger = logging.getLogger(__name__)

MANIFEST = "drift_state.json"  # written after every other file of ours, and before trainer_state.json


def changed_settings(old: dict, new: dict) -> dict:
    """Name -> (old, new) of the settings that differ. A name that only one side has was recorded by another version."""
    return {name: (old[name], new[name]) for name in old.keys() & new.keys() if old[name] != new[name]}


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
