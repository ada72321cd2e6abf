"""Bare weights files, Lightning checkpoints and released directories to a model directory that loads everywhere.

Layouts: the state dict of kuleshov-group/mdlm and s-sahoo/duo, under any prefix ("backbone." in the releases). For
Lightning files beside it `ema`, whose `shadow_params` are a list in the order of the parameters, hence without the
`rotary_emb.inv_freq` buffer that the state dict holds.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..files import read_json
from ..hub.configuration_tokendrift import LARGEST, DiTConfig
from ..hub.modeling_tokendrift import DUOForMaskedLM, MDLMForMaskedLM
from .archive import load_archive
from .loading import load_model
from .pickles import Foreign

MODELS = {"mdlm": MDLMForMaskedLM, "duo": DUOForMaskedLM}
_TABLE, _ROTARY, _TIME_BIAS = "vocab_embed.embedding", "rotary_emb.inv_freq", "sigma_map.mlp.0.bias"
_RELEASED_HEAD_DIM = 64


@dataclass
class ConversionReport:
    """What `convert` found and did. Printed, it is one line per entry of `lines`."""

    model: str
    num_parameters: int
    ema_applied: bool
    lines: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(self.lines)


def convert(
    source: str | os.PathLike, destination: str | os.PathLike, ema: bool = True, model: str | None = None
) -> ConversionReport:
    """Write `source` as a model directory. Nothing in `source` is run: it is read as tensors, containers and numbers.

    Args:
        source: a `.safetensors` file, a Lightning or other torch checkpoint, or a directory in the released layout. A
            config.json beside a file counts.
        destination: a directory that does not exist or is empty. It appears complete or not at all.
        ema: take the moving average of the weights, if the file has one, as the authors' own evaluation does.
        model: "mdlm" or "duo". Both have the same tensors, so by default config.json, the hyper-parameters of the file,
            then its name and those of its folders decide. If none of them says, MDLM is assumed and the report says so.

    Raises:
        ValueError: the file is damaged or of another architecture, or the destination is in use.
    """
    source, destination = Path(source), Path(destination)
    if model not in (None, *MODELS):
        raise ValueError(f"model={model!r} is unknown; needed is one of {sorted(MODELS)}.")
    if not source.exists():
        raise ValueError(f"{source} does not exist. Give a checkpoint file or a directory with a config.json.")
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ValueError(f"{destination} exists and is not an empty directory. Choose another destination.")
    if source.is_dir():
        network, report = _from_directory(source, model)
    else:
        network, report = _from_file(source, ema, model)

    partial = destination.with_name(f".{destination.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        network.save_pretrained(partial)
        if destination.exists():
            destination.rmdir()
        os.replace(partial, destination)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    report.lines.append(f"written: {destination}")
    return report


def _from_directory(source: Path, model: str | None):
    found = _model_of_config(source)
    model_type = read_json(source / "config.json").get("model_type") if (source / "config.json").is_file() else None
    if found is None and model_type is not None:
        raise ValueError(
            f"{source} holds a model of type {model_type!r}, but MDLM and DUO alone are converted. Other families need "
            "no conversion: name the directory itself, in a recipe (model: ...) or to tokendrift generate."
        )
    if found is None:
        raise ValueError(
            f"{source} has no config.json of an MDLM or DUO model; it may be half-written. Copy it again, or give the "
            "weights file itself."
        )
    if model not in (None, found):
        raise ValueError(f"model={model!r} was asked for, but config.json in {source} is that of {found!r}.")
    network = load_model(str(source), dtype="auto")
    report = _report(network, found, False, f"{source}, a model directory", "config.json", "config.json")
    report.lines.append("weights: as they are (a directory holds no separate moving average)")
    return network, report


def _from_file(source: Path, ema: bool, model: str | None):
    payload, layout = _read(source)
    hyper_parameters = _entry(payload, "hyper_parameters", "config")
    tensors, left_out = _backbone(payload.get("state_dict", payload), source)
    beside = _model_of_config(source.parent)
    # Both models have the same tensors: the first of these that says which one decides.
    evidence = (
        (model, "as asked"),
        (beside, "by the config.json beside it"),
        (_model_of_hyper_parameters(hyper_parameters, source), "by its hyper-parameters"),
        (_model_of_path(source), "by its name"),
        ("mdlm", "ASSUMED, since nothing says; DUO has the same tensors, so put DUO into the file's name if it is one"),
    )
    found, origin = next(pair for pair in evidence if pair[0])
    cls = MODELS[found]
    if beside == found:
        config, sizes = cls.config_class.from_pretrained(source.parent), "config.json"
    else:
        config, sizes = _config(cls.config_class, tensors, hyper_parameters, source)
    # The network takes its memory from the file's tensors, which have to fit.
    with torch.device("meta"):
        network = cls(config)
    tensors.setdefault(_ROTARY, network.backbone.rotary_emb.inverse_frequencies(torch.device("cpu")))
    _check(tensors, {name: tensor.shape for name, tensor in network.backbone.state_dict().items()}, source)

    average = payload.get("ema") if "state_dict" in payload else None
    if not isinstance(average, dict | None):
        raise ValueError(
            f"The moving average in {source} is a {type(average).__name__}; needed is a dict. Use --no-ema."
        )
    # The averages are a list in the order of the parameters.
    applied = bool(ema and average)
    if applied:
        tensors.update(_averages(average, network, source))
    network.backbone.load_state_dict(tensors, assign=True)

    report = _report(network, found, applied, f"{source}, {layout}", origin, sizes)
    if average:
        decay = average.get("decay")
        rate = f"decay {decay if isinstance(decay, float) else 'unknown'}, {_whole(average.get('num_updates'))} updates"
        report.lines.append(f"weights: {'the moving average' if applied else 'raw, not the moving average'} ({rate})")
    else:
        report.lines.append("weights: as they are (the file holds no separate moving average)")
    if left_out:
        report.lines.append(f"left out: {len(left_out)} tensors of a teacher, such as {left_out[0]}")
    return network, report


def _report(network, model: str, ema_applied: bool, source: str, origin: str, sizes: str) -> ConversionReport:
    config, count = network.config, sum(parameter.numel() for parameter in network.parameters())
    return ConversionReport(
        model=model,
        num_parameters=count,
        ema_applied=ema_applied,
        lines=[
            f"source: {source}",
            f"model: {model.upper()} ({origin}), {count:,} parameters in {len(list(network.parameters()))} tensors",
            f"sizes: hidden {config.hidden_size}, blocks {config.num_hidden_layers}, heads {config.num_attention_heads}"
            f", conditioning {config.cond_dim}, vocabulary {config.vocab_size}, length {config.max_position_embeddings}"
            f" ({sizes})",
        ],
    )


# Reading


def _read(source: Path) -> tuple[dict[str, Any], str]:
    """The content of a file, and what kind of file it is."""
    damaged = f"{source} cannot be read as a safetensors or torch checkpoint"
    if zipfile.is_zipfile(source):
        try:
            payload = load_archive(source)
        except ValueError as error:
            raise ValueError(f"{damaged}: {error}. Copy or download it again, or save its weights alone.") from error
        if not isinstance(payload, dict):
            raise ValueError(f"{damaged}: it holds a {type(payload).__name__} instead of named tensors.")
        if "state_dict" in payload:
            progress = f"epoch {_whole(payload.get('epoch'))}, step {_whole(payload.get('global_step'))}"
            return payload, f"a Lightning checkpoint ({progress})"
        return payload, "a torch file of bare weights"
    try:
        return load_file(source), "a safetensors file of bare weights"
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{damaged} ({error}). It is cut off, still being written, or of another kind, such as a torch file from "
            "before version 1.6: copy or download it again, or save its weights as safetensors."
        ) from error


def _whole(value: Any) -> int | str:
    """A number to print. What else a stranger put there is not shown."""
    return value if type(value) is int and abs(value) < 2**63 else "unknown"


def _entry(node: Any, *path: str) -> Any:
    """The value at a path of names in nested dicts or pickled omegaconf nodes. None where there is none."""
    for name in path:
        node = _content(node)
        node = node.get(name) if isinstance(node, dict) else None
    return _content(node)


def _content(node: Any) -> Any:
    """What a pickled omegaconf node, which arrives as `Foreign`, holds."""
    if isinstance(node, Foreign) and isinstance(node.state, dict):
        return node.state.get("_content", node.state.get("_val"))
    return node


def _backbone(state_dict: Any, source: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors of the network without their prefix, and the keys of a teacher, which are left out."""
    if not isinstance(state_dict, dict):
        raise ValueError(f"{source} has a {type(state_dict).__name__} in the place of its named tensors.")
    tensors = {str(key): value.detach() for key, value in state_dict.items() if isinstance(value, torch.Tensor)}
    teacher = [key for key in tensors if key.startswith("teacher.")]
    tensors = {key: value for key, value in tensors.items() if key not in teacher}
    prefixes = [key.removesuffix(_TABLE) for key in tensors if key.endswith(_TABLE)]
    if len(prefixes) != 1:
        found = f"{len(prefixes)} networks ({', '.join(prefixes)})" if prefixes else f"keys such as {list(tensors)[:3]}"
        raise ValueError(
            f"{source} is not an MDLM or DUO checkpoint: needed is one key that ends in {_TABLE!r}, found are {found}. "
            "Models of other families need no conversion: name their directory in a recipe or to tokendrift generate."
        )
    foreign = [key for key in tensors if not key.startswith(prefixes[0])]
    if foreign:
        raise ValueError(f"{source} holds tensors outside {prefixes[0]!r} that nothing here would use: {foreign[:5]}.")
    tensors = {key.removeprefix(prefixes[0]): value for key, value in tensors.items()}
    for key, dimensions in ((_TABLE, 2), (_TIME_BIAS, 1), (_ROTARY, 1)):
        if key in tensors and (tensors[key].dim() != dimensions or not tensors[key].numel()):
            raise ValueError(
                f"{source}: {key} has shape {list(tensors[key].shape)}; needed are {dimensions} dimensions."
            )
    whole = [f"{key} ({value.dtype})" for key, value in tensors.items() if not value.is_floating_point()]
    if whole:
        raise ValueError(f"{source} holds weights that are no fractions: {whole[:5]}. Quantised files cannot be read.")
    return tensors, teacher


