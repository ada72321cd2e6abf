"""AlphaObjective: a likelihood in which what the model already explains as a whole counts more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .corruption import CorruptedBatch
from .lift import token_entropy
from .predictions import Predictions
from .processes import OneProcess
from .tokens import token_log_probs


class AlphaObjective:
    """The sequence-level power loss of AlphaDLM (arXiv 2609.38066).

    With s the mean of log p(x_0,i | x_t) over the predicted positions of a window, the loss is (1 - exp(k s)) / k: that
    of a row is the mean over its windows, weighted by their lengths, and that of a batch the mean over rows. The
    gradient is that of the mean cross-entropy times exp(k s). For k -> 0 it is the mean cross-entropy itself. There is
    no weight 1/t, no encoder and no draw.

    The published form has one window a row. On long rows of open text s is about -3 to -7, and exp(k s) is then next to
    nothing with the published k of 8 or 16: take windows of 4 to 16 positions and k near 1.

    Args:
        encoder: not used.
        config: any object with the fields alpha_power (k > 0) and alpha_window (positions, or None for the whole row)
            of `DriftConfig`.
    """

    needs_encoder = False

    def __init__(self, encoder: None, config: Any):
        self.config = config

    def __call__(
        self, logits: Tensor | Predictions, batch: CorruptedBatch, processes: OneProcess | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch, called as `DriftObjective` is."""
        processes, predicted = processes or OneProcess(), batch.predicted
        predictions = Predictions.of(logits, predicted)
        log_p = token_log_probs(predictions, predicted, predictions.at(batch.x_0)[:, None]).squeeze(1)
        window = window_of(predicted, self.config.alpha_window)
        losses, s = power_loss(log_p, window, self.config.alpha_power)
        # A token's part in the mean over the positions of its row.
        per_row = predictions.at(predicted.sum(1, keepdim=True).expand_as(predicted))
        num_rows = processes.sum(predicted.any(1).sum()).clamp_min(1)
        weight = torch.exp(self.config.alpha_power * s.detach())
        return (losses / per_row).sum() / num_rows, {
            "alpha_log_p": (s.detach() / per_row).sum() / predicted.any(1).sum().clamp_min(1),
            "alpha_weight": (weight / per_row).sum() / predicted.any(1).sum().clamp_min(1),
            "token_entropy": token_entropy(predictions, predicted),
        }

    def accept(self) -> None:
        """Nothing waits for a step to be accepted."""

    def state_dict(self) -> dict[str, Tensor]:
        """Nothing is remembered."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Nothing is remembered."""


def window_of(predicted: Tensor, size: int | None) -> Tensor:
    """``[N]``: the number of the window of each predicted position, `size` consecutive ones of a row to a window.

    Args:
        predicted: ``[B, L]`` bool.
        size: positions, the last window of a row may have fewer. None: the whole row.
    """
    B, L = predicted.shape
    rank = predicted.cumsum(1) - 1
    first = L * torch.arange(B, device=predicted.device)[:, None]
    return (first + rank // (size or L))[predicted]


def power_loss(log_p: Tensor, window: Tensor, power: float) -> tuple[Tensor, Tensor]:
    """(1 - exp(k s)) / k of the window of every position, and s itself, ``[N]`` each.

    Args:
        log_p: ``[N]``.
        window: ``[N]`` integers, equal for the positions of a window.
        power: k > 0.
    """
    _, which, sizes = window.unique(return_inverse=True, return_counts=True)
    s = (log_p.new_zeros(len(sizes)).index_add(0, which, log_p) / sizes)[which]
    return -torch.expm1(power * s) / power, s
