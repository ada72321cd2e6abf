"""A recipe: one YAML file that says what to refine, on what, how, and how to evaluate it."""

from __future__ import annotations

import difflib
import functools
import typing
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..evaluation.sampling import Sampling, option
from ..extras import need
from .fields import is_of, read_as, read_yaml, type_name

AUTO = "auto"
# Fields of earlier versions, and what to write instead.
FORMER = {
    "continuation": "trainings: {TokenDrift: {}, continuation: {objective: none, base_loss_weight: 1}}",
    "full_refinement": "trainings: {TokenDrift (LoRA): {lora: {r: 8}}, TokenDrift: {learning_rate: 5e-5}}",
}


@dataclass
class Recipe:
    """The fields of a recipe that are not fields of `DriftConfig`.

    Paths are relative to the recipe file, those of flags to the working directory.

    The metadata of a field says whether it `decides_weights` that a training gives, and whether it may be given to one
    training alone (`of_training`).

    Raises:
        ValueError: values that make no sense, alone or together.
    """

    model: str = field(
        metadata={"decides_weights": True, "help": "Checkpoint to refine: a directory or a hub id."},
    )
    revision: str | None = field(
        default=None, metadata={"decides_weights": True, "help": "Revision of a hub checkpoint."}
    )
    tokenizer: str | None = field(default=None, metadata={"help": "Tokenizer, if it is not beside the model."})
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run the code that lies beside the model (LLaDA, Dream). Read it first."}
    )
    model_dtype: str = field(
        default="float32",
        metadata={
            "decides_weights": True,
            "help": "Number format of the model's weights: float32, or bfloat16 where LoRA leaves them as they are.",
        },
    )
    attn_implementation: str = field(default="sdpa", metadata={"help": "sdpa, eager, flash_attention_2, ..."})
    dropout: float | None = field(
        default=None,
        metadata={
            "decides_weights": True,
            "of_training": True,
            "help": "Dropout while training; default: the model's own.",
        },
    )

    dataset: str = field(
        default="documentation",
        metadata={
            "decides_weights": True,
            "help": "documentation, openwebtext, a text/jsonl/parquet file or directory, or a hub data set.",
        },
    )
    dataset_config: str | None = field(
        default=None, metadata={"decides_weights": True, "help": "Configuration of a hub data set."}
    )
    dataset_revision: str | None = field(
        default=None, metadata={"decides_weights": True, "help": "Revision of a hub data set."}
    )
    text_column: str = field(default="text", metadata={"decides_weights": True, "help": "Column that holds the text."})
    prompt_column: str | None = field(
        default=None,
        metadata={
            "decides_weights": True,
            "help": "Column with prompts, for which text_column holds the completions.",
        },
    )
    fill_eos: bool = field(
        default=True,
        metadata={
            "decides_weights": True,
            "help": "Fill rows of prompts with eos up to block_size, so that the model learns where a completion ends.",
        },
    )
    train_split: str = field(default="train", metadata={"decides_weights": True, "help": "Split to train on."})
    validation_split: str | None = field(default=None, metadata={"help": "Split for eval_loss (the NELBO)."})
    reference_split: str | None = field(default=None, metadata={"help": "Split of real text: the table's end point."})
    block_size: int | None = field(
        default=None, metadata={"decides_weights": True, "help": "Tokens in a row; default: the model's length."}
    )
    wrap: bool = field(
        default=True,
        metadata={
            "decides_weights": True,
            "help": "Documents flow on from row to row; false: a document a row, cut or padded.",
        },
    )
    insert_eos: bool = field(
        default=True, metadata={"decides_weights": True, "help": "End every document with eos before wrapping."}
    )
    streaming: bool = field(
        default=False, metadata={"decides_weights": True, "help": "Read the training text as it is needed."}
    )

    global_batch_size: int | None = field(
        default=None,
        metadata={
            "of_training": True,
            "help": "Rows an optimizer step, over all devices; gradient accumulation is worked out from it.",
        },
    )
    encoder: str | None = field(
        default=None,
        metadata={
            "decides_weights": True,
            "of_training": True,
            "help": "Frozen encoder; default: a copy of the model; base: the model under LoRA.",
        },
    )
    lora: dict | None = field(
        default=None,
        metadata={
            "decides_weights": True,
            "of_training": True,
            "help": "Train adapters: {targets: attention or linear, r, alpha, and fields of peft's LoraConfig}.",
        },
    )
    trainings: dict[str, dict] | None = field(
        default=None,
        metadata={
            "help": "Label: the fields that differ, for every training of the run, such as {TokenDrift: {}, "
            "continuation: {objective: none, base_loss_weight: 1}}. They are fields of DriftConfig, or lora, "
            "encoder, dropout, global_batch_size. The first training is what the run is about. Default: one with the "
            "recipe's own fields."
        },
    )

    tasks: list[str] | None = field(
        default=None,
        metadata={"help": "Tasks of lm-evaluation-harness for every model, at every num_steps (extra: tasks)."},
    )
    task_limit: int | None = field(default=None, metadata={"help": "Documents of each task; default: all."})
    task_shots: int | None = field(default=None, metadata={"help": "Examples in each prompt; default: the task's."})
    task_folder: str | None = field(default=None, metadata={"help": "Folder with tasks of your own."})
    judge: str | None = field(default=None, metadata={"help": "Model that scores samples; null: no evaluation."})
    match_entropy: list[str] | None = field(
        default=None,
        metadata={
            "help": "Labels of trainings: also show the base at their entropy, from as few temperatures as it takes. "
            "Default: the first; [all]: all of them; []: none."
        },
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
        if self.judge is not None:
            self.sampling.check_steps()
        if self.judge is not None and self.match_entropy != [] and 1 not in self.sampling.temperatures:
            raise ValueError(
                f"match_entropy compares with the refined model at temperature 1, but sampling_temperatures are "
                f"{self.sampling.temperatures}. Add 1 to them, or set match_entropy: []."
            )
        if self.model_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"model_dtype={self.model_dtype!r} is not known. Write float32 or bfloat16.")
        without = [None, *(self.trainings or {}).values()] if self.lora is None else []
        if self.model_dtype != "float32" and any((changes or {}).get("lora") is None for changes in without):
            raise ValueError(
                f"model_dtype={self.model_dtype} rounds away small updates of the weights. Keep float32 (bf16: true "
                "computes in bfloat16 all the same), or train adapters (lora)."
            )
        if self.task_limit is not None and self.task_limit < 1:
            raise ValueError(f"task_limit={self.task_limit}: it must be at least 1.")
        if self.task_shots is not None and self.task_shots < 0:
            raise ValueError(f"task_shots={self.task_shots}: it must be at least 0.")
        if self.tasks:
            need("lm_eval", "tasks", "The field tasks")
        if self.block_size is not None and self.block_size < 4:
            raise ValueError(f"block_size={self.block_size}: a row needs at least 4 tokens.")
        if self.trainings is not None and not self.trainings:
            raise ValueError("trainings has no training. Give at least one, or leave the field out.")


