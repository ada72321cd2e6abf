"""Predictions: what the model says of the predicted positions, with the logits of a few of them at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule

# Logits that exist at a time, in numbers: 64 MiB and 512 MiB in float32.
LOGITS_AT_A_TIME = {"cpu": 2**24, "cuda": 2**27}
# And at most those of so many positions: with a small vocabulary larger pieces leave the caches of a processor.
POSITIONS_AT_A_TIME = {"cpu": 512}


class Predictions:
    """The last hidden states at the predicted positions and the head that makes logits of them.

    Logits exist for a chunk of positions at a time, in forward and, made anew, in backward. Positions that are not
    predicted get none. All that an objective wants of the logits goes through `map` or `total`.

    Args:
        inputs: tensors with an entry for each predicted position, which the head takes, or for each position of the
            batch, of which `rows` names the predicted ones.
        head: inputs of n positions -> logits ``[n, V]``.
        predicted: ``[B, L]`` bool.
        vocab_size: V.
        positions: ``[N]``, where the predicted positions lie in the flattened batch. None: found from `predicted`, for
            which the host waits for the device.
        rows: ``[N]`` indices into the inputs, or None: they are of the N predicted positions.
        modules: of which the head consists. Their trained weights get gradients, and dropout in them is drawn again.
        chunk_size: positions at a time. None: as many as have 64 MiB of float32 logits, at most 512 (on a GPU as many
            as have 512 MiB).

    Attributes:
        beside: name -> (function, columns) that the next `map` computes in the same pass, so that logits are made once
            for several ends. What came out is in `results`.
        lifted: the encoder inputs ``[B, L, d]`` and the table E that a lift made of these predictions. None before.
        entropy: their mean entropy in nats, if a pass has come by it.
    """

    def __init__(
        self,
        inputs: Sequence[Tensor],
        head: Callable[..., Tensor],
        predicted: Tensor,
        vocab_size: int,
        *,
        positions: Tensor | None = None,
        rows: Tensor | None = None,
        modules: Sequence[nn.Module] = (),
        chunk_size: int | None = None,
    ):
        self.inputs, self.head, self.modules = tuple(inputs), head, tuple(modules)
        self.predicted, self.vocab_size, self.rows = predicted, vocab_size, rows
        self.positions = predicted.flatten().nonzero().squeeze(1) if positions is None else positions
        self.beside: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {}
        self.results: dict[str, Tensor] = {}
        self.lifted: tuple[Tensor, Tensor] | None = None
        self.entropy: Tensor | None = None
        device = inputs[0].device.type
        most = min(LOGITS_AT_A_TIME.get(device, 2**24) // vocab_size, POSITIONS_AT_A_TIME.get(device, 2**24))
        self.chunk_size = chunk_size or max(1, most)

    @classmethod
    def of(cls, logits: Tensor | Predictions, predicted: Tensor, chunk_size: int | None = None) -> Predictions:
        """Predictions from logits ``[B, L, V]`` that are there already, or predictions as they are.

        Raises:
            ValueError: ``predicted`` is not bool or not of shape ``[B, L]``, ``chunk_size`` < 1.
        """
        shape = logits.predicted.shape if isinstance(logits, Predictions) else logits.shape[:2]
        if predicted.dtype != torch.bool or predicted.shape != shape:
            raise ValueError(
                f"predicted must be a bool tensor of shape {list(shape)}, got {predicted.dtype} of shape "
                f"{list(predicted.shape)}."
            )
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {chunk_size}.")
        if isinstance(logits, Predictions):
            return logits
        rows = predicted.flatten().nonzero().squeeze(1)
        flat = logits.reshape(-1, logits.shape[-1])
        return cls([flat], lambda x: x, predicted, logits.shape[-1], positions=rows, rows=rows, chunk_size=chunk_size)

    @property
    def parameters(self) -> list[Tensor]:
        """Those of the head that are trained, as they are now: sharded training puts others in their place."""
        return list(dict.fromkeys(p for module in self.modules for p in module.parameters() if p.requires_grad))

    @property
    def dropout(self) -> bool:
        """Whether the head draws random numbers."""
        return any(getattr(part, "p", 0) and part.training for module in self.modules for part in module.modules())

    def __len__(self) -> int:
        """N, the number of predicted positions."""
        return len(self.inputs[0]) if self.rows is None else len(self.rows)

    def at(self, x: Tensor) -> Tensor:
        """The entries ``[N, ...]`` of a tensor ``[B, L, ...]`` at the predicted positions."""
        return x.flatten(0, 1).index_select(0, self.positions)

    def narrowed(self, vocab_size: int) -> Predictions:
        """The same over the first ids alone: an encoder may lack the mask, which has no mass anyway."""
        if vocab_size == self.vocab_size:
            return self
        head = self.head
        return self._again(lambda *inputs: head(*inputs)[:, :vocab_size], vocab_size)

    def _again(self, head: Callable[..., Tensor], vocab_size: int) -> Predictions:
        """Others of the same positions, without what came out of these."""
        return Predictions(
            self.inputs,
            head,
            self.predicted,
            vocab_size,
            positions=self.positions,
            rows=self.rows,
            modules=self.modules,
            chunk_size=self.chunk_size,
        )

    def map(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        *columns: Tensor,
        pullback: Callable[..., Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Outputs ``[N, ...]`` of ``function(logits [n, V], *columns [n, ...])``, differentiable once.

        Args:
            function: outside of autocast, without randomness, position by position. It returns a tuple of tensors.
            columns: ``[N, ...]`` each, without gradient.
            pullback: ``(logits, cotangents, *columns)`` -> the gradient with respect to the logits, for a function
                whose value costs more than that. The cotangents are those of its outputs, None where there is none.
        """
        # What is asked for beside needs a gradient, so a pass without one does not serve it.
        asked = self.beside if torch.is_grad_enabled() else {}
        readings = [_Reading(function, len(columns), pullback)]
        readings += [_Reading(lambda *x, f=f: (f(*x),), len(more)) for f, more in asked.values()]
        both = [*columns, *(column for _, more in asked.values() for column in more)]
        names = list(asked)
        outputs = self._mapped(readings, both)
        first = len(outputs) - len(names)
        self.results |= dict(zip(names, outputs[first:], strict=True))
        asked.clear()
        return outputs[:first]

    def _mapped(self, readings: Sequence[_Reading], columns: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if self._in_chunks():
            # A copy: what comes out is kept here, and a graph that holds its own results is never freed.
            alone = self._again(self.head, self.vocab_size)
            return _Recomputed.apply(alone, readings, columns, *self.inputs, *self.parameters)
        return self._concatenated(readings, columns)

    def _in_chunks(self) -> bool:
        """Whether gradients need care. Of one chunk autograd may keep what it likes, unless autocast could reach it."""
        several = len(self) > self.chunk_size or torch.is_autocast_enabled(self.predicted.device.type)
        return several and torch.is_grad_enabled() and any(x.requires_grad for x in (*self.inputs, *self.parameters))

    def total(self, function: Callable[..., Tensor], *columns: Tensor) -> Tensor:
        """The sum over the positions of ``function(logits, *columns)`` ``[n]``: a scalar, differentiable once.

        Its gradient is taken in the same pass, so the logits are made once and not twice.
        """
        if self._in_chunks():
            return _Summed.apply(self, function, columns, *self.inputs, *self.parameters)
        return self._concatenated([_Reading(lambda *x: (function(*x),), len(columns))], columns)[0].sum()

    def chunks(self) -> Iterator[slice]:
        """Slices of the N positions, one of them empty if there is none."""
        for start in range(0, max(len(self), 1), self.chunk_size):
            yield slice(start, min(start + self.chunk_size, len(self)))

    def take(self, x: Tensor, chunk: slice) -> Tensor:
        return x[chunk] if self.rows is None else x[self.rows[chunk]]

    def put(self, total: Tensor, chunk: slice, gradient: Tensor) -> None:
        total[chunk if self.rows is None else self.rows[chunk]] = gradient

    def _concatenated(self, readings: Sequence[_Reading], columns: Sequence[Tensor]) -> tuple[Tensor, ...]:
        parts = []
        for chunk in self.chunks():
            logits = self.head(*(self.take(x, chunk) for x in self.inputs))
            own = [column[chunk] for column in columns]
            with torch.autocast(logits.device.type, enabled=False):
                parts.append([x for reading in readings for x in reading.of(logits, own)])
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))


