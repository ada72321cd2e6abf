"""What sets a family of language models apart from a plain masked one, and which families do not fit and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES


def plain_inputs(model: PreTrainedModel, inputs_embeds: Tensor, attention_mask: Tensor | None) -> dict[str, Any]:
    """The arguments of transformers' own models. The mask [B, L] is 1 where a position exists, or None: everywhere."""
    mask = None if attention_mask is None else attention_mask.long()
    options = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    return {"inputs_embeds": inputs_embeds, "attention_mask": mask, **options}


@dataclass(frozen=True)
class Family:
    """How a family differs from a masked language model of transformers. The defaults are one that does not.

    Attributes:
        inputs: (model, rows of the embedding table [B, L, d], attention mask [B, L] or None) -> what the family's
            forward takes.
        shift: whether the logits at position i predict token i + 1.
        prepare: called once with the model, for what its configuration must say.
        mask_token: the text of the mask where the tokenizer has it and does not call it so.
    """

    inputs: Callable[[PreTrainedModel, Tensor, Tensor | None], dict[str, Any]] = plain_inputs
    shift: bool = False
    prepare: Callable[[PreTrainedModel], None] = lambda model: None
    mask_token: str | None = None


def _without_token_dropout(model: PreTrainedModel) -> None:
    """ESM sets the mask's embedding to zero and divides by the share of other tokens, which may be none."""
    model.config.token_dropout = False
    model.base_model.embeddings.token_dropout = False


def _esm_inputs(model: PreTrainedModel, inputs_embeds: Tensor, attention_mask: Tensor | None) -> dict[str, Any]:
    """ESM leaves positions and layer norm out for `inputs_embeds`, so its embedding layer is called here."""
    inputs = plain_inputs(model, inputs_embeds, attention_mask)
    embedded = model.base_model.embeddings(inputs_embeds=inputs_embeds, attention_mask=inputs["attention_mask"])
    return inputs | {"inputs_embeds": embedded}


def _dream_inputs(model: PreTrainedModel, inputs_embeds: Tensor, attention_mask: Tensor | None) -> dict[str, Any]:
    """Dream takes no mask, or a bool one [B, 1, L, L]. Rows of padding see the text too: a row without any is nan."""
    inputs = plain_inputs(model, inputs_embeds, attention_mask)
    if attention_mask is not None:
        length = attention_mask.shape[1]
        inputs["attention_mask"] = attention_mask.bool()[:, None, None, :].expand(-1, 1, length, -1)
    return inputs


FAMILIES = {
    "esm": Family(inputs=_esm_inputs, prepare=_without_token_dropout),
    "llada": Family(mask_token="<|mdm_mask|>"),
    "Dream": Family(inputs=_dream_inputs, shift=True),
}

# model_type -> what is missing.
REFUSED = {
    "diffusion_gemma": (
        "it corrupts a canvas with random tokens (a uniform process, no mask), reads the prompt through an encoder "
        "with a cache and takes no inputs_embeds. Missing here: its canvas, its self-conditioning and its cache"
    ),
    **dict.fromkeys(
        ("llada2_moe", "llada2", "sdar", "sdar_moe", "bd3lm", "fast_dllm", "refusion"),
        "it was trained to write block after block under a block-causal attention mask, with the finished blocks in a "
        "cache. Missing here: that mask in training and the cache in sampling",
    ),
}


def refuse_kind(name: str, model_type: str | None, is_encoder_decoder: bool) -> None:
    """Raise ValueError for a model that no family of masked models is like, with what is missing."""
    if model_type in REFUSED:
        raise ValueError(f"{name} (model type {model_type!r}) cannot be adapted: {REFUSED[model_type]}.")
    if is_encoder_decoder:
        raise ValueError(
            f"{name} (model type {model_type!r}) is an encoder-decoder: it writes from left to right and predicts no "
            "masked position in place. Take a masked language model (AutoModelForMaskedLM)."
        )


def family_of(model: PreTrainedModel) -> Family:
    """What is known about the family of a model.

    Raises:
        ValueError: it does not fit, or it is remote code that nobody has looked at.
    """
    name, model_type = type(model).__name__, model.config.model_type
    refuse_kind(name, model_type, getattr(model.config, "is_encoder_decoder", False))
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    if not type(model).__module__.startswith("transformers."):
        raise ValueError(
            f"{name} (model type {model_type!r}) is no family that is known here. Known are the masked language models "
            f"of transformers, its decoders with config.is_causal = False, and {', '.join(sorted(FAMILIES))}."
        )
    return Family()


def is_masked_language_model(model_type: str) -> bool:
    """Whether transformers has a masked language model of this type, such as BERT."""
    return model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def is_decoder(model_type: str) -> bool:
    """Whether transformers has a causal language model of this type, and no masked one, such as Qwen3."""
    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not is_masked_language_model(model_type)