def read_recipe(path: Path, overrides: dict[str, str]) -> tuple[Recipe, dict[str, Any]]:
    """The recipe in a YAML file and the `DriftConfig` arguments beside it, with `overrides` from the command line.

    Raises:
        ValueError: no such file, no mapping in it, a field that is unknown or of the wrong type.
    """
    try:
        values = read_yaml(path.read_text(encoding="utf-8"), str(path))
    except (FileNotFoundError, IsADirectoryError):
        raise ValueError(f"There is no recipe {path}. Give a YAML file, e.g. recipes/quickstart.yaml.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold fields, one 'name: value' a line; found {type(values).__name__}.")
    values |= {name: read_yaml(value, f"--{name}") for name, value in overrides.items()}
    known = _known_fields()
    values = _read_fields(values, known, str(path), overrides)
    of_training = {name: place for name, place in known.items() if place.of_training}
    for label, changes in (values.get("trainings") or {}).items():
        if not isinstance(label, str) or not isinstance(changes, dict):
            raise ValueError(f"{path}: trainings has {label!r}: {changes!r}. Write 'label: {{field: value}}'.")
        if "trainings" not in overrides:  # a flag wins over what the file says of one training, too
            changes = {name: value for name, value in changes.items() if name not in overrides}
        values["trainings"][label] = _read_fields(changes, of_training, f"{path}, training {label!r}")
    if "model" not in values:
        raise ValueError(f"{path}: the field model is missing: which checkpoint is to be refined?")
    values_of: dict[type | None, dict[str, Any]] = {Recipe: {}, Sampling: {}, None: {}}
    for name, value in values.items():
        values_of[known[name].cls][known[name].name] = value
    recipe = Recipe(**values_of[Recipe], sampling=Sampling(**values_of[Sampling]))
    for name in ("model", "tokenizer", "dataset", "encoder", "judge", "task_folder"):
        folder = Path() if name in overrides else path.parent  # a flag says where something lies from here
        setattr(recipe, name, _located(name, getattr(recipe, name), folder))
    for changes in (recipe.trainings or {}).values():
        if "encoder" in changes:
            folder = Path() if "trainings" in overrides else path.parent
            changes["encoder"] = _located("encoder", changes["encoder"], folder)
    return recipe, values_of[None]


