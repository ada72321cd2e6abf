"""LoRA: which layers get adapters, and adapters on disk back to a model."""

from __future__ import annotations

import copy
import logging
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from ..extras import need
from ..files import read_json

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig, PeftModel

logger = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
TASK = "FEATURE_EXTRACTION"  # CAUSAL_LM asks for methods that no diffusion model has

# Patterns that match the whole name of a module. Plain names would not do: "mlp.0" is also part of the time embedding
# (sigma_map), which, like the adaLN modulation, stays as it is: refinement does not change what a time means.
TARGETS = {
    "attention": r".*blocks\.\d+\.(attn_qkv|attn_out)",
    "linear": r".*(blocks\.\d+\.(attn_qkv|attn_out|mlp\.[02])|output_layer\.linear)",
}

BIASES = ("none", "all", "lora_only")  # of peft, which learn beside the adapters


def lora_config(targets: str = "attention", r: int = 8, alpha: int = 16, **options: Any) -> LoraConfig:
    """A peft configuration for MDLM, DUO and adapted models.

    Args:
        targets: "attention" (projections of every block) or "linear" (also the MLPs and the vocabulary head: every
            linear layer but the time embedding and the adaLN modulation).
        r: rank of the adapters.
        alpha: their scale is alpha / r.
        options: any other field of peft's `LoraConfig` (use_dora, use_rslora, rank_pattern, lora_dropout, ...).

    Raises:
        ValueError: unknown targets or option, a rank, scale or dropout that is none.
        ImportError: peft is not installed.
    """
    need("peft", "peft", "LoRA")
    from peft import LoraConfig

    if not isinstance(targets, str) or targets not in TARGETS:
        raise ValueError(
            f"targets={targets!r} is not known; choose one of {', '.join(map(repr, TARGETS))}. The names of layers go "
            "into target_modules."
        )
    fields = {"task_type": TASK, "target_modules": TARGETS[targets]}
    _check_numbers(r, alpha, options.get("lora_dropout", 0.0))
    if options.get("bias", "none") not in BIASES:
        raise ValueError(f"bias={options['bias']!r} is not known; choose one of {', '.join(map(repr, BIASES))}.")
    try:
        return LoraConfig(r=r, lora_alpha=alpha, **fields | options)
    except TypeError as error:
        raise ValueError(f"{error}. LoRA takes targets, r, alpha and the fields of peft's LoraConfig.") from error


def _check_numbers(r: int, alpha: float, dropout: float) -> None:
    """Raise ValueError for what peft only meets while it makes the adapters, or never."""
    numbers = {"r": r, "alpha": alpha, "lora_dropout": dropout}
    for name, value in numbers.items():
        if not isinstance(value, int if name == "r" else int | float) or isinstance(value, bool):
            raise ValueError(f"{name} must be a{' whole' if name == 'r' else ''} number, but it is {value!r}.")
    if r < 1:
        raise ValueError(f"r={r}: the rank of adapters is at least 1.")
    if not 0 < alpha < math.inf:
        raise ValueError(f"alpha={alpha}: it must be above 0, since the scale of adapters is alpha / r.")
    if not 0 <= dropout < 1:
        raise ValueError(f"lora_dropout={dropout}: it is a probability below 1.")


