"""The model's own loss from predictions: of each row, or of a batch for training."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..hub.process_tokendrift import AbsorbingProcess, UniformProcess
from .corruption import CorruptedBatch
from .predictions import Predictions
from .tokens import log_probs

NELBO = "nelbo"
SMALLEST_NOISE = 1e-7  # above the resolution of float32, so that a row with t = 0 has finite values and gradients


def row_nelbo(
    process: AbsorbingProcess | UniformProcess, logits: Tensor | Predictions, batch: CorruptedBatch
) -> tuple[Tensor, Tensor]:
    """``[B]`` each: the NELBO of a row in nats, and the tokens that it is over: all that could have been corrupted."""
    predictions = Predictions.of(logits, batch.predicted)
    function, columns = _of_tokens(process, batch)
    (nelbo,) = predictions.map(lambda *x: (function(*x),), *columns)
    return _rows(nelbo, batch), batch.free.sum(1)


def ask_for_nelbo(process: AbsorbingProcess | UniformProcess, predictions: Predictions, batch: CorruptedBatch) -> None:
    """Let the next pass over the vocabulary take the NELBO along: `batch_nelbo` then needs none of its own."""
    predictions.beside[NELBO] = _of_tokens(process, batch)


def batch_nelbo(process: AbsorbingProcess | UniformProcess, predictions: Predictions, batch: CorruptedBatch) -> Tensor:
    """The NELBO of all rows in nats, a scalar."""
    predictions.beside.pop(NELBO, None)
    if NELBO in predictions.results:
        return predictions.results[NELBO].sum()
    function, columns = _of_tokens(process, batch)
    return predictions.total(function, *columns)


def _of_tokens(
    process: AbsorbingProcess | UniformProcess, batch: CorruptedBatch
) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """(logits ``[n, V]``, x_0, x_t, t) -> NELBO ``[n]``, and the last three at the predicted positions."""

    def masked(logits: Tensor, x_0: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        # The same as `process.nelbo` at masked positions, with fewer passes over the logits.
        weight = -process.schedule.d_alpha(t) / (1 - process.schedule.alpha(t)).clamp_min(SMALLEST_NOISE)
        return -weight * log_probs(logits, x_0[:, None], without=process.mask_id)[:, 0]

    def uniform(logits: Tensor, x_0: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        return process.nelbo(logits[:, None], x_0[:, None], x_t[:, None], t)[:, 0]

    function = uniform if process.mask_id is None else masked
    t = batch.t[:, None].expand_as(batch.x_0)
    return function, tuple(map(batch.at_predicted, (batch.x_0, batch.x_t, t)))


def _rows(values: Tensor, batch: CorruptedBatch) -> Tensor:
    """Sums ``[B]`` over the predicted positions of a row."""
    row = batch.positions // batch.x_0.shape[1]
    return values.new_zeros(len(batch.x_0)).index_add(0, row, values)
