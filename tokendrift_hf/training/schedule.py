"""The schedule of the learning rate, made once on nothing, so that wrong settings are refused before any work."""

from __future__ import annotations

import inspect
import re

import torch
from transformers import TrainingArguments, get_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

_STEPS = 1000  # stands for the length of a training that only its text decides
_FROM_THE_TRAINER = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")


def check_schedule(args: TrainingArguments) -> None:
    """Raise ValueError unless `lr_scheduler_type` can be made with `lr_scheduler_kwargs`, and gives rates."""
    kind, options = args.lr_scheduler_type.value, args.lr_scheduler_kwargs or {}
    if not isinstance(options, dict):
        raise ValueError(f"lr_scheduler_kwargs must be settings by name, but it is {options!r}.")
    takes = inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[args.lr_scheduler_type]).parameters
    named = [name for name in takes if name not in _FROM_THE_TRAINER]
    if options and not named:
        raise ValueError(f"lr_scheduler_type={kind!r} has no settings. Leave out lr_scheduler_kwargs={options!r}.")
    num_steps = args.max_steps if args.max_steps > 0 else _STEPS
    optimizer = torch.optim.SGD([torch.zeros(())], lr=args.learning_rate)
    try:
        schedule = get_scheduler(kind, optimizer, args.get_warmup_steps(num_steps), num_steps, options)
        for rate in getattr(schedule, "lr_lambdas", ()):
            for step in (0, 1, num_steps // 2, num_steps):
                float(rate(step))
    except Exception as error:  # whatever a schedule meets in settings of another kind
        if missing := re.search(r"missing .* argument: '(\w+)'", str(error)):
            raise ValueError(
                f"lr_scheduler_type={kind!r} needs {missing[1]}. Give lr_scheduler_kwargs: {{{missing[1]}: ...}}, such "
                f"as {-(-num_steps // 4)} of {num_steps} steps."
            ) from error
        raise ValueError(
            f"lr_scheduler_type={kind!r} does not work with lr_scheduler_kwargs={options!r}: {str(error).rstrip('.')}."
            + ("" if "kwargs" in named else f" It takes {', '.join(named)}.")
        ) from error
