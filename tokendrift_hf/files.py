"""Files of JSON: written whole, so that a reader sees the old content or the new one, and read with a look at them."""

from __future__ import annotations

import json
import os
from pathlib import Path


def write_json(path: Path, value: dict | list) -> None:
    """Write in one step that cannot be seen half-done; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=2, default=str), encoding="utf-8")
    os.replace(temporary, path)


def read_json(path: Path) -> dict:
    """The object that a file holds.

    Raises:
        ValueError: there is no such file; it is cut off, nested without end, or holds something else than an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}). It is missing, cut off or damaged.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, where an object of names and values is needed.")
    return value
