"""The model's own loss from predictions: of each row, or of a batch for training."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..hub.process_tokendrift import AbsorbingProcess, UniformProcess
from .corruption import CorruptedBatch
from .predictions import Predictions

NELBO = "nelbo"


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

    def function(logits: Tensor, x_0: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        return process.nelbo(logits[:, None], x_0[:, None], x_t[:, None], t)[:, 0]

    t = batch.t[:, None].expand_as(batch.x_0)
    return function, tuple(x[batch.predicted] for x in (batch.x_0, batch.x_t, t))


def _rows(values: Tensor, batch: CorruptedBatch) -> Tensor:
    """Sums ``[B]`` over the predicted positions of a row."""
    row = batch.predicted.nonzero()[:, 0]
    return values.new_zeros(len(batch.x_0)).index_add(0, row, values)
