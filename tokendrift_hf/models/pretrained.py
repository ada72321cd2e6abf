"""Models of other families by name: the right class, every weight in its place, then adapted."""

from __future__ import annotations

from typing import Any

from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .adapter import as_diffusion
from .families import is_decoder, is_masked_language_model, refuse_kind
from .remote import REPAIRS, load_remote, load_remote_config

A2D = "a2d-"  # dllm's prefix of a model type: the decoder of that name, trained to see both sides
HEADS_FIRST = ("AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModel")


def is_a2d(config: dict) -> bool:
    """Whether a config.json is that of a decoder that was made bidirectional by dllm (tiny-A2D)."""
    model_type = str(config.get("model_type"))
    return model_type.startswith(A2D) and is_decoder(model_type.removeprefix(A2D))


def check_family(name: str, config: dict, trust_remote_code: bool) -> None:
    """That a model is of another family that is known, by its config.json alone.

    Args:
        name: a directory or a hub id.
        config: the content of its config.json.
        trust_remote_code: whether code that lies beside the model may be run.

    Raises:
        ValueError: it predicts no masked tokens, is of a family that nobody has looked at, or has code that is not
            trusted.
    """
    model_type = config.get("model_type")
    refuse_kind(name, model_type, bool(config.get("is_encoder_decoder")))
    if is_a2d(config) or is_masked_language_model(model_type) or is_decoder(model_type):
        return
    if _head_of(config) is None:
        raise ValueError(
            f"{name} is a model of type {model_type!r}, which predicts no masked tokens. Known are MDLM and DUO, the "
            f"masked language models of transformers, decoders with config.is_causal = False, and {', '.join(REPAIRS)}."
        )
    if model_type not in REPAIRS:
        raise ValueError(
            f"{name} comes with code of its own, for model type {model_type!r}, that is not known here. Known are "
            f"{', '.join(REPAIRS)}."
        )
    if not trust_remote_code:
        raise ValueError(
            f"{name} (model type {model_type!r}) comes with code of its own, which is not run unasked. Read it, then "
            "set trust_remote_code: true (--trust-remote-code)."
        )


def load_adapted(
    name: str,
    config: dict,
    *,
    told: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_length: int | None = None,
    dropout: float | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """A model of another family as a diffusion model.

    Args:
        name: a directory or a hub id.
        config: the content of its config.json, which `check_family` let through.
        told: arguments of `as_diffusion`, which come before what `diffusion.json` says.
        tokenizer: the model's. None: `diffusion.json` says what the tokenizer would.
        max_length: the longest sequence. The default is the model's own limit.
        trust_remote_code: whether code that lies beside the model may be run.
        dropout: replaces every dropout in the model's configuration.
        kwargs: go to `from_pretrained`.

    Raises:
        ValueError: weights that are missing, or what `as_diffusion` refuses.
    """
    if kwargs.get("attn_implementation") == "sdpa":
        del kwargs["attn_implementation"]  # transformers takes it by itself, where the model has it
    revision = kwargs.get("revision")
    native = _native(name, config, revision)
    if native is not None:
        auto_class, found = native
        _set_dropout(found, dropout)
        model, info = auto_class.from_pretrained(name, config=found, output_loading_info=True, **kwargs)
    else:
        reference = _head_of(config)
        found = load_remote_config(name, revision)
        _set_dropout(found, dropout)
        model, info = load_remote(name, reference, found, **kwargs)
    missing = sorted(info["missing_keys"]) + sorted(str(key) for key, *_ in info["mismatched_keys"])
    if missing:
        raise ValueError(
            f"The weights in {name!r} lack {len(missing)} of {type(model).__name__}'s tensors: "
            f"{', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}. A checkpoint of the body alone has no "
            "vocabulary head, so it predicts no tokens: take one that was saved with its head."
        )
    return as_diffusion(model, tokenizer=tokenizer, **told | ({} if max_length is None else {"max_length": max_length}))


def _native(name: str, config: dict, revision: str | None) -> tuple[type, PreTrainedConfig] | None:
    """The auto class that loads a model of transformers, and its configuration. None: it has no such model."""
    model_type = config.get("model_type")
    if is_a2d(config):
        model_type = model_type.removeprefix(A2D)
        fields = {key: value for key, value in config.items() if key not in ("model_type", "architectures", "auto_map")}
        found = CONFIG_MAPPING[model_type].from_dict(fields)
        found.is_causal = False
        return AutoModelForCausalLM, found
    if not (is_masked_language_model(model_type) or is_decoder(model_type)):
        return None
    auto_class = AutoModelForMaskedLM if is_masked_language_model(model_type) else AutoModelForCausalLM
    return auto_class, AutoConfig.from_pretrained(name, revision=revision)


def _head_of(config: dict) -> str | None:
    """The entry of `auto_map` for the model with its head, if its code lies beside it."""
    classes = config.get("auto_map") or {}
    return next((classes[auto] for auto in HEADS_FIRST if auto in classes), None)


def _set_dropout(config: PreTrainedConfig, dropout: float | None) -> None:
    for field, value in config.to_dict().items() if dropout is not None else ():
        if "dropout" in field and isinstance(value, float):
            setattr(config, field, dropout)
