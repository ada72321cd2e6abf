"""The folder of a run: where it lies, what is in it, and whether another run may write there."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from ..files import check_folder, read_json
from ..lock import LOCK
from ..publishing.cards import Card
from ..training.manifest import MANIFEST

SETTINGS = "settings.json"  # in the folder of a training: what it was asked to do
HISTORY = "training.json"  # in the same folder, once the training is done: its log, losses and card


def run_folder(arguments: dict) -> Path:
    """Where a run with these fields of `DriftConfig` is written. Raises ValueError for an empty name."""
    folder = arguments.get("output_dir")
    if folder is not None and not str(folder).strip():
        raise ValueError(f"output_dir={folder!r} names no directory. Give a name, or leave it out for 'out'.")
    return Path("out" if folder is None else folder)


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
    if not any(_is_settings(path) for path in folder.glob(f"*/{SETTINGS}")):
        raise ValueError(
            f"output_dir={folder} holds something else than a run of tokendrift train: there is nothing to resume, "
            "and nothing is overwritten. Name another --output_dir."
        )


def is_saved(folder: Path) -> bool:
    """Whether a run has left anything in its folder to go on from: a whole checkpoint or a finished training."""
    return any(path.is_file() for name in (f"*/checkpoint-*/{MANIFEST}", f"*/{HISTORY}") for path in folder.glob(name))


def is_finished(folder: Path) -> bool:
    """Whether a training is done and left its weights in its folder."""
    return (folder / HISTORY).is_file() and any(folder.glob("*.safetensors"))


def read_history(folder: Path) -> dict:
    """What a finished training left. Raises ValueError if that is damaged."""
    path = folder / HISTORY
    history = read_json(path)
    card = history.get("card")
    known = isinstance(card, dict) and {"kind", "model_class"} <= card.keys() <= {f.name for f in fields(Card)}
    if not known or not isinstance(history.get("log_history"), list):
        raise ValueError(
            f"{path} is not what a finished training leaves. Remove it: --resume goes on from the newest checkpoint."
        )
    return history


def _is_settings(path: Path) -> bool:
    """Whether a file is what a training wrote into its folder, and no other program's settings.json."""
    try:
        return "objective" in read_json(path)
    except ValueError:
        return False
