"""The network as samplers use it: random numbers, controls on the prediction, categorical draws, counted calls.

Shapes: B sequences, L positions, V vocabulary, n chosen positions of all sequences together.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import nn
from transformers import LogitsProcessorList

from .process_tokendrift import at_least_float32


def draw_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The dtype of random numbers and distribution functions: as asked for, but float32 on a device without float64."""
    return torch.float32 if precision == "float32" or device.type == "mps" else torch.float64


class RowStreams:
    """Uniform random numbers for B rows, one stream a row, so that a row never depends on its neighbours.

    Args:
        generator: one generator (None: torch's global one), or a list with one for each row. It is used once a row,
            to draw the seed of that row's own stream.
        num_rows: B.
        dtype: float64, or float32.
        device: where the numbers are wanted. They are drawn on the CPU: one seed gives the same text on any device.
    """

    def __init__(self, generator, num_rows: int, dtype: torch.dtype, device):
        sources = generator if isinstance(generator, (list, tuple)) else [generator] * num_rows
        self.dtype, self.device = dtype, device
        self.streams = [torch.Generator().manual_seed(self._seed(source)) for source in sources]

    @staticmethod
    def _seed(source: torch.Generator | None) -> int:
        device = "cpu" if source is None else source.device
        return torch.randint(2**63 - 1, (), generator=source, device=device).item()

    def positions(self, lengths: list[int], count: int, width: int) -> torch.Tensor:
        """`count` numbers in [0, 1) for each position of each row, [B, width, count], and 0 beyond a row's length."""
        out = torch.zeros(len(lengths), width, count, dtype=self.dtype)
        for row, (length, stream) in enumerate(zip(lengths, self.streams, strict=True)):
            torch.rand(length, count, generator=stream, dtype=self.dtype, out=out[row, :length])
        return out.to(self.device)

    def rows(self, active: torch.Tensor, count: int) -> torch.Tensor:
        """`count` numbers in [0, 1) for each active row, [B, count], and 0 for the others. `active` is bool [B]."""
        return self.positions(active.long().tolist(), count, 1)[:, 0]


def draw(
    weights: torch.Tensor, uniforms: torch.Tensor, rows: torch.Tensor | None = None, block: int = 256
) -> torch.Tensor:
    """Categorical draws by inverting the distribution function in the precision of `uniforms`.

    In two levels, first a block of the vocabulary and then a token in it, so that no [n, V] table of sums is needed.
    A weight of zero is never drawn, also for uniforms of 0 and 1 - eps.

    Args:
        weights: not negative, not all zero, of any sum, [n, V].
        uniforms: in [0, 1), [k].
        rows: which of the n rows to draw from, [k]. None draws once from each.

    Returns:
        ids [k].
    """
    V = weights.shape[1]
    body = V - V % block
    sums = torch.cat([weights[:, :body].unflatten(1, (-1, block)).sum(-1), weights[:, body:].sum(-1, keepdim=True)], 1)
    rows = torch.arange(len(sums), device=sums.device) if rows is None else rows
    sums = sums[rows].to(uniforms.dtype)
    cdf = sums.cumsum(-1)
    target = uniforms[:, None] * cdf[:, -1:]
    chosen = torch.searchsorted(cdf, target, right=True).clamp_max(sums.shape[1] - 1)
    mass = sums.gather(1, chosen)
    below_one = 1 - torch.finfo(uniforms.dtype).eps / 2
    uniforms = ((target - cdf.gather(1, chosen) + mass) / mass).clamp(0, below_one)
    ids = chosen * block + torch.arange(block, device=weights.device)
    inside = weights[rows[:, None], ids.clamp_max(V - 1)].to(uniforms.dtype).masked_fill(ids >= V, 0)
    cdf = inside.cumsum(-1)
    return (chosen * block + torch.searchsorted(cdf, uniforms * cdf[:, -1:], right=True))[:, 0]


