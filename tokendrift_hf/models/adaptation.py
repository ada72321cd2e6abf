"""What an adapted model was told about itself, and the file beside its weights that remembers it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from ..files import write_json
from ..hub.generation_tokendrift import DiffusionGenerationConfig

ADAPTATION = "diffusion.json"


@dataclass(frozen=True)
class Adaptation:
    """What a model's own files do not say about its use as a diffusion model.

    Attributes:
        mask_token_id: the id that stands for a corrupted token.
        kept_token_ids: ids that are never corrupted and never predicted, such as [CLS] and [SEP].
        num_tokens: ids from here on have a row in the embedding and no token, and are never predicted.
        frame: the first and the last id of every row of text, if they are kept ids: unprompted text is written between
            them.
        max_length: the longest sequence, in tokens.
        shift: whether the family's logits at position i predict token i + 1.
    """

    mask_token_id: int
    kept_token_ids: tuple[int, ...]
    num_tokens: int
    frame: tuple[int, int] | None
    max_length: int
    shift: bool


def write_adaptation(folder: str | os.PathLike, adaptation: Adaptation, settings: DiffusionGenerationConfig) -> None:
    """Write `diffusion.json`: the adaptation, and under "generation" the settings that differ from the defaults."""
    values = settings.to_dict()
    changed = {
        name: values[name]
        for name in settings.fields
        if values.get(name) is not None and values[name] != settings.defaults.get(name)
    }
    write_json(Path(folder) / ADAPTATION, asdict(adaptation) | {"generation": changed})


def read_adaptation(name: str, revision: str | None = None) -> dict[str, Any]:
    """The content of `diffusion.json` in a directory or a repository of the hub. {} where there is none, or no name.

    Raises:
        ValueError: it is no JSON object, or has fields that are not known.
    """
    if not name:
        return {}
    try:
        path = cached_file(name, ADAPTATION, revision=revision, _raise_exceptions_for_missing_entries=False)
    except OSError:  # no such repository, or no connection
        path = None
    if path is None:
        return {}
    where = os.path.join(name, ADAPTATION)
    try:
        told = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{where} is damaged ({error}). Copy it again.") from error
    known = {field.name for field in fields(Adaptation)} | {"generation"}
    unknown = set(told) - known if isinstance(told, dict) else {type(told).__name__}
    if unknown:
        raise ValueError(f"{where} holds {sorted(unknown)}. Needed is an object with fields of {sorted(known)}.")
    return told