class _Reading:
    """A function of logits in a pass that serves several, each of which takes its columns from one list.

    Args:
        function: (logits, columns) -> a tuple of tensors.
        num_columns: how many it takes, after those of the readings before it.
        pullback: as in `Predictions.map`.
    """

    def __init__(self, function: Callable[..., Any], num_columns: int, pullback: Callable[..., Tensor] | None = None):
        self.function, self.num_columns, self.pullback = function, num_columns, pullback
        self.num_outputs = 0  # known once it has run

    def of(self, logits: Tensor, columns: list[Tensor]) -> tuple[Tensor, ...]:
        """The outputs. Its columns leave the list."""
        outputs = self.function(logits, *_taken(columns, self.num_columns))
        self.num_outputs = len(outputs)
        return outputs

    def again(
        self, logits: Tensor, columns: list[Tensor], cotangents: list[Tensor | None]
    ) -> list[tuple[Tensor, Tensor]]:
        """What backward needs of a chunk: tensors with a graph to the logits, and their cotangents."""
        columns, cotangents = _taken(columns, self.num_columns), _taken(cotangents, self.num_outputs)
        if all(g is None for g in cotangents):
            return []
        if self.pullback is None:
            pairs = zip(self.function(logits, *columns), cotangents, strict=True)
            return [(y, g) for y, g in pairs if y.requires_grad and g is not None]
        with torch.no_grad():
            return [(logits, self.pullback(logits.detach(), cotangents, *columns))]


