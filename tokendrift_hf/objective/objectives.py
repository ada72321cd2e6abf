"""The objectives by the names that `DriftConfig.objective` takes. A further one is a file beside this and a line here.

An objective is called as `DriftObjective` is, with logits and a corrupted batch, and returns a loss and what to log. It
has `accept`, `state_dict` and `load_state_dict`. It says whether it `needs_encoder`, and if so
of which `default_layers`: indices of hidden states, or a function of the number of blocks.
"""

from __future__ import annotations

from typing import Any

from .alpha_objective import AlphaObjective
from .drift_objective import DriftObjective
from .encoder import FrozenEncoder
from .mmd_objective import MMDObjective

OBJECTIVES = {
    "feature": DriftObjective,
    "mirror_kl": DriftObjective,
    "mirror_mse": DriftObjective,
    "mmd": MMDObjective,
    "alpha": AlphaObjective,
}

NAMES = {
    "feature": "TokenDrift",
    "mirror_kl": "mirror KL",
    "mirror_mse": "mirror L2",
    "mmd": "MMD",
    "alpha": "alpha",
    "none": "continuation",
}


def name_of(objective: str, mmd_credit: int | str) -> str:
    """What people call an objective, in tables and on cards: "TokenDrift", "local MMD" (with a window), "MMD", ..."""
    return "local MMD" if objective == "mmd" and mmd_credit != "sequence" else NAMES.get(objective, "TokenDrift")


def make_objective(config: Any, encoder: FrozenEncoder | None) -> DriftObjective | MMDObjective | AlphaObjective | None:
    """The objective that `config.objective` names, with its settings from `config`. None for "none".

    Raises:
        KeyError: an unknown name.
    """
    if config.objective == "none":
        return None
    return OBJECTIVES[config.objective](encoder, config)
