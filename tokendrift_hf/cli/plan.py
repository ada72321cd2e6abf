"""The plan of a run: its trainings, and their settings on this many devices."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..evaluation.grid import check_label
from ..models.lora import lora_config
from ..objective.drift_objective import DriftObjective
from ..objective.objectives import OBJECTIVES, name_of
from ..training.drift_config import DriftConfig
from .recipe import Recipe

if TYPE_CHECKING:
    from peft import LoraConfig

BASE, ALL = "base", "all"  # what no training may be called
MAIN_FOLDER = "refined"
FILES = ("cells", "results.json", "table.md", "plot.png")  # that a run has beside its trainings
# What is one training's alone to say: where it lies and what is published follows from its place in the run.
OF_THE_RUN = ("output_dir", "push_to_hub", "hub_model_id", "hub_token", "use_cpu")

DRIFT_FIELDS = ("drift_kernel", "temperatures", "attraction", "repulsion", "queue_size", "drift_scale")


@dataclass(frozen=True)
class Training:
    """One training of a run.

    Attributes:
        label: its line in the table.
        recipe: the recipe, with the fields that this training has of its own.
        config: its arguments. `output_dir` is its folder.
        peft_config: the adapters to train. None: all weights are trained.
    """

    label: str
    recipe: Recipe
    config: DriftConfig
    peft_config: LoraConfig | None

    @property
    def folder(self) -> Path:
        """Where the training leaves its checkpoints and its model."""
        return Path(self.config.output_dir)

    @property
    def global_batch(self) -> int:
        """Rows of an optimizer step, on all devices."""
        return self.config.train_batch_size * self.config.gradient_accumulation_steps * self.config.world_size


def plan_trainings(recipe: Recipe, arguments: dict, folder: Path) -> list[Training]:
    """The trainings of a recipe. The first is the one that it is about.

    Args:
        recipe: with `trainings`, or without for the one that its other fields describe.
        arguments: fields of `DriftConfig` that all trainings share, but for those that differ.
        folder: where each training gets a folder of its own.

    Raises:
        ValueError: wrong arguments, labels or fields that a training cannot have, a global batch that the devices
            cannot share out, or a push without the name of a repository.
    """
    if arguments.get("push_to_hub") and not arguments.get("hub_model_id"):
        raise ValueError("push_to_hub needs the name of the repository: hub_model_id, such as me/mdlm-tokendrift.")
    asked = recipe.trainings or {_default_label(recipe, arguments): {}}
    places = dict(zip(asked, [MAIN_FOLDER, *map(_folder_name, list(asked)[1:])], strict=True))
    planned = []
    for label, changes in asked.items():
        _check(label, changes, places)
        own = {f.name for f in fields(Recipe)} & changes.keys()
        variant = replace(recipe, trainings=None, **{name: changes[name] for name in own})
        settings = arguments | {name: value for name, value in changes.items() if name not in own}
        if settings.get("resume_from_checkpoint") is not None:
            raise ValueError(
                f"resume_from_checkpoint={settings['resume_from_checkpoint']!r} does nothing here: --resume goes on "
                "with the run in output_dir, from its newest complete checkpoint. Leave the field out."
            )
        if planned:
            settings["push_to_hub"] = False
        settings = _accumulated(settings, variant.global_batch_size)
        try:
            config = DriftConfig(**settings | {"output_dir": str(folder / places[label])})
        except ValueError as error:
            raise ValueError(f"training {label!r}: {error}" if recipe.trainings else str(error)) from error
        unused = [name for name in DRIFT_FIELDS if name in changes]  # beside trainings they may be meant for others
        if unused and OBJECTIVES.get(config.objective) is not DriftObjective:
            raise ValueError(
                f"training {label!r}: objective={config.objective!r} has no drift field, so its {unused[0]} would do "
                "nothing: leave it out."
            )
        if variant.encoder == "base" and variant.lora is None:
            raise ValueError(
                f"training {label!r}: encoder: base is the model with its adapters off, but there is no lora. Leave "
                "encoder out: the default is a copy of the model."
            )
        planned.append(Training(label, variant, config, None if variant.lora is None else lora_config(**variant.lora)))
    return planned


def labels_to_match(recipe: Recipe, trainings: Sequence[Training]) -> list[str]:
    """The labels of the trainings whose entropy the base is also sampled at."""
    if recipe.match_entropy is None:
        return [trainings[0].label]
    return [training.label for training in trainings] if recipe.match_entropy == [ALL] else recipe.match_entropy


def _default_label(recipe: Recipe, arguments: dict) -> str:
    asked = (arguments.get(name, getattr(DriftConfig, name)) for name in ("objective", "mmd_credit"))
    return name_of(*asked) + ("" if recipe.lora is None else " (LoRA)")


def _folder_name(label: str) -> str:
    return re.sub(r"[^\w.+-]+", "_", label).strip("._")


def _check(label: str, changes: dict, places: dict[str, str]) -> None:
    check_label(label)
    if label in (BASE, ALL) or not places[label]:
        raise ValueError(f"A training cannot be called {label!r}. Take a label of letters and digits of its own.")
    taken = [*FILES, *list(places.values())[: list(places).index(label)]]
    if places[label].lower() in map(str.lower, taken):
        raise ValueError(f"The training {label!r} would lie in {places[label]}, where something else lies. Rename it.")
    if forbidden := sorted(changes.keys() & set(OF_THE_RUN)):
        raise ValueError(f"training {label!r}: {forbidden[0]} is a matter of the whole run. Give it beside trainings.")


def _accumulated(arguments: dict, global_batch_size: int | None) -> dict:
    """`arguments` with the gradient accumulation that makes the global batch on the devices of this launch.

    Raises:
        ValueError: both are given, or the global batch is no multiple of what the devices take at a time.
    """
    if global_batch_size is None:
        return arguments
    if "gradient_accumulation_steps" in arguments:
        raise ValueError(
            "global_batch_size and gradient_accumulation_steps are two ways to say one thing. Give one of them."
        )
    config = DriftConfig(**arguments)  # knows the devices
    at_once = config.train_batch_size * config.world_size
    if global_batch_size % at_once:
        raise ValueError(
            f"global_batch_size={global_batch_size} is not a multiple of {at_once} = {config.train_batch_size} rows a "
            f"device x {config.world_size} processes. Change per_device_train_batch_size or the number of processes."
        )
    return arguments | {"gradient_accumulation_steps": global_batch_size // at_once}
