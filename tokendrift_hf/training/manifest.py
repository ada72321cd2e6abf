"""Which checkpoints are complete: a killed run may leave the newest half-written, and disks lose bits."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME as TRAINER_STATE
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..files import read_json, write_json

logger = logging.getLogger(__name__)

MANIFEST = "drift_state.json"  # written last: a checkpoint without it is not complete
# Left out of it: text to edit, and what transformers' own checkpoints on SIGTERM put there for the time of writing.
NOT_LISTED = {MANIFEST, "README.md", "checkpoint-is-incomplete.txt"}
SET_ASIDE, REPLACED = "_incomplete-", "_replaced-"  # before a checkpoint's name; what begins with _ is never pushed


def changed_settings(old: dict, new: dict) -> dict:
    """Name -> (old, new) of the settings that differ. A name that only one side has was recorded by another version."""
    return {name: (old[name], new[name]) for name in new if name in old and old[name] != new[name]}


# One checkpoint


def write_manifest(folder: Path, record: dict) -> None:
    """Write `record`, with size and SHA-256 of the files now in `folder`, in one step that cannot be seen half-done."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    files = {name: files[name] for name in sorted(files.keys() - NOT_LISTED)}
    manifest = record | {
        "files": {name: path.stat().st_size for name, path in files.items()},
        "sha256": dict(zip(files, file_digests(list(files.values())), strict=True)),
    }
    write_json(folder / MANIFEST, manifest | {"self": _digest_of(manifest)})


def read_manifest(folder: Path, *, digests: bool = True) -> dict:
    """The manifest of a complete checkpoint.

    Args:
        folder: of the checkpoint.
        digests: read every file, as a resume should, or look at sizes alone.

    Raises:
        ValueError: the checkpoint is incomplete, damaged or not from `DriftTrainer`. The message says what is wrong.
    """
    try:
        manifest = read_json(folder / MANIFEST)
        _check_form(manifest)
        read_json(folder / TRAINER_STATE)
    except ValueError as error:
        raise ValueError(
            f"{folder} is not a complete DriftTrainer checkpoint: {error} Resume from an older checkpoint, or use "
            "from_pretrained to start a new run from its weights."
        ) from error
    for name, size in manifest["files"].items():
        path = folder / name
        there = os.path.isfile(path)  # False for an impossible name as well
        if not there or path.stat().st_size != size:
            there = f"{path.stat().st_size} bytes" if there else "nothing"
            raise ValueError(f"{folder} is not complete: {name} should have {size} bytes, found {there}.")
    # Checkpoints of the first version have sizes only.
    recorded = manifest.get("sha256", {}) if digests else {}
    actual = file_digests([folder / name for name in recorded])
    damaged = [name for name, digest in zip(recorded, actual, strict=True) if digest != recorded[name]]
    if damaged:
        raise ValueError(f"{folder} is not complete: {', '.join(damaged)} changed after it was written (SHA-256).")
    return manifest


def _check_form(manifest: dict) -> None:
    forms = {"global_step": int, "settings": dict, "files": dict, "sha256": dict, "self": str, "frozen": dict}
    first_version = forms.keys() - {"sha256", "self", "frozen"}
    if not manifest.keys() >= first_version:
        raise ValueError(f"{MANIFEST} lacks {', '.join(sorted(first_version - manifest.keys()))}.")
    for name, form in forms.items():
        if name in manifest and not isinstance(manifest[name], form):
            raise ValueError(f"{name} in {MANIFEST} should be of type {form.__name__}.")
    if not all(isinstance(size, int) for size in manifest["files"].values()):
        raise ValueError(f"the sizes of files in {MANIFEST} should be whole numbers.")
    if not manifest.get("sha256", {}).keys() <= manifest["files"].keys():
        raise ValueError(f"sha256 in {MANIFEST} names files that are not listed.")
    listed = {name: value for name, value in manifest.items() if name != "self"}
    if "self" in manifest and manifest["self"] != _digest_of(listed):
        raise ValueError(f"{MANIFEST} changed after it was written (SHA-256).")