RESERVED = {"encoder": ("base",), "dataset": ("documentation", "openwebtext")}  # what names no path


def _located(name: str, value: str | None, folder: Path) -> str | None:
    """The path of something that lies in this folder. A hub id and the like stay what they are."""
    if value is None or value in RESERVED.get(name, ()):
        return value
    try:
        path = folder / Path(value).expanduser()
        found = str(path) if path.exists() else value
        return f"./{found}" if found in RESERVED.get(name, ()) else found  # as ./documentation, which is a path
    except (OSError, RuntimeError):  # no name of a file at all, or of no user
        return value


@dataclass(frozen=True)
class _Place:
    """Where a field of a recipe belongs: its class (None: DriftConfig), its name in it, its type."""

    cls: type | None
    name: str
    kind: Any
    of_training: bool


@functools.cache
def _known_fields() -> dict[str, _Place]:
    from ..training.drift_config import DriftConfig

    known = {}
    for cls in (DriftConfig, Sampling, Recipe):
        kinds = typing.get_type_hints(cls)
        for f in fields(cls):
            if f.init and kinds[f.name] is not Sampling:
                own = None if cls is DriftConfig else cls
                known[option(f)] = _Place(own, f.name, kinds[f.name], own is None or "of_training" in f.metadata)
    known["bf16"] = replace(known["bf16"], kind=bool | typing.Literal[AUTO])  # settled before DriftConfig is made
    return known


def _read_fields(
    values: dict, known: dict[str, _Place], where: str, words: dict[str, str] | None = None
) -> dict[str, Any]:
    """Values from YAML, each read as the type of its field. `words` is what the user typed on the command line."""
    read = {}
    for name, value in values.items():
        if name in FORMER:
            raise ValueError(f"{where}: {name} is no field any more. Write instead: {FORMER[name]}")
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=3)
            raise ValueError(
                f"{where}: there is no field {name!r}{'' if known is _known_fields() else ' of one training'}."
                + (f" Did you mean {' or '.join(close)}?" if close else "")
                + " tokendrift train --help lists them."
            )
        kind = known[name].kind
        read[name] = read_as(value, kind, (words or {}).get(name))
        if not is_of(read[name], kind):
            raise ValueError(f"{where}: {name} must be {type_name(kind)}, but it is {value!r}.")
    return read
