"""Models and tokenizers by name, for the command line: ours, released or of another family, a directory or a hub id."""

from __future__ import annotations

import functools
import json
import logging
import os
import pickle
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..extras import need
from ..files import read_json
from ..hub.configuration_tokendrift import DUOConfig, MDLMConfig
from ..hub.modeling_tokendrift import DUOForMaskedLM, MDLMForMaskedLM
from .adaptation import read_adaptation
from .lora import adapter_base, is_adapter, merge_adapter
from .pretrained import check_family, is_a2d, load_adapted

logger = logging.getLogger(__name__)

CLASSES = {
    model_type: model_class
    for config_class, model_class in ((MDLMConfig, MDLMForMaskedLM), (DUOConfig, DUOForMaskedLM))
    for model_type in (config_class.model_type, config_class.released_model_type)
}
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def load_model(
    name: str,
    *,
    tokenizer: str | None = None,
    max_length: int | None = None,
    trust_remote_code: bool = False,
    told: dict | None = None,
    **kwargs,
) -> PreTrainedModel:
    """A diffusion model in float32: MDLM, DUO, or another family as `as_diffusion` makes it.

    A directory with LoRA adapters gives the model that they refine, with the adapters merged into its weights.

    Args:
        name: a directory or a hub id.
        tokenizer: where the tokenizer of another family lies, if it is not beside the model.
        max_length: the longest sequence of a model of another family. Default: its own limit.
        trust_remote_code: whether code that lies beside a model of another family may be run.
        told: arguments of `as_diffusion` for a model of another family. Default: `diffusion.json` beside the model or
            adapters, else what its tokenizer says.
        kwargs: go to `from_pretrained`.

    Raises:
        ValueError: no configuration there, or one of another kind of model, weights that are missing or damaged, or
            adapters whose base is missing.
        ImportError: the model has adapters, and peft is not installed.
    """
    if not isinstance(name, str | os.PathLike) or not str(name):
        raise ValueError(f"A model is named by a directory or hub id, not by {name!r}.")
    foreign = {"tokenizer": tokenizer, "max_length": max_length}
    told = told or {}
    if is_adapter(name):
        need("peft", "peft", f"{name} holds LoRA adapters, and loading them")
        base, revision = adapter_base(name)
        told = read_adaptation(name)
        told.pop("generation", None)
        try:
            options = foreign | kwargs | {"trust_remote_code": trust_remote_code, "revision": revision}
            model = load_model(base, told=told, **options)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{name} holds adapters for the base model {base!r}, which cannot be loaded ({error}). Put its path or "
                "hub id into base_model_name_or_path of adapter_config.json."
            ) from error
        return merge_adapter(model, name)
    found = _config_of(name, kwargs.get("revision"))
    if not isinstance(found.get("model_type"), str):
        what = f"model_type={str(found['model_type'])[:60]}" if "model_type" in found else "no model_type"
        raise ValueError(
            f"config.json of {name!r} has {what}, where the name of a kind of model is needed. Copy it again, or name "
            "a folder that save_pretrained wrote."
        )
    kwargs = {"dtype": "float32"} | kwargs
    if found["model_type"] in CLASSES:
        return _with_weights(CLASSES[found["model_type"]].from_pretrained, name, **kwargs)
    check_family(name, found, trust_remote_code)
    known = told or read_adaptation(name, kwargs.get("revision"))
    foreign["tokenizer"] = None if known else load_tokenizer(tokenizer or name, trust_remote_code)
    return _with_weights(load_adapted, name, config=found, told=told, **foreign, **kwargs)


def _config_of(name: str, revision: str | None = None) -> dict:
    """The fields of config.json in a folder or repository.

    Raises:
        ValueError: there is no such folder or repository, or config.json is missing or damaged.
    """
    _announce(str(name))
    path = Path(name, "config.json")
    try:
        found = None if path.is_file() else PreTrainedConfig.get_config_dict(name, revision=revision)[0]
    except (OSError, ValueError, TypeError, AttributeError) as error:  # the last two where it is JSON of another shape
        raise ValueError(f"There is no model {name!r}: no folder with a config.json, no repository.") from error
    if found == {}:  # what transformers gives without a file
        raise ValueError(f"There is no config.json in {name!r}. Name a folder that holds a model.")
    found = read_json(path) if found is None else found
    for field in ("_attn_implementation", "attn_implementation"):
        if "/" in str(found.get(field)):  # a repository of kernels: transformers would fetch and run it
            raise ValueError(
                f"config.json of {name!r} names code of the hub as its attention ({field}: {str(found[field])[:60]}), "
                "which is not run unasked. Remove the field."
            )
    return found


@functools.cache
def _announce(name: str) -> None:
    """Say once that a name is looked for on the hub: a mistyped folder would cost a long silence of retries."""
    if "/" not in name and not os.path.exists(name):
        logger.warning("There is no folder %s here: looking for it on the hub.", name)


