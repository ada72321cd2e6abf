"""What an adapted model was told about itself, and the file beside its weights that remembers it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
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

    Raises:
        ValueError: the mask is in the frame, or fewer than three tokens are left to predict.
    """

    mask_token_id: int
    kept_token_ids: tuple[int, ...]
    num_tokens: int
    frame: tuple[int, int] | None
    max_length: int
    shift: bool

    def __post_init__(self):
        if self.mask_token_id in (self.frame or ()):
            raise ValueError(f"frame={self.frame} holds the mask, which no text holds. Name the ids around a text.")
        left = len(set(range(self.num_tokens)) - {self.mask_token_id, *self.kept_token_ids})
        if left < 3:
            raise ValueError(
                f"num_tokens={self.num_tokens} and {len(self.kept_token_ids)} kept_token_ids leave {left} tokens to "
                "predict. At least 3 are needed."
            )


def check_told(told: dict[str, Any], model: PreTrainedModel, tokenizer: Any) -> None:
    """Look at what a caller or a file says about a model, before anything of it is used.

    Args:
        told: fields of `Adaptation`, and "generation".
        model: that is adapted.
        tokenizer: of the model. None: it is not known.

    Raises:
        ValueError: a value of another type, an id outside the vocabulary, or a tokenizer that is none or has more ids.
    """
    V, name = model.config.vocab_size, type(model).__name__
    if not isinstance(tokenizer, PreTrainedTokenizerBase | None):
        raise ValueError(f"tokenizer is {tokenizer!r:.60}. Give a tokenizer of transformers.")
    if tokenizer is not None and len(tokenizer) > V:
        raise ValueError(
            f"The tokenizer has ids up to {len(tokenizer) - 1}, but {name} embeds {V}. Take the model's "
            "own tokenizer, or call model.resize_token_embeddings(len(tokenizer)) and train the new rows."
        )

    def is_whole(x) -> bool:
        return isinstance(x, int) and not isinstance(x, bool)

    def is_id(x) -> bool:
        return is_whole(x) and 0 <= x < V

    def are_ids(x) -> bool:
        return isinstance(x, (list, tuple, set, frozenset)) and all(map(is_id, x))

    # What each field must be, and in which words a wrong one is refused.
    ids = f"from 0 to {V - 1}"
    rules = {
        "mask_token_id": (is_whole, f"an id {ids}"),
        "kept_token_ids": (are_ids, f"a list of ids {ids}"),
        "num_tokens": (lambda x: is_whole(x) and 1 <= x <= V, f"a whole number from 1 to {V}"),
        "frame": (lambda x: x is None or (are_ids(x) and len(x) == 2), f"two ids {ids}, or nothing"),
        "max_length": (lambda x: is_whole(x) and x >= 3, "a whole number of at least 3"),
        "shift": (lambda x: isinstance(x, bool), "true or false"),
        "generation": (lambda x: isinstance(x, dict), "an object of settings and values"),
    }
    for field, value in told.items():
        fits, needed = rules[field]
        if not fits(value):
            raise ValueError(f"{field}={str(value)[:80]} does not fit this model. Needed is {needed}.")


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
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{where} is damaged ({error}). Copy it again.") from error
    known = {field.name for field in fields(Adaptation)} | {"generation"}
    unknown = set(told) - known if isinstance(told, dict) else {type(told).__name__}
    if unknown:
        raise ValueError(f"{where} holds {sorted(unknown)}. Needed is an object with fields of {sorted(known)}.")
    return told
