"""The folder of a run: where it lies, what is in it, and whether another run may write there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_type_hints

from ..files import check_folder, read_json
from ..lock import LOCK
from ..publishing.cards import Card
from ..training.manifest import MANIFEST, file_digests
from .fields import is_of

SETTINGS = "settings.json"  # in the folder of a training: what it was asked to do
HISTORY = "training.json"  # in the same folder, once the training is done: its log, losses and card


def run_folder(arguments: dict) -> Path:
    """Where a run with these fields of `DriftConfig` is written. Raises ValueError for an empty name."""
    folder = arguments.get("output_dir")
    if folder is not None and not str(folder).strip():
        raise ValueError(f"output_dir={folder!r} names no directory. Give a name, or leave it out for 'out'.")
    return Path(os.path.expanduser("out" if folder is None else folder))  # as TrainingArguments does


def refuse_other_content(folder: Path, resume: bool) -> None:
    """Raise ValueError unless a run may write there: nothing lies there, or the run that it resumes."""
    check_folder("output_dir", folder)
    if not any(path.is_file() and path.name != LOCK for path in folder.rglob("*")):
        return
    if not resume:
        raise ValueError(
            f"output_dir={folder} already holds something, and nothing is overwritten. Name another --output_dir, or "
            "add --resume to go on with the run in it."
        )
    if not _is_run(folder):
        raise ValueError(
            f"output_dir={folder} holds something else than a run of tokendrift train: there is nothing to resume, "
            "and nothing is overwritten. Name another --output_dir."
        )


def refuse_lost_lines(folder: Path, labels: list[str]) -> None:
    """Raise ValueError if the table of the run in the folder has lines that one of these trainings would not have.

    Without a judge there is no table, so there are no labels.
    """
    try:
        results = read_json(folder / "results.json")
    except ValueError:  # there is none, or what is left of it is made anew
        return
    trained = results.get("training")
    lost = [label for label in trained if label not in labels] if isinstance(trained, dict) else []
    if "rows" in results and lost:
        raise ValueError(
            f"{folder / 'results.json'} holds a table with {', '.join(lost)}, which this run would leave out. Resume "
            "with the judge and the trainings that made it, or name another --output_dir."
        )


def is_saved(folder: Path) -> bool:
    """Whether a run has left anything in its folder to go on from: a whole checkpoint or a finished training."""
    return any(path.is_file() for name in (f"*/checkpoint-*/{MANIFEST}", f"*/{HISTORY}") for path in folder.glob(name))


def files_left(folder: Path) -> dict[str, str]:
    """Name -> SHA-256 of what a training leaves beside its checkpoints, but for the card, which may be edited."""
    left = sorted(path.name for path in folder.iterdir() if path.is_file())
    names = [name for name in left if name not in (HISTORY, SETTINGS, LOCK, "README.md")]
    return dict(zip(names, file_digests([folder / name for name in names]), strict=True))


def is_finished(folder: Path) -> bool:
    """Whether a training is done, and all that it left is there."""
    return (folder / HISTORY).is_file() and not missing(folder)


def missing(folder: Path) -> list[str]:
    """The files that a finished training left and that are gone, or not what they were."""
    there = files_left(folder)
    return [name for name, digest in read_history(folder)["files"].items() if there.get(name) != digest]


def read_history(folder: Path) -> dict:
    """What a finished training left. Raises ValueError if that is damaged."""
    path = folder / HISTORY
    remedy = f"Remove {path}: --resume goes on from the newest checkpoint, or begins this training anew."
    try:
        history = read_json(path)
    except ValueError as error:
        raise ValueError(f"{error} {remedy}") from error
    card, kinds = history.get("card"), get_type_hints(Card)
    known = isinstance(card, dict) and {"kind", "model_class"} <= card.keys() <= kinds.keys()
    known = known and all(is_of(value, kinds[name]) for name, value in card.items())
    if not known or not is_of(history.get("log_history"), list) or not is_of(history.get("files"), dict[str, str]):
        raise ValueError(f"{path} is not what a finished training leaves. {remedy}")
    return history


def _is_run(folder: Path) -> bool:
    """Whether a run left the folder: there are its results, or what a training wrote, and not files of such names."""
    files = [(folder / "results.json", "recipe"), *((path, "objective") for path in folder.glob(f"*/{SETTINGS}"))]
    files += [(path, "card") for path in folder.glob(f"*/{HISTORY}")]
    return any(_has(path, name) for path, name in files)


def _has(path: Path, name: str) -> bool:
    try:
        return name in read_json(path)
    except ValueError:
        return False