def _taken(tensors: list, count: int) -> list:
    """The first `count`, which leave the list."""
    first = tensors[:count]
    del tensors[:count]
    return first


class _Gradients:
    """The gradients of inputs and parameters, put together chunk by chunk."""

    def __init__(self, predictions: Predictions, tensors: Sequence[Tensor]):
        self.predictions, self.count = predictions, len(predictions.inputs)
        self.wanted = [x.requires_grad for x in tensors]
        self.values = [torch.zeros_like(x) if x.requires_grad else None for x in tensors]

    def leaves(self, chunk: slice, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The inputs of a chunk, cut off from what made them."""
        taken = (self.predictions.take(x, chunk).detach() for x in inputs)
        return [x.requires_grad_(wanted) for x, wanted in zip(taken, self.wanted, strict=False)]

    def add(self, chunk: slice, pairs: Sequence, leaves: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        """Those of a chunk, from tensors with a graph to the leaves and their cotangents."""
        at = [i for i, wanted in enumerate(self.wanted) if wanted]
        tensors = [*leaves, *parameters]
        if not pairs:
            return
        outputs, cotangents = zip(*pairs, strict=True)
        with torch.autocast(self.predictions.predicted.device.type, enabled=False):
            found = torch.autograd.grad(outputs, [tensors[i] for i in at], cotangents, allow_unused=True)
        for i, gradient in zip(at, found, strict=True):
            if gradient is None:
                continue
            if i < self.count:
                self.predictions.put(self.values[i], chunk, gradient)
            else:
                self.values[i] += gradient


class _Recomputed(torch.autograd.Function):
    """`Predictions.map` over several chunks: nothing of vocabulary size is kept for backward."""

    @staticmethod
    def forward(ctx: Any, predictions: Predictions, readings: Sequence[_Reading], columns, *tensors: Tensor):
        ctx.predictions, ctx.readings, ctx.columns = predictions, readings, columns
        ctx.save_for_backward(*tensors)
        ctx.context = _Context(tensors[0].device, predictions.dropout)
        ctx.set_materialize_grads(False)
        outputs = predictions._concatenated(readings, columns)
        ctx.mark_non_differentiable(*(x for x in outputs if not x.is_floating_point()))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor):
        predictions, tensors = ctx.predictions, ctx.saved_tensors
        inputs, parameters = tensors[: len(predictions.inputs)], tensors[len(predictions.inputs) :]
        gradients = _Gradients(predictions, tensors)
        with torch.enable_grad(), ctx.context.again():
            for chunk in predictions.chunks():
                leaves = gradients.leaves(chunk, inputs)
                logits = predictions.head(*leaves)
                columns = [column[chunk] for column in ctx.columns]
                own = [g if g is None else g[chunk] for g in cotangents]
                with torch.autocast(logits.device.type, enabled=False):
                    pairs = [pair for reading in ctx.readings for pair in reading.again(logits, columns, own)]
                gradients.add(chunk, pairs, leaves, parameters)
        return None, None, None, *gradients.values


class _Summed(torch.autograd.Function):
    """`Predictions.total` over several chunks: the gradient is there once the value is."""

    @staticmethod
    def forward(ctx: Any, predictions: Predictions, function: Callable, columns, *tensors: Tensor):
        inputs, parameters = tensors[: len(predictions.inputs)], tensors[len(predictions.inputs) :]
        gradients, total = _Gradients(predictions, tensors), 0
        # Under torch 2.7 autocast would hand out casts of the weights that a pass without gradients has made.
        torch.clear_autocast_cache()
        with torch.enable_grad():
            for chunk in predictions.chunks():
                leaves = gradients.leaves(chunk, inputs)
                logits = predictions.head(*leaves)
                with torch.autocast(logits.device.type, enabled=False):
                    value = function(logits, *(column[chunk] for column in columns)).sum()
                gradients.add(chunk, [(value, torch.ones_like(value))], leaves, parameters)
                total = total + value.detach()
        ctx.wanted = gradients.wanted
        ctx.save_for_backward(*(x for x in gradients.values if x is not None))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor):
        # In place, for the memory: autograd raises if a retained graph is run a second time.
        found = iter(ctx.saved_tensors)
        scaled = [next(found).mul_(cotangent) if wanted else None for wanted in ctx.wanted]
        return None, None, None, *scaled


class _Context:
    """Autocast and random numbers as they are now, for the second run of a head in backward."""

    def __init__(self, device: torch.device, dropout: bool):
        kind = device.type
        self.device, self.autocast = device, (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        self.random = None
        if dropout:
            on_device = torch.cuda.get_rng_state(device) if kind == "cuda" else None
            self.random = (torch.get_rng_state(), on_device)

    @contextmanager
    def again(self) -> Iterator[None]:
        enabled, dtype = self.autocast
        devices = [self.device] if self.device.type == "cuda" else []
        with (
            torch.autocast(self.device.type, dtype=dtype, enabled=enabled),
            torch.random.fork_rng(devices, enabled=self.random is not None),
        ):
            if self.random is not None:
                torch.set_rng_state(self.random[0])
                if self.random[1] is not None:
                    torch.cuda.set_rng_state(self.random[1], self.device)
            yield


def predict(model: nn.Module, base: nn.Module, batch, chunk_size: int | None = None) -> Predictions:
    """Run a model on a corrupted batch up to its head.

    Args:
        model: what is called: the model itself, or what distributed training wrapped it into.
        base: the model inside of all wrappers, with `logits`.
        batch: a `CorruptedBatch`.
        chunk_size: as in `Predictions`.
    """
    # All positions pass through the last block, although few of them would do: so dropout draws as it always has, and a
    # checkpoint of an older version goes on as it would have.
    B, L = batch.x_t.shape
    hidden, c = model(
        input_ids=batch.x_t,
        timesteps=batch.t,
        attention_mask=batch.attention_mask,
        positions=torch.arange(L, device=batch.x_t.device).expand(B, L),
        return_dict=True,
    ).hidden_states
    if isinstance(model, FSDPModule):
        model.unshard()  # the head is still to run, and its weights are the root's
    inputs = batch.at_predicted(hidden), batch.at_predicted(c[:, None].expand(-1, L, -1))
    modules = [base.get_submodule(name) for name in getattr(base, "head_names", ["backbone.output_layer"])]
    return Predictions(
        inputs,
        lambda h, c: base.logits(h[:, None], c)[:, 0],
        batch.predicted,
        base.config.vocab_size,
        positions=batch.positions,
        modules=modules,
        chunk_size=chunk_size,
    )