def _check(tensors: dict[str, torch.Tensor], needed: dict[str, torch.Size], source: Path) -> None:
    wrong = [f"{key} is missing" for key in needed if key not in tensors]
    wrong += [f"{key} is not used" for key in tensors if key not in needed]
    wrong += [
        f"{key} has shape {list(tensors[key].shape)} instead of {list(shape)}"
        for key, shape in needed.items()
        if key in tensors and tensors[key].shape != shape
    ]
    if wrong:
        raise ValueError(f"{source} is not a complete MDLM or DUO network: {'; '.join(wrong[:12])}.")


def _averages(average: dict[str, Any], network, source: Path) -> dict[str, torch.Tensor]:
    """The moving averages under the names of the parameters, in whose order (not the state dict's) they are listed."""
    parameters, shadow = dict(network.backbone.named_parameters()), average.get("shadow_params", [])
    if not isinstance(shadow, list) or not all(isinstance(value, torch.Tensor) for value in shadow):
        raise ValueError(f"The moving average in {source} is no list of tensors. Convert the raw weights (--no-ema).")
    if len(shadow) != len(parameters):
        raise ValueError(
            f"The moving average in {source} has {len(shadow)} tensors, but the network has {len(parameters)} "
            "parameters, so they cannot be matched. Convert the raw weights instead (--no-ema)."
        )
    for i, (name, value) in enumerate(zip(parameters, shadow, strict=True)):
        if value.shape != parameters[name].shape or not value.is_floating_point():
            raise ValueError(
                f"The moving average in {source} does not match: its tensor {i} has shape {list(value.shape)}, but "
                f"{name} has {list(parameters[name].shape)}. Convert the raw weights instead (--no-ema)."
            )
    return {name: value.detach() for name, value in zip(parameters, shadow, strict=True)}


