"""The plan of a run: which trainings a recipe asks for, and their settings on this many devices."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from ..models.lora import lora_config
from ..training.drift_config import DriftConfig
from .recipe import Recipe

if TYPE_CHECKING:
    from peft import LoraConfig

BASE, CONTINUATION, REFINED, LORA = "base", "continuation", "TokenDrift", "TokenDrift (LoRA)"
FOLDERS = {CONTINUATION: "continuation", REFINED: "refined", LORA: "refined"}


@dataclass(frozen=True)
class Training:
    """One training of a run.

    Attributes:
        label: its line in the table.
        config: its arguments; `output_dir` is its folder.
        peft_config: the adapters to train; None: all weights.
    """

    label: str
    config: DriftConfig
    peft_config: LoraConfig | None

    @property
    def folder(self) -> Path:
        """Where the training leaves its checkpoints and its model."""
        return Path(self.config.output_dir)


def trainings(recipe: Recipe, arguments: dict, folder: Path) -> list[Training]:
    """The trainings of a recipe; the first is the one that it is about.

    Args:
        recipe: asks for a matched continuation (`continuation`) and, with `lora`, for the same refinement of all
            weights (`full_refinement`).
        arguments: fields of `DriftConfig`.
        folder: where each training gets a folder of its own.

    Raises:
        ValueError: wrong arguments; comparisons that make no sense; a global batch that the devices cannot share out; a
            push without the name of a repository.
    """
    arguments = accumulated(arguments, recipe.global_batch_size)
    continued = arguments.get("objective") == "none"
    if continued and recipe.continuation:
        raise ValueError(
            "continuation: true beside objective: none would do the same training twice. Drop one of them."
        )
    if recipe.full_refinement is not None and recipe.lora is None:
        raise ValueError("full_refinement compares with lora, but the recipe has no lora: the run refines all weights.")
    unknown = set(recipe.full_refinement or ()) - {f.name for f in fields(DriftConfig)}
    if unknown:
        raise ValueError(f"full_refinement has {sorted(unknown)}, which are no fields of DriftConfig.")
    if arguments.get("push_to_hub") and not arguments.get("hub_model_id"):
        raise ValueError("push_to_hub needs the name of the repository: hub_model_id, such as me/mdlm-tokendrift.")

    def training(label: str, folder: Path, lora: dict | None, **changes) -> Training:
        config = DriftConfig(**arguments | changes | {"output_dir": str(folder)})
        return Training(label, config, None if lora is None else lora_config(**lora))

    label = CONTINUATION if continued else REFINED if recipe.lora is None else LORA
    planned = [training(label, folder / FOLDERS[label], recipe.lora)]
    if recipe.full_refinement is not None:
        changes = recipe.full_refinement | {"push_to_hub": False}
        planned.append(training(REFINED, folder / "refined_full", None, **changes))
    if recipe.continuation:
        changes = {"objective": "none", "base_loss_weight": 1.0, "push_to_hub": False}
        planned.append(training(CONTINUATION, folder / FOLDERS[CONTINUATION], recipe.lora, **changes))
    return planned


def accumulated(arguments: dict, global_batch_size: int | None) -> dict:
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
