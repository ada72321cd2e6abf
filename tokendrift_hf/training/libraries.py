"""Settings that `TrainingArguments` hands on to libraries, which would refuse them only in the midst of the work."""

from __future__ import annotations

import inspect

import torch
from accelerate.utils import GradientAccumulationPlugin
from transformers import TrainingArguments
from transformers.integrations import integration_utils
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.training_args import trainer_log_levels

ACCUMULATION = "gradient_accumulation_kwargs"


def check_accelerator_config(value) -> None:
    """Raise ValueError for names that `accelerator_config` does not know. To be asked before they are used."""
    nested = value.get(ACCUMULATION) if isinstance(value, dict) else None
    for where, settings, taker in (
        ("accelerator_config", value, AcceleratorConfig),
        (f"{ACCUMULATION} of accelerator_config", nested, GradientAccumulationPlugin),
    ):
        known = list(inspect.signature(taker).parameters)
        if isinstance(settings, dict) and (unknown := [name for name in settings if name not in known]):
            raise ValueError(f"{where} has no setting {unknown[0]!r}. It takes {', '.join(known)}.")


def check_libraries(args: TrainingArguments) -> None:
    """Raise ValueError for levels of the log, trackers and compilers that are unknown, or not installed."""
    for name in ("log_level", "log_level_replica"):
        if getattr(args, name) not in trainer_log_levels:
            raise ValueError(f"{name}={getattr(args, name)!r} is not known; choose one of {_list(trainer_log_levels)}.")
    _check_trackers(args.report_to)
    if args.torch_compile:
        _check_compiler(args.torch_compile_backend, args.torch_compile_mode)


def _check_trackers(names: list[str]) -> None:
    callbacks = integration_utils.INTEGRATION_TO_CALLBACK
    for name in names:
        if name not in callbacks:
            raise ValueError(f"report_to={name!r} is not known; choose one of {_list([*callbacks, 'all', 'none'])}.")
        if name not in integration_utils.get_available_reporting_integrations():  # which leaves out one or two
            try:
                callbacks[name]()
            except Exception as error:  # of any kind, and it says what to install
                raise ValueError(f"report_to={name!r} does not work here: {error}") from error


def _check_compiler(backend: str, mode: str | None) -> None:
    backends = torch.compiler.list_backends(exclude_tags=())
    if backend not in backends:
        raise ValueError(f"torch_compile_backend={backend!r} is not known; choose one of {_list(backends)}.")
    modes = list(torch._inductor.list_mode_options()) if backend == "inductor" else []
    if modes and mode is not None and mode not in modes:
        raise ValueError(f"torch_compile_mode={mode!r} is not known; choose one of {_list(modes)}.")


def _list(names) -> str:
    return ", ".join(map(repr, names))