# Which model, of which size


def _model_of_config(folder: Path) -> str | None:
    path = folder / "config.json"
    model_type = read_json(path).get("model_type") if path.is_file() else None
    for name, cls in MODELS.items():
        if model_type in (cls.config_class.model_type, cls.config_class.released_model_type):
            return name
    return None


def _model_of_hyper_parameters(config: Any, source: Path) -> str | None:
    """By the names in the configurations of the two training repositories: `algo.name` or `parameterization`."""
    algorithm = _entry(config, "algo", "name") or _entry(config, "parameterization")
    if not isinstance(algorithm, str | None):
        raise ValueError(f"The hyper-parameters in {source} name a {type(algorithm).__name__} as the algorithm.")
    known = {"mdlm": "mdlm", "subs": "mdlm", "duo": "duo", "duo_base": "duo", "distillation": "duo", None: None}
    if algorithm not in known:
        raise ValueError(f"{source} was trained as {algorithm!r}; only MDLM and DUO networks can be used here.")
    return known[algorithm]


def _model_of_path(source: Path) -> str | None:
    """The nearest of the file's and its folders' names that contains the name of one model."""
    for part in reversed(source.absolute().parts):
        found = [name for name in MODELS if name in part.lower()]
        if len(found) == 1:
            return found[0]
    return None


