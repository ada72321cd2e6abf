"""Sampling: how models are sampled to be compared. One vocabulary for recipes and for the command line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields

MOST_STEPS = 10**6  # as in hub/settings_tokendrift.py, which imports torch: the help of the command does without
DTYPES = ("float32", "bfloat16")
STEPLESS = "first_hitting"  # the sampler that makes one call a token, however many steps are asked for


@dataclass(frozen=True)
class Sampling:
    """The grid of an evaluation: every model at every number of steps, temperature and seed.

    Recipes and flags have these fields under the same names, but for those with an `option` of their own, since a
    recipe also has the temperatures of the drift field, the batch size of the training and so on.

    Raises:
        ValueError: a value of the wrong type or out of its range.
    """

    num_steps: list[int] = field(
        default_factory=lambda: [4, 8, 16], metadata={"help": "Sampling steps (NFE), one or more."}
    )
    temperatures: list[float] = field(
        default_factory=lambda: [1.0],
        metadata={
            "option": "sampling_temperatures",
            "help": "Sampling temperatures of every model, 0 is greedy; several give the frontier and, with real text, "
            "each model's Gen.-PPL at the entropy of that text.",
        },
    )
    num_seeds: int = field(default=3, metadata={"help": "Sampling seeds (0, 1, ...)."})
    num_samples: int = field(default=128, metadata={"help": "Samples for each cell of the grid."})
    sampler: str = field(
        default="ancestral",
        metadata={"help": "Sampler of generate(). first_hitting, without steps, is for tasks alone."},
    )
    batch_size: int = field(
        default=64,
        metadata={"option": "sampling_batch_size", "help": "Samples drawn at a time; changes nothing but the speed."},
    )
    dtype: str | None = field(
        default=None,
        metadata={
            "option": "sampling_dtype",
            "help": "Of the network while sampling: float32 or bfloat16; null: that of the training, else float32.",
        },
    )

    def __post_init__(self):
        steps = f"whole numbers of at least 1, at most {MOST_STEPS}"
        _check_list("num_steps", self.num_steps, steps, lambda x: _is_whole(x) and 1 <= x <= MOST_STEPS)
        at_least_0 = "finite numbers of at least 0 (greedy)"
        _check_list("sampling_temperatures", self.temperatures, at_least_0, lambda x: _is_number(x) and 0 <= x)
        for f in fields(self):
            value, name = getattr(self, f.name), option(f)
            if f.type == "int" and not (_is_whole(value) and value >= 1):
                raise ValueError(f"{name}={value!r}: it must be a whole number of at least 1.")
        if not isinstance(self.sampler, str):
            raise ValueError(f"sampler={self.sampler!r}: it must be the name of a sampler of generate().")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"sampling_dtype={self.dtype!r} is not known; choose one of {', '.join(DTYPES)}.")

    def check_steps(self) -> None:
        """Raise ValueError for a sampler that no table of steps can hold."""
        if self.sampler == STEPLESS:
            raise ValueError(
                f"sampler={self.sampler!r} makes one network call a token and has no steps, but models are compared by "
                "their number of steps. Take another sampler here. This one is for `tokendrift generate --sampler "
                f"{self.sampler}`, generate() in Python, and recipes with tasks and judge: null."
            )


def option(f: Field) -> str:
    """The name of a field of `Sampling` in recipes and, after two dashes, on the command line."""
    return f.metadata.get("option", f.name)


def _is_whole(x) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_number(x) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


def _check_list(name: str, values: Sequence, needed: str, fits) -> None:
    if not isinstance(values, (list, tuple)) or not values or not all(map(fits, values)):
        raise ValueError(f"{name}={values!r}: give one or more {needed}.")
    if len(set(values)) < len(values):
        raise ValueError(f"{name}={values!r}: a value is there twice, and would be sampled twice. Drop it.")
