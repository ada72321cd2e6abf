"""Models and tokenizers by name, for the command line: ours or in a released layout, a directory or a hub id."""

from __future__ import annotations

import os
import pickle

import torch
from transformers import AutoModel, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..hub.configuration_tokendrift import DUOConfig, MDLMConfig
from ..hub.modeling_tokendrift import DUOForMaskedLM, MDLMForMaskedLM
from .lora import adapter_base, is_adapter, merge_adapter

CLASSES = {
    model_type: model_class
    for config_class, model_class in ((MDLMConfig, MDLMForMaskedLM), (DUOConfig, DUOForMaskedLM))
    for model_type in (config_class.model_type, config_class.released_model_type)
}


def load_model(name: str, **kwargs) -> PreTrainedModel:
    """An MDLM or DUO model in float32; `kwargs` go to `from_pretrained`.

    A directory with LoRA adapters gives the model that they refine, with the adapters merged into its weights.

    Raises:
        ValueError: no configuration there, or one of another kind of model; adapters whose base is missing.
    """
    if is_adapter(name):
        base, revision = adapter_base(name)
        try:
            model = load_model(base, **kwargs | {"revision": revision})
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{name} holds adapters for the base model {base!r}, which cannot be loaded ({error}). Put its path or "
                "hub id into base_model_name_or_path of adapter_config.json."
            ) from error
        return merge_adapter(model, name)
    try:
        found, _ = PreTrainedConfig.get_config_dict(name, revision=kwargs.get("revision"))
    except OSError as error:
        raise ValueError(f"There is no model {name!r}: no folder with a config.json, no repository.") from error
    if not found:
        raise ValueError(f"There is no config.json in {name!r}. Name a folder that holds a model.")
    if found.get("model_type") not in CLASSES:
        raise ValueError(
            f"{name} is a model of type {found.get('model_type')!r}; known are {', '.join(map(repr, CLASSES))}."
        )
    return _with_weights(CLASSES[found["model_type"]], name, **{"dtype": "float32"} | kwargs)


def _with_weights(model_class, name: str, **kwargs) -> PreTrainedModel:
    try:
        return model_class.from_pretrained(name, **kwargs)
    except (RuntimeError, pickle.UnpicklingError) as error:  # of torch, for pickled weights
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"The weights in {name!r} cannot be read: they are damaged, or hold more than tensors ({reason}). Save "
            "them as safetensors, or give their file to `tokendrift convert`."
        ) from error


def load_encoder(name: str | os.PathLike) -> PreTrainedModel:
    """Any model by name, in float32, to be a frozen encoder.

    Raises:
        ValueError: no model there.
    """
    try:
        config, _ = PreTrainedConfig.get_config_dict(name)
        ours = config.get("model_type") in CLASSES
        return load_model(str(name)) if ours else _with_weights(AutoModel, str(name), dtype=torch.float32)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"The encoder {str(name)!r} cannot be loaded. It is 'base' with LoRA, or a directory or hub id "
            f"of a model with the same tokenizer. {reason}"
        ) from error


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """A tokenizer.

    Raises:
        ValueError: there is none.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"There is no tokenizer in {name!r}. Name one with the field or flag tokenizer.") from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        # Without tokenizer files transformers 5 builds an empty tokenizer instead of failing.
        raise ValueError(f"There is no tokenizer in {name!r}. Name one with the field or flag tokenizer.")
    return tokenizer


def load_judge(name: str, device: torch.device) -> dict:
    """The arguments of `GenPPL` for a judge, loaded in float32 now, so that a wrong one is noticed before the work.

    Raises:
        ValueError: no autoregressive model there, or no tokenizer.
    """
    from ..metrics.gen_ppl.gen_ppl import Judge  # needs evaluate, an extra

    judge = Judge.load(name, None, None, device, torch.float32)
    return {"model": judge.model, "model_tokenizer": judge.tokenizer, "model_revision": judge.revision}