def _config(config_class: type[DiTConfig], tensors: dict, hyper_parameters: Any, source: Path):
    """A configuration from the shapes of the tensors and, for what they cannot show, the hyper-parameters."""
    if _TIME_BIAS not in tensors:
        raise ValueError(f"{source} has no {_TIME_BIAS}: it is a causal or another network, of no use here.")
    fields = {}
    # What the hyper-parameters say, each checked: a stranger wrote them.
    for theirs, ours, valid in (
        ("length", "max_position_embeddings", lambda value, most: type(value) is int and 0 < value <= most),
        ("n_heads", "num_attention_heads", lambda value, most: type(value) is int and 0 < value <= most),
        ("dropout", "dropout", lambda value, _: type(value) in (int, float) and 0 <= value < 1),
    ):
        value = _entry(hyper_parameters, "model", theirs)
        if value is not None and not valid(value, LARGEST.get(ours)):
            raise ValueError(
                f"The hyper-parameters in {source} hold no valid model.{theirs}. Put a config.json beside it."
            )
        fields |= {} if value is None else {ours: value}
    for path in (("time_conditioning",), ("algo", "time_conditioning")):
        if isinstance(_entry(hyper_parameters, *path), bool):
            fields["time_conditioning"] = _entry(hyper_parameters, *path)
    origin, assumed = "by the tensors" + (" and hyper-parameters" if fields else ""), []

    # The tensors come first, and what neither shows is as in the releases.
    vocab_size, hidden_size = tensors[_TABLE].shape
    if _ROTARY in tensors:
        fields["num_attention_heads"] = hidden_size // (2 * len(tensors[_ROTARY]))
    elif "num_attention_heads" not in fields:
        if hidden_size % _RELEASED_HEAD_DIM:
            raise ValueError(
                f"{source} does not show the number of attention heads (it has no {_ROTARY}), and {hidden_size} is not "
                f"a multiple of the released head size {_RELEASED_HEAD_DIM}. Put a config.json beside the file."
            )
        fields["num_attention_heads"] = hidden_size // _RELEASED_HEAD_DIM
        assumed.append("heads")
    if "max_position_embeddings" not in fields:
        assumed.append("length")
    config = config_class(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        cond_dim=len(tensors[_TIME_BIAS]),
        num_hidden_layers=len({key.split(".")[1] for key in tensors if key.startswith("blocks.")}),
        **fields,
    )
    return config, origin + (f"; {' and '.join(assumed)} ASSUMED as released" if assumed else "")