def _with_weights(load, name: str, **kwargs) -> PreTrainedModel:
    try:
        return load(name, **kwargs)
    except (RuntimeError, pickle.UnpicklingError) as error:  # of torch, for pickled weights
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"The weights in {name!r} cannot be read: they are damaged, or hold more than tensors ({reason}). Save "
            "them as safetensors, or give their file to `tokendrift convert`."
        ) from error
    except (OSError, json.JSONDecodeError) as error:  # the latter of an index, which is read again here
        lacking = _lacking_weights(Path(name))
        if not lacking:
            raise
        raise ValueError(
            f"The folder {name!r} lacks weights: there is no {', '.join(lacking[:4])}"
            f"{', ...' if len(lacking) > 4 else ''}. Copy it again."
        ) from error
    except (ValueError, ImportError, MemoryError):
        raise
    except Exception as error:  # whatever a library meets in a file of another shape
        raise ValueError(
            f"The files in {name!r} cannot be read ({_brief(error)}). config.json, the index of the weights, or the "
            "weights are damaged or made for something else. Copy them again."
        ) from error


def _lacking_weights(folder: Path) -> list[str]:
    """The files of weights that a folder should hold and does not. Empty for what is no folder."""
    if not folder.is_dir() or any((folder / name).is_file() for name in WEIGHTS):
        return []
    index = next((path for name in WEIGHTS if (path := folder / f"{name}.index.json").is_file()), None)
    if index is None:
        return [WEIGHTS[0]]
    shards = read_json(index).get("weight_map")
    shards = {x for x in shards.values() if isinstance(x, str)} if isinstance(shards, dict) else set()
    return sorted(name for name in shards if not (folder / name).is_file())


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


def load_encoder(name: str | os.PathLike) -> PreTrainedModel:
    """Any model by name, in float32, to be a frozen encoder.

    Raises:
        ValueError: no model there.
    """
    try:
        if _config_of(name).get("model_type") in CLASSES:
            return load_model(str(name))
        return _with_weights(AutoModel.from_pretrained, str(name), dtype=torch.float32, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        if "trust_remote_code" in str(error):
            reason = (
                "This one comes with code of its own, which is never run here. Take another, or load it yourself and "
                "pass the model as encoder= of DriftTrainer."
            )
        raise ValueError(
            f"The encoder {str(name)!r} cannot be loaded. It is 'base' with LoRA, or a directory or hub id "
            f"of a model with the same tokenizer. {reason}"
        ) from error


def load_tokenizer(name: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """A tokenizer. That of a tiny-A2D checkpoint gets the mask that its authors' code adds, if it lacks one.

    Raises:
        ValueError: there is none.
    """
    _announce(str(name))
    try:
        config, _ = PreTrainedConfig.get_config_dict(name)
    except OSError:
        config = {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (ImportError, MemoryError):
        raise
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"The tokenizer {name!r} comes with code of its own, which is not run unasked. Read it, then set "
                "trust_remote_code: true (--trust-remote-code), or name another with the field or flag tokenizer."
            ) from error
        if Path(name, TOKENIZER_FILES[0]).is_file():
            raise _damaged_tokenizer(name, error) from error
        raise ValueError(f"There is no tokenizer in {name!r}. Name one with the field or flag tokenizer.") from error
    except Exception as error:  # whatever a library meets in files of another shape
        raise _damaged_tokenizer(name, error) from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        # Without tokenizer files transformers 5 builds an empty tokenizer instead of failing.
        raise ValueError(f"There is no tokenizer in {name!r}. Name one with the field or flag tokenizer.")
    if is_a2d(config) and tokenizer.mask_token is None:
        tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    return tokenizer


def _damaged_tokenizer(name: str, error: Exception) -> ValueError:
    """The error for a tokenizer whose files cannot be read, with the name of the one that is no JSON."""
    reason = f"{_brief(error)}. {' or '.join(TOKENIZER_FILES)} is damaged."
    for path in [Path(name, file) for file in TOKENIZER_FILES if Path(name, file).is_file()]:
        try:
            read_json(path)
        except ValueError as found:
            reason = str(found)
            break
    return ValueError(
        f"The tokenizer in {str(name)!r} cannot be read: {reason} Copy it again, or name another tokenizer with the "
        "field or flag tokenizer."
    )


def load_judge(name: str, device: torch.device) -> dict:
    """The arguments of `GenPPL` for a judge, loaded in float32 now, so that a wrong one is noticed before the work.

    Raises:
        ValueError: no autoregressive model there, or no tokenizer.
    """
    from ..metrics.gen_ppl.gen_ppl import Judge  # needs evaluate, an extra

    _announce(str(name))
    judge = Judge.load(name, None, None, device, torch.float32)
    return {"model": judge.model, "model_tokenizer": judge.tokenizer, "model_revision": judge.revision}
