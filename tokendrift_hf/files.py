"""Files written whole: a reader sees the old content or the new one, never half of it."""

from __future__ import annotations

import json
import os
from pathlib import Path


def write_json(path: Path, value: dict) -> None:
    """Write in one step that cannot be seen half-done; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=2, default=str), encoding="utf-8")
    os.replace(temporary, path)