def _digest_of(manifest: dict) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def file_digests(paths: list[Path]) -> list[str]:
    """The SHA-256 of each file. Threads, since hashing and reading leave Python's lock."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(_file_digest, paths))


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# The checkpoints of a run


def step_of(checkpoint: Path) -> int:
    """The optimizer step after which a checkpoint was written."""
    return int(checkpoint.name.rpartition("-")[2])


def checkpoints(output_dir: str | os.PathLike) -> list[Path]:
    """The folders of a run's checkpoints, complete or not, oldest step first."""
    folders = [path for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.is_dir()]
    return sorted((path for path in folders if path.name.rpartition("-")[2].isdigit()), key=step_of)


def last_complete_checkpoint(output_dir: str | os.PathLike) -> Path:
    """The newest complete checkpoint in a run's output directory. Incomplete newer ones are skipped with a warning.

    Raises:
        ValueError: there is none.
    """
    _put_back_replaced(Path(output_dir))
    there = checkpoints(output_dir)
    for path in reversed(there):
        try:
            read_manifest(path)
        except ValueError as error:
            logger.warning("Skipping %s", error)
            continue
        return path
    raise ValueError(
        f"There is no complete checkpoint to resume from in {output_dir} (looked at {len(there)}). Begin anew, without "
        "resume_from_checkpoint, or name another output directory."
    )


def checkpoint_asked_for(output_dir: str | os.PathLike, asked: str | os.PathLike | bool | None) -> Path | None:
    """The folder that `resume_from_checkpoint` means: the one it names, with True the newest complete one, or none.

    Raises:
        ValueError: it is neither a folder nor True or False, or there is no complete checkpoint.
    """
    if not isinstance(asked, str | os.PathLike | bool | None):
        raise ValueError(f"resume_from_checkpoint is {asked!r:.80}. Give the folder of a checkpoint, or True.")
    return last_complete_checkpoint(output_dir) if asked is True else Path(asked) if asked else None


@contextmanager
def replacing(checkpoint: Path) -> Iterator[None]:
    """Inside, a checkpoint is written anew: what lies there already is moved away, and removed once it is replaced."""
    old = checkpoint.with_name(REPLACED + checkpoint.name)
    if checkpoint.is_dir():
        shutil.rmtree(old, ignore_errors=True)
        checkpoint.rename(old)
    yield
    shutil.rmtree(old, ignore_errors=True)


def _put_back_replaced(output_dir: Path) -> None:
    """Undo a replacement that was cut off, unless the new checkpoint was complete by then."""
    for old in output_dir.glob(f"{REPLACED}{PREFIX_CHECKPOINT_DIR}-*"):
        new = old.with_name(old.name.removeprefix(REPLACED))
        if _is_complete(old) and not _is_complete(new):
            shutil.rmtree(new, ignore_errors=True)
            old.rename(new)
        else:
            shutil.rmtree(old, ignore_errors=True)


def set_aside_incomplete(output_dir: str | os.PathLike, after: int) -> None:
    """Rename the incomplete checkpoints beyond a step, which the run that goes on from there will write anew."""
    for path in checkpoints(output_dir):
        if step_of(path) > after and not _is_complete(path, digests=True):
            target = path.with_name(SET_ASIDE + path.name)
            if target.exists():
                shutil.rmtree(target)
            path.rename(target)
            logger.warning("%s is not complete: it is now %s, and can be removed.", path, target.name)


def remove_old_checkpoints(
    output_dir: str | os.PathLike, limit: int | None, keep: Sequence[Path], *, have_manifests: bool = True
) -> None:
    """Remove the oldest complete checkpoints until `limit` are left, and incomplete ones that lie before the newest.

    Args:
        output_dir: of the run.
        limit: None or 0: remove nothing.
        keep: these stay and count: the one just written, and the best.
        have_manifests: False: nothing says which are complete, so all count.
    """
    if not limit:
        return
    there, kept, newest = checkpoints(output_dir), {path.resolve() for path in keep}, step_of(keep[0])
    complete = [path for path in there if path.resolve() in kept or not have_manifests or _is_complete(path)]
    removable = [path for path in complete if path.resolve() not in kept]
    too_many = removable[: max(0, len(complete) - limit)]
    for path in too_many + [path for path in there if path not in complete and step_of(path) < newest]:
        shutil.rmtree(path, ignore_errors=True)


def _is_complete(checkpoint: Path, *, digests: bool = False) -> bool:
    try:
        read_manifest(checkpoint, digests=digests)
    except ValueError:
        return False
    return True