def control(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """Sharpen or truncate the clean-token prediction: temperature, then top_k, then top_p.

    Args:
        logits: [n, V].
        temperature: 1 changes nothing. 0 is greedy and puts all mass on the likeliest token.
        top_k: keep the k likeliest tokens. 0 keeps all.
        top_p: keep the likeliest tokens up to and including the one at which their sum reaches p. 1 keeps all.

    Returns:
        logits [n, V], -inf where a token is ruled out.
    """
    if temperature == 0 or top_k == 1:
        return torch.full_like(logits, -torch.inf).scatter_(-1, logits.argmax(-1, keepdim=True), 0.0)
    if temperature != 1:
        logits = logits / temperature
    if 0 < top_k < logits.shape[-1]:
        best = logits.topk(top_k, dim=-1)
        logits = torch.full_like(logits, -torch.inf).scatter_(-1, best.indices, best.values)
    if top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        reached = ordered.softmax(-1, dtype=draw_dtype("float64", logits.device)).cumsum_(-1) >= top_p
        ordered[:, 1:].masked_fill_(reached[:, :-1], -torch.inf)
        logits = torch.full_like(logits, -torch.inf).scatter_(-1, order, ordered)
    return logits


def index_of(wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A mask [B, L] -> the wanted positions of each row, [B, n], padded with others, and which of them are wanted."""
    counts = wanted.sum(1, keepdim=True)
    n = int(counts.max())
    positions = (~wanted).to(torch.uint8).argsort(dim=1, stable=True)[:, :n]
    return positions, torch.arange(n, device=wanted.device) < counts


class Prediction(NamedTuple):
    """What the network says about the tokens at n positions of all rows, of which m are different.

    Attributes:
        rows, columns: the positions, [n] each.
        source: which line of `p` and `plain` is a position's, [n].
        p: p(x_0 | x_t) under temperature, top_k and top_p, [m, V]. Tokens are drawn from it.
        plain: the same without them, [m, V]. It says how sure the network is.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    source: torch.Tensor
    p: torch.Tensor
    plain: torch.Tensor


class Denoiser:
    """Clean-token predictions at wanted positions, in chunks. The rest of the head is never computed.

    Args:
        model: called as `model(input_ids=, timesteps=, attention_mask=, positions=)`, see its `forward`.
        temperature, top_k, top_p: see `control`.
        suppress_tokens: ids that are never predicted, beside the mask.
        processors: called, before the controls, as processors(ids [n, L], logits [n, V], cur_step=) for n positions of
            one row, whose ids come n times. cur_step is the number of steps that are left, as in transformers.
        chunk_size: positions for which logits [n, V] are held at once. None: 32 MiB of them (GPU: 512 MiB), and less
            where controls need copies.
        rows_per_call: rows that share a forward pass. With 1 a row goes through the same products of the same shapes
            as in a run of its own, so it is equal to the bit. None: as many as hold 2^10 tokens (GPU: 2^16).

    Attributes:
        present: positions that exist, bool [B, L], the first ones of each row. None: all.
        num_calls: predictions asked for. A batch may need several forward passes for one.
        calls_per_row: in how many of them each row took part, [B].
        num_forward_passes: forward passes of the network.
    """

    def __init__(
        self,
        model,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        suppress_tokens: Sequence[int] | None = None,
        processors: LogitsProcessorList | None = None,
        chunk_size: int | None = None,
        rows_per_call: int | None = None,
    ):
        self.model, self.present, self.processors = model, None, processors
        mask = [] if model.process.mask_id is None else [model.process.mask_id]
        self.never = torch.tensor(sorted({*(suppress_tokens or ()), *mask}), dtype=torch.long, device=model.device)
        self.controls = (temperature, top_k, top_p)
        self.is_plain = temperature == 1 and not top_k and top_p == 1
        on_cpu = model.device.type == "cpu"
        copies = 1 if self.is_plain else 9 if top_p < 1 else 3  # sorting needs several
        elements = (2**23 if on_cpu else 2**27) // copies
        self.chunk_size = chunk_size or max(1, elements // model.config.vocab_size)
        self.rows_per_call, self.tokens_per_call = rows_per_call, 2**10 if on_cpu else 2**16
        self.is_compiled = any(module._compiled_call_impl is not None for module in model.modules())
        self.num_calls = self.num_forward_passes = self.calls_per_row = 0

    def __call__(self, x, t, wanted, steps_left, skip_below: torch.Tensor | None = None) -> Iterator[Prediction]:
        """Predict at the wanted positions. Nothing is computed if there are none.

        Args:
            x: ids [B, L].
            t: times [B].
            wanted: bool [B, L].
            steps_left: this step and those after it, a number, or one for each row [B].
            skip_below: [B, L]: leave out positions where p(x_t) is surely not above this, see `log_p_bounds`.
        """
        takes_part = wanted.any(1)
        self.calls_per_row = self.calls_per_row + takes_part.long()
        active = takes_part.nonzero()[:, 0]
        if not len(active):
            return
        self.num_calls += 1
        if self.is_compiled:
            # Every call has one shape: torch would compile others anew, and CUDA graphs be recorded for each.
            active = torch.arange(len(x), device=x.device)
        elif self.num_calls == 1 and self._alike(x, t, wanted):
            # Masks without a prompt: one row serves all, and each of its positions is predicted once.
            columns = wanted.any(0).nonzero()[:, 0]
            hidden, c = self._hidden(x, t, active[:1], columns[None])
            process = partial(self._processed, x, steps_left, active[:1].expand(len(columns)))
            for chunk, p, plain in self._predictions(hidden[0], c.expand(len(columns), -1), process):
                rows, source = wanted[:, columns[chunk]].nonzero(as_tuple=True)
                yield Prediction(rows, columns[chunk][source], source, p, plain)
            return
        for part in active.split(self.rows_per_call or max(1, self.tokens_per_call // x.shape[1])):
            positions, valid = self._positions_of(wanted[part], part)
            hidden, c = self._hidden(x, t, part, positions)
            local = torch.arange(len(part), device=x.device)[:, None].expand_as(positions)[valid]
            rows, columns, hidden, c = part[local], positions[valid], hidden[valid], c[local]
            if skip_below is not None and self.blocks is not None:
                bounds = self.log_p_bounds(hidden, c, x[rows, columns])
                left = (~(bounds <= skip_below[rows, columns].log())).nonzero()[:, 0]  # nan is not skipped
                rows, columns, hidden, c = rows[left], columns[left], hidden[left], c[left]
            process = partial(self._processed, x, steps_left, rows)
            for chunk, p, plain in self._predictions(hidden, c, process):
                source = torch.arange(len(p), device=x.device)
                yield Prediction(rows[chunk], columns[chunk], source, p, plain)

    @cached_property
    def blocks(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Means of the head's weights [m, D] and biases [m] over blocks of the vocabulary, and the log of their sizes.

        Ids that are never predicted are in no block. None where no bound follows: the prediction is truncated, or the
        head wrapped (adapters, quantised).
        """
        temperature, top_k, top_p = self.controls
        head = getattr(getattr(self.model, "backbone", None), "output_layer", None)
        if head is None or temperature == 0 or top_k or top_p < 1 or self.processors:
            return None
        if not isinstance(head.linear, nn.Linear) or not head.linear.weight.is_floating_point():
            return None
        kept = torch.ones(len(head.linear.bias), dtype=torch.bool, device=self.model.device)
        kept[self.never] = False
        blocks = kept.nonzero()[:, 0].split(256)
        sizes = torch.tensor([len(block) for block in blocks], device=self.model.device)
        weight, bias = head.linear.weight, head.linear.bias
        means = (torch.stack([y[block].float().mean(0) for block in blocks]) for y in (weight, bias))
        return *means, sizes.log()

    def log_p_bounds(self, hidden: torch.Tensor, c: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Upper bounds of log p(tokens) [n] at hidden states [n, D] with c [n, C], for a fraction of the head's cost.

        By Jensen's inequality exp(logit) summed over a block of the vocabulary is at least the block's size times the
        exponential of its mean logit, which is one dot product. Where x_t is noise this is often enough.
        """
        head, temperature = self.model.backbone.output_layer, self.controls[0]
        shift, scale = head.adaLN_modulation(c).float().chunk(2, dim=-1)
        h = head.norm_final(hidden).float() * (1 + scale) + shift
        with torch.autocast(h.device.type, enabled=False):
            logits = (h * head.linear.weight[tokens].float()).sum(-1) + head.linear.bias[tokens].float()
            centres, biases, log_sizes = self.blocks
            log_sum = ((h @ centres.T + biases) / temperature + log_sizes).logsumexp(-1)
        return (logits + 0.1) / temperature - log_sum  # 0.1: more than rounding in the head can make up for

    def _alike(self, x: torch.Tensor, t: torch.Tensor, wanted: torch.Tensor) -> bool:
        """Whether one row can serve all: the same input, and the same positions if rows are to be as if alone."""
        if len(x) < 2 or self.present is not None:
            return False
        same = (x == x[:1]).all() & (t == t[:1]).all()
        return bool(same & (wanted == wanted[:1]).all() if self.rows_per_call == 1 else same)

    def _width(self, x: torch.Tensor, rows: torch.Tensor) -> int:
        """The length of the longest of some rows."""
        return x.shape[1] if self.present is None else int(self.present[rows].sum(1).max())

    def _positions_of(self, wanted: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The positions [B, n] at which a forward pass over these rows ends, and which of them are wanted."""
        if not self.is_compiled:
            return index_of(wanted)
        width = self._width(wanted, rows)
        return torch.arange(width, device=wanted.device).expand(len(rows), width), wanted[:, :width]

    def _hidden(self, x, t, rows, positions):
        """Hidden states [B, n, D] at the positions and time conditioning [B, C] of some rows, in one forward pass."""
        self.num_forward_passes += 1
        width = self._width(x, rows)
        mask = None if self.present is None else self.present[rows, :width]
        if self.is_compiled:  # a CUDA graph may now write over what the call before left
            torch.compiler.cudagraph_mark_step_begin()
        output = self.model(
            input_ids=x[rows, :width],
            timesteps=t[rows],
            attention_mask=None if mask is None or mask.all() else mask,
            positions=positions,
            return_dict=True,
        )
        if hasattr(self.model, "unshard"):  # FSDP2: the head is still to run, and its weights are the model's own
            self.model.unshard()
        return output.hidden_states

    def _processed(self, x, steps_left, rows: torch.Tensor, chunk: slice, logits: torch.Tensor) -> torch.Tensor:
        """Logits [n, V] at positions of `rows[chunk]`, after the processors, which see one row at a time."""
        rows = rows[chunk]
        for row in rows.unique().tolist():
            at = rows == row
            length = x.shape[1] if self.present is None else int(self.present[row].sum())
            left = int(steps_left[row]) if isinstance(steps_left, torch.Tensor) else steps_left
            processed = self.processors(x[row, :length].expand(int(at.sum()), -1), logits[at], cur_step=left)
            if not isinstance(processed, torch.Tensor) or processed.shape != logits[at].shape:
                found = list(processed.shape) if isinstance(processed, torch.Tensor) else type(processed).__name__
                raise ValueError(
                    f"logits_processor made {found} of logits {list(logits[at].shape)}. It must keep their shape."
                )
            logits[at] = processed.to(logits)
        return logits

    def _predictions(self, hidden, c, process):
        """For hidden states [n, D] with time conditioning [n, C]: slices of the n rows, with p and plain p there."""
        for start in range(0, len(hidden), self.chunk_size):
            chunk = slice(start, start + self.chunk_size)
            logits = self.model.logits(hidden[chunk, None], c[chunk])[:, 0]
            logits = logits.to(at_least_float32(logits.dtype))
            logits.index_fill_(1, self.never, -torch.inf)
            if self.processors:
                logits = process(chunk, logits).index_fill_(1, self.never, -torch.inf)
            if self.is_plain:
                p = plain = torch.softmax(logits, -1, out=logits)  # in place, for the memory
            else:
                plain = torch.softmax(logits, -1)
                p = torch.softmax(control(logits, *self.controls), -1)
            if plain[:, 0].isnan().any():
                raise ValueError(
                    "The network predicts nan: its weights or activations hold nan or inf"
                    + (", or logits_processor ruled out every token." if self.processors else ".")
                )
            yield chunk, p, plain
            del logits, p, plain  # before the next chunk is computed
