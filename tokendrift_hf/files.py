"""Files written whole, so that a reader sees the old content or the new one, and JSON read with a look at it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Another path to write to, which becomes `path` in one step when the block ends. Folders are made.

    After an error, such as that of a full disk, `path` is what it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text in one step that cannot be seen half-done."""
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: dict | list) -> None:
    """Write a value as JSON in one step that cannot be seen half-done."""
    write_text(path, json.dumps(value, indent=2, default=str))


def read_json(path: Path) -> dict:
    """The object that a file holds.

    Raises:
        ValueError: there is no such file, or it is cut off, nested without end, or holds something else than an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}). It is missing, cut off or damaged.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, where an object of names and values is needed.")
    return value


def check_folder(argument: str, folder: Path) -> None:
    """Raise ValueError if no folder can be made there because it, or what it should lie in, is a file."""
    there = next((path for path in (folder, *folder.parents) if path.exists() or path.is_symlink()), None)
    if there is not None and not there.is_dir():
        what = "a file" if there.exists() else "a link to nothing"
        where = f"is {what}" if there == folder else f"cannot be made: {there} is {what}"
        raise ValueError(f"{argument}={folder} {where}. Name a directory.")