def base_of(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The model inside peft's wrapper, or the model itself where there is none."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def add_adapters(model: PreTrainedModel, peft_config: PeftConfig) -> PeftModel:
    """`model` in new adapters, whose configuration names it for good: hub id and commit, or an absolute path.

    Raises:
        ValueError: no configuration of peft or one that it cannot use, or the adapters reach a head that shares the
            embedding's weights.
        ImportError: peft is not installed.
    """
    need("peft", "peft", "A peft_config")
    from peft import PeftConfig, get_peft_model

    if not isinstance(peft_config, PeftConfig):
        raise ValueError(f"peft_config is {str(peft_config)[:60]!r}. Needed is a configuration of peft (LoraConfig).")
    peft_config = copy.deepcopy(peft_config)
    which = {pattern: name for name, pattern in TARGETS.items()}.get(str(peft_config.target_modules))
    if which is not None and hasattr(model, "linear_layers"):  # another family has other names for these layers
        peft_config.target_modules = set(model.linear_layers(which))
    revision = peft_config.revision or getattr(model.config, "_commit_hash", None)
    try:
        wrapped = get_peft_model(model, peft_config, revision=revision)
    except (AttributeError, KeyError, NotImplementedError, TypeError) as error:  # which peft leaves to chance
        raise ValueError(f"peft cannot make these adapters, since a setting of LoRA is wrong: {error}.") from error
    for config in wrapped.peft_config.values():
        name = config.base_model_name_or_path
        if name and Path(name).is_dir():
            config.base_model_name_or_path = os.path.abspath(name)
    set_task_type(wrapped)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head.weight is embedding.weight and (hasattr(head, "base_layer") or hasattr(embedding, "base_layer")):
        raise ValueError(
            f"target_modules reaches the head of {type(model).__name__}, which shares the embedding's weights: merging "
            "would change both. Leave the head out, or use targets: attention or linear, which do."
        )
    return wrapped


def set_task_type(model: PeftModel) -> None:
    """Give adapters without a task the one under which `AutoPeftModelForFeatureExtraction` loads them.

    Without a task peft notes this package as the one to import, and then refuses to import it.
    """
    for config in model.peft_config.values():
        config.task_type = config.task_type or TASK


def hide_local_base(model) -> None:
    """Before a push: an adapter whose base is a directory here says so, without the path."""
    for config in getattr(model, "peft_config", {}).values():
        name = config.base_model_name_or_path
        if name and Path(name).is_dir():
            config.base_model_name_or_path = f"a local directory, {Path(name).name}"
            logger.warning(
                "The base of these adapters is the local directory %s: push it as well, and put its repository into "
                "%s, so that others can load them.",
                name,
                ADAPTER_CONFIG,
            )


def is_adapter(name: str | os.PathLike) -> bool:
    """Whether a directory holds adapters rather than a whole model."""
    return Path(name, ADAPTER_CONFIG).is_file()


def adapter_base(folder: str | os.PathLike) -> tuple[str, str | None]:
    """The base model of the adapters in a directory: a path or hub id, and the revision.

    Raises:
        ValueError: adapter_config.json is damaged, or it names no base, or one that leads back to these adapters.
    """
    path, seen, named = Path(folder), [], None
    while path.resolve() not in seen:
        seen.append(path.resolve())
        fields = read_json(path / ADAPTER_CONFIG)
        found = tuple(fields.get(name) for name in ("base_model_name_or_path", "revision"))
        if not isinstance(found[0], str) or not found[0] or not isinstance(found[1], str | None):
            raise ValueError(
                f"{path / ADAPTER_CONFIG} has {str(found[0])[:60]!r} as its base model and {str(found[1])[:60]!r} as "
                "its revision. Put a path or hub id into base_model_name_or_path, and text or null into revision."
            )
        named = named or found
        if not is_adapter(found[0]):
            return named
        path = Path(found[0])
    raise ValueError(
        f"The adapters in {folder} have themselves as their base. Put the path or hub id of the model that they refine "
        f"into base_model_name_or_path of {ADAPTER_CONFIG}."
    )


def merge_adapter(base: PreTrainedModel, folder: str | os.PathLike) -> PreTrainedModel:
    """`base` with the adapters in a directory merged into its weights, all of which can be trained.

    Raises:
        ValueError: the weights of the adapters are missing, or do not fit the model.
    """
    from peft import PeftModel

    # With it older versions of peft import whatever module the file names as megatron_core.
    fields = read_json(Path(folder, ADAPTER_CONFIG))
    if fields.get("megatron_config"):
        raise ValueError(f"{Path(folder, ADAPTER_CONFIG)} asks for Megatron layers, which these models do not have.")
    if isinstance(fields.get("lora_alpha"), float) and not math.isfinite(fields["lora_alpha"]):
        raise ValueError(f"{Path(folder, ADAPTER_CONFIG)} has lora_alpha={fields['lora_alpha']}: no weight survives.")
    if not any(Path(folder, name).is_file() for name in ADAPTER_WEIGHTS):  # peft would ask the hub for them
        raise ValueError(f"The folder {folder} lacks {ADAPTER_WEIGHTS[0]}, the weights of the adapters. Copy it again.")
    try:
        return PeftModel.from_pretrained(base, str(folder)).merge_and_unload().requires_grad_(True)
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # whatever a library meets in files of another shape
        raise ValueError(f"The adapters in {folder} do not fit {type(base).__name__} ({error}).") from error
