"""A recipe: one YAML file that says what to refine, on what, how, and how to evaluate it."""

from __future__ import annotations

import difflib
import typing
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from ..evaluation.sampling import Sampling, option
from .fields import is_of, read_as, type_name


@dataclass
class Recipe:
    """The fields of a recipe that are not fields of `DriftConfig`. Paths are relative to the recipe file."""

    model: str = field(metadata={"help": "Checkpoint to refine: a directory or a hub id."})
    revision: str | None = field(default=None, metadata={"help": "Revision of a hub checkpoint."})
    tokenizer: str | None = field(default=None, metadata={"help": "Tokenizer, if it is not beside the model."})
    attn_implementation: str = field(default="sdpa", metadata={"help": "sdpa, eager, flash_attention_2, ..."})
    dropout: float | None = field(default=None, metadata={"help": "Dropout while training; default: the model's own."})

    dataset: str = field(
        default="documentation",
        metadata={"help": "documentation, openwebtext, a text/jsonl/parquet file or directory, or a hub data set."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a hub data set."})
    dataset_revision: str | None = field(default=None, metadata={"help": "Revision of a hub data set."})
    text_column: str = field(default="text", metadata={"help": "Column that holds the text."})
    prompt_column: str | None = field(
        default=None, metadata={"help": "Column with prompts, for which text_column holds the completions."}
    )
    train_split: str = field(default="train", metadata={"help": "Split to train on."})
    validation_split: str | None = field(default=None, metadata={"help": "Split for eval_loss (the NELBO)."})
    reference_split: str | None = field(default=None, metadata={"help": "Split of real text: the table's end point."})
    block_size: int | None = field(default=None, metadata={"help": "Tokens in a row; default: the model's length."})
    wrap: bool = field(
        default=True, metadata={"help": "Documents flow on from row to row; false: a document a row, cut or padded."}
    )
    insert_eos: bool = field(default=True, metadata={"help": "End every document with eos before wrapping."})
    streaming: bool = field(default=False, metadata={"help": "Read the training text as it is needed."})

    global_batch_size: int | None = field(
        default=None,
        metadata={"help": "Rows an optimizer step, over all devices; gradient accumulation is worked out from it."},
    )
    encoder: str | None = field(
        default=None, metadata={"help": "Frozen encoder; default: a copy of the model; base: the model under LoRA."}
    )
    lora: dict | None = field(
        default=None,
        metadata={"help": "Train adapters: {targets: attention or linear, r, alpha, and fields of peft's LoraConfig}."},
    )
    full_refinement: dict | None = field(
        default=None,
        metadata={"help": "With lora: also refine all weights; the value holds fields that differ, or is {}."},
    )
    continuation: bool = field(default=False, metadata={"help": "Also train the matched continuation baseline."})

    judge: str | None = field(default=None, metadata={"help": "Model that scores samples; null: no evaluation."})
    match_entropy: bool = field(
        default=True,
        metadata={"help": "Add the base model at the temperature that gives the refined model's entropy."},
    )
    sampling: Sampling = field(default_factory=Sampling)  # whose fields a recipe has beside these

    def __post_init__(self):
        if self.global_batch_size is not None and self.global_batch_size < 1:
            raise ValueError(f"global_batch_size={self.global_batch_size}: it must be at least 1.")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout}: it is a probability below 1.")
        if self.streaming and (self.prompt_column or self.validation_split or self.reference_split):
            raise ValueError(
                "streaming: true reads training text only: leave out prompt_column, validation_split, reference_split."
            )
        if self.judge is not None and self.match_entropy and 1 not in self.sampling.temperatures:
            raise ValueError(
                f"match_entropy compares with the refined model at temperature 1, but sampling_temperatures are "
                f"{self.sampling.temperatures}. Add 1 to them, or set match_entropy: false."
            )
        if self.reference_split is not None and self.sampling.num_samples < 2:
            raise ValueError("num_samples=1: the line of real text has as many rows, and its NELBO needs at least 2.")
        if self.block_size is not None and self.block_size < 4:
            raise ValueError(f"block_size={self.block_size}: a row needs at least 4 tokens.")


def read_recipe(path: Path, overrides: dict[str, str]) -> tuple[Recipe, dict[str, Any]]:
    """The recipe in a YAML file and the `DriftConfig` arguments beside it, with `overrides` from the command line.

    Raises:
        ValueError: no such file, no mapping in it, a field that is unknown or of the wrong type.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise ValueError(f"There is no recipe {path}. Give a YAML file, e.g. recipes/quickstart.yaml.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold fields, one 'name: value' a line; found {type(values).__name__}.")
    try:
        values |= {name: yaml.safe_load(value) for name, value in overrides.items()}
    except yaml.YAMLError as error:
        raise ValueError(f"A flag is not valid YAML: {error}") from error

    from ..training.drift_config import DriftConfig

    # Where a field belongs: its class, its name in it, its type.
    homes = {}
    for cls in (DriftConfig, Sampling, Recipe):
        kinds = typing.get_type_hints(cls)
        homes |= {option(f): (cls, f.name, kinds[f.name]) for f in fields(cls) if f.init and f.type != "Sampling"}
    values_of: dict[type, dict[str, Any]] = {DriftConfig: {}, Sampling: {}, Recipe: {}}
    for name, value in values.items():
        if name not in homes:
            close = difflib.get_close_matches(name, homes, n=3)
            raise ValueError(
                f"{path}: there is no field {name!r}."
                + (f" Did you mean {' or '.join(close)}?" if close else "")
                + " tokendrift train --help lists them."
            )
        cls, own_name, kind = homes[name]
        values_of[cls][own_name] = value = read_as(value, kind, overrides.get(name))
        if not is_of(value, kind):
            raise ValueError(f"{path}: {name} must be {type_name(kind)}, but it is {value!r}.")
    if "model" not in values:
        raise ValueError(f"{path}: the field model is missing: which checkpoint is to be refined?")
    recipe = Recipe(**values_of[Recipe], sampling=Sampling(**values_of[Sampling]))
    for name in ("model", "tokenizer", "dataset", "encoder", "judge"):
        value = getattr(recipe, name)
        if (name, value) != ("encoder", "base") and value is not None and (path.parent / value).exists():
            setattr(recipe, name, str(path.parent / value))
    return recipe, values_of[DriftConfig]
