"""What the objectives do, in a few sentences of a model card."""

from __future__ import annotations

from typing import Any

from ..markdown import quoted

PAPERS = {"mmd": "2610.06648", "alpha": "2609.38066"}  # of the objectives that are not TokenDrift's, on arXiv
LIFTS = {
    "soft": "soft-token embeddings",
    "hard_st": "embeddings of the likeliest tokens (straight-through)",
    "sampled_st": "embeddings of drawn tokens (straight-through)",
}
FIELD = "a field that attracts to real text and repels from the model's own"
DISTANCES = {"mirror_kl": "by KL divergence", "mirror_mse": "by the squared distance of the logits"}


def sentences_on(settings: dict[str, Any]) -> str:
    """What the training did, in Markdown. `settings` has the fields of `DriftConfig`, or none for its defaults."""
    objective = settings.get("objective", "feature")
    if objective == "none":
        return "The loss is the model's own likelihood bound alone."
    text = {"mmd": _mmd, "alpha": _alpha}.get(objective, _drift)(settings)
    if objective in PAPERS:
        text += f" This follows [arXiv {PAPERS[objective]}](https://arxiv.org/abs/{PAPERS[objective]})."
    if weight := settings.get("base_loss_weight"):
        text += f" The model's own likelihood bound has the weight {quoted(weight)} beside it."
    return text


def _drift(settings: dict[str, Any]) -> str:
    lift, divergence = LIFTS[settings.get("encoder_input", "soft")], DISTANCES.get(settings.get("objective"))
    start = f"lifts the model's predictions to {lift}, lets a frozen encoder turn them into features, and"
    if divergence is None:
        return f"TokenDrift {start} pulls these along {FIELD}."
    return (
        f"Like TokenDrift's main objective it {start} computes {FIELD}. A mirror teacher moves the logits one step in "
        f"the direction that carries the features along that field, and the model learns to match it {divergence}."
    )


def _mmd(settings: dict[str, Any]) -> str:
    credit = settings.get("mmd_credit", 1)
    rewarded = (
        "A group of draws is rewarded as a whole if its features lie"
        if credit == "sequence"
        else f"A drawn token is rewarded if the features within {quoted(credit)} tokens of it lie"
    )
    return (
        "Several texts of hard tokens are drawn from one prediction, and a frozen encoder reads them and the real "
        f"text. {rewarded} near the real ones and far from those of other draws (maximum mean discrepancy, by policy "
        "gradient)."
    )


def _alpha(settings: dict[str, Any]) -> str:
    window, power = settings.get("alpha_window", 8), quoted(settings.get("alpha_power", 1.0))
    what = "A whole row" if window is None else f"A window of {quoted(window)} predicted positions"
    return (
        f"{what} counts by exp({power} times its mean log-probability), so that what the model already explains as a "
        "whole counts more. There is no encoder and no draw."
    )
