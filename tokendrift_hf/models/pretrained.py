"""Models of other families by name: the right class, every weight in its place, then adapted."""

from __future__ import annotations

from typing import Any

from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .adapter import as_diffusion
from .families import is_decoder, is_masked_language_model

A2D = "a2d-"  # dllm's prefix of a model type: the decoder of that name, trained to see both sides
AUTO_CLASSES = {cls.__name__: cls for cls in (AutoModelForMaskedLM, AutoModelForCausalLM, AutoModel)}


def is_a2d(config: dict) -> bool:
    """Whether a config.json is that of a decoder that was made bidirectional by dllm (tiny-A2D)."""
    model_type = str(config.get("model_type"))
    return model_type.startswith(A2D) and is_decoder(model_type.removeprefix(A2D))


def load_adapted(
    name: str,
    config: dict,
    *,
    told: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_length: int | None = None,
    trust_remote_code: bool = False,
    dropout: float | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """A model of another family as a diffusion model.

    Args:
        name: a directory or a hub id.
        config: the content of its config.json.
        told: arguments of `as_diffusion`, which come before what `diffusion.json` says.
        tokenizer: the model's; None: `diffusion.json` says what the tokenizer would.
        max_length: the longest sequence; default: the model's own limit.
        trust_remote_code: whether code that lies beside the model may be run.
        dropout: replaces every dropout in the model's configuration.
        kwargs: go to `from_pretrained`.

    Raises:
        ValueError: an unknown kind of model; remote code that is not trusted; weights that are missing; what
            `as_diffusion` refuses.
    """
    auto_class, found = _configuration(name, config, trust_remote_code, kwargs.get("revision"))
    if dropout is not None:
        for field, value in found.to_dict().items():
            if "dropout" in field and isinstance(value, float):
                setattr(found, field, dropout)
    if kwargs.get("attn_implementation") == "sdpa":
        del kwargs["attn_implementation"]  # transformers takes it by itself, where the model has it
    model, info = auto_class.from_pretrained(
        name, config=found, output_loading_info=True, trust_remote_code=trust_remote_code, **kwargs
    )
    missing = sorted(info["missing_keys"]) + sorted(str(key) for key, *_ in info["mismatched_keys"])
    if missing:
        raise ValueError(
            f"The weights in {name!r} lack {len(missing)} of {type(model).__name__}'s tensors: "
            f"{', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}. A checkpoint of the body alone has no "
            "vocabulary head, so it predicts no tokens: take one that was saved with its head."
        )
    return as_diffusion(model, tokenizer=tokenizer, **told | ({} if max_length is None else {"max_length": max_length}))


def _configuration(
    name: str, config: dict, trust_remote_code: bool, revision: str | None
) -> tuple[type, PreTrainedConfig]:
    """The auto class that loads a model, and its configuration."""
    model_type = config.get("model_type")
    if is_a2d(config):
        native = model_type.removeprefix(A2D)
        fields = {key: value for key, value in config.items() if key not in ("model_type", "architectures", "auto_map")}
        found = CONFIG_MAPPING[native].from_dict(fields)
        found.is_causal = False
        return AutoModelForCausalLM, found
    if model_type in CONFIG_MAPPING:
        found = AutoConfig.from_pretrained(name, revision=revision)
        if getattr(found, "is_encoder_decoder", False) or is_masked_language_model(model_type):
            return AutoModelForMaskedLM, found
        if is_decoder(model_type):
            return AutoModelForCausalLM, found
    remote = config.get("auto_map") or {}
    for auto_name in AUTO_CLASSES if "AutoConfig" in remote else ():
        if auto_name in remote:
            if not trust_remote_code:
                raise ValueError(
                    f"{name} (model type {model_type!r}) comes with its own code, which is not run unasked. Read it, "
                    "then set trust_remote_code: true (--trust-remote-code)."
                )
            return AUTO_CLASSES[auto_name], AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=True)
    raise ValueError(
        f"{name} is a model of type {model_type!r}, which predicts no masked tokens. Known are MDLM and DUO, the "
        "masked language models of transformers, decoders with config.is_causal = False, LLaDA and Dream."
    )
