"""What generate() writes on: prompts and free positions, and the windows of texts longer than the model.

Shapes: B rows, P columns of the prompts, T of the whole texts, W of one window (at most the model's length).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .denoiser_tokendrift import Prediction, RowStreams
from .process_tokendrift import check_token_ids

MOST_POSITIONS = 2**28  # of a call, the prompts included


@dataclass
class Canvas:
    """One window while it is sampled, changed in place.

    Attributes:
        x: ids [B, W].
        free: positions that may change, bool [B, W].
        lengths: of the rows, for which numbers are drawn. 0 for rows at rest, whose streams stay where they are.
        confidence: probability of the token under the last prediction asked for there, before temperature, top_k and
            top_p, [B, W]. nan where none was.
        columns: where the positions are in the texts, [B, W].
        inside: positions that exist, bool [B, W], the first ones of each row.
    """

    x: torch.Tensor
    free: torch.Tensor
    lengths: list[int]
    confidence: torch.Tensor
    columns: torch.Tensor
    inside: torch.Tensor

    def put(self, tokens: torch.Tensor, prediction: Prediction):
        """Write tokens [n] at the positions of a prediction."""
        at = prediction.rows, prediction.columns
        self.x[at] = tokens
        self.confidence[at] = prediction.plain[prediction.source, tokens].to(self.confidence)

    def random(self, noise: RowStreams, count: int) -> torch.Tensor:
        """`count` random numbers for each position, [B, W, count]."""
        return noise.positions(self.lengths, count, self.x.shape[1])

    def blocks(self, block_length: int | None) -> Iterator[torch.Tensor]:
        """The free positions in the parts that are written one after another, bool [B, W] each. None: in one.

        Block b of a row has the positions from its first free one + b * block_length on.
        """
        free = self.free
        if block_length is None or not free.any():
            yield free
            return
        first = free.to(torch.uint8).argmax(1, keepdim=True)
        number = (torch.arange(free.shape[1], device=free.device) - first) // block_length
        for b in range(int(number[free].max()) + 1):
            block = free & (number == b)
            if block.any():
                yield block

    def at(self, t: float) -> torch.Tensor:
        """The time t for every row, [B]."""
        return torch.full((len(self.x),), t, device=self.x.device)


@dataclass
class Texts:
    """All that is to be written.

    Attributes:
        tokens: ids [B, T].
        free: positions to fill, bool [B, T].
        lengths: of the rows.
        padding: the id that padded the prompts, None if nothing did.
    """

    tokens: torch.Tensor
    free: torch.Tensor
    lengths: list[int]
    padding: int | None = None

    def window_ends(self, longest: int, stride: int | None):
        """For each window, where it ends in each row: first at the model's length, then `stride` further each time."""
        first_free = self.free.to(torch.uint8).argmax(1).tolist()
        ends = [
            min(length, max(longest, first + (stride or 0)))
            for length, first in zip(self.lengths, first_free, strict=True)
        ]
        yield ends
        while ends != self.lengths:
            ends = [min(length, end + stride) for end, length in zip(ends, self.lengths, strict=True)]
            yield ends

    def window(self, ends: list[int], longest: int, process, noise: RowStreams) -> Canvas:
        """The canvas of one window with fresh noise."""
        device = self.tokens.device
        stops = torch.tensor(ends, device=device)[:, None]
        starts = (stops - longest).clamp_min(0)
        lengths = (stops - starts)[:, 0].tolist()
        columns = starts + torch.arange(max(lengths), device=device)
        inside = columns < stops
        columns = columns.clamp_max(self.tokens.shape[1] - 1)
        free = self.free.gather(1, columns) & inside
        start = process.random_tokens(noise.positions(lengths, 1, max(lengths))[..., 0])
        x = torch.where(free, start, self.tokens.gather(1, columns).masked_fill(~inside, 0))
        confidence = torch.full(x.shape, torch.nan, device=device)
        return Canvas(x, free, lengths, confidence, columns, inside)

    def write(self, canvas: Canvas, block: torch.Tensor):
        """Take over a finished block, bool [B, W], which from then on is context."""
        rows, columns = block.nonzero(as_tuple=True)
        at = rows, canvas.columns[rows, columns]
        self.tokens[at] = canvas.x[rows, columns]
        self.free[at] = False


def unprompted(num_samples: int, length: int, longest: int | None, device) -> Texts:
    """Texts of which nothing is given. `longest` is what the model takes, None where it writes in windows."""
    _check_size(num_samples, length, longest)
    tokens = torch.zeros(num_samples, length, dtype=torch.long, device=device)
    return Texts(tokens, torch.ones_like(tokens, dtype=torch.bool), [length] * num_samples)


def prompted(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    prompt_mask: torch.Tensor | None,
    *,
    num_samples: int | None,
    max_new_tokens: int | None,
    max_length: int | None,
    longest: int | None,
    vocab_size: int,
    mask_id: int | None,
    reserved_id: int,
) -> Texts:
    """Pack prompts to the left and mark what is to be filled. The arguments are those of `generate()`.

    Args:
        longest: what the model takes, None where it writes in windows.
        mask_id: of a masked model, else None.
        reserved_id: an id that no prompt of a model without a mask may hold: its padding, the mask of its sibling.
    """
    is_ids = isinstance(input_ids, torch.Tensor) and input_ids.dtype in (torch.int64, torch.int32)
    if not is_ids or input_ids.dim() != 2 or not input_ids.numel():
        found = f"{input_ids.dtype} {list(input_ids.shape)}" if isinstance(input_ids, torch.Tensor) else type(input_ids)
        raise ValueError(f"input_ids is {found}. It must be a tensor of integer ids, [B, L], and not empty.")
    if num_samples is not None and len(input_ids) not in (1, num_samples):
        raise ValueError(
            f"num_samples={num_samples} with {len(input_ids)} prompts. Give one prompt to be repeated, or leave "
            "num_samples out."
        )
    copies = num_samples if len(input_ids) == 1 and num_samples else 1
    for name, mask in (("attention_mask", attention_mask), ("prompt_mask", prompt_mask)):
        if mask is None:
            continue
        if not isinstance(mask, torch.Tensor) or mask.is_complex() or mask.isnan().any():
            raise ValueError(f"{name} is a {type(mask).__name__} or holds nan. It must be a tensor of zeros and ones.")
        if mask.shape != input_ids.shape:
            raise ValueError(f"{name} is {list(mask.shape)}. It must be {list(input_ids.shape)}, as input_ids.")
    _check_size(len(input_ids) * copies, input_ids.shape[1], None)
    # What is there, what of it is padding, and what is to be filled.
    x = input_ids.long().repeat(copies, 1)
    present = torch.ones_like(x, dtype=torch.bool)
    if attention_mask is not None:
        present = attention_mask.to(x.device).bool().repeat(copies, 1)
    padding = None if present.all() else int(x[~present][0])
    lengths = present.sum(1)
    if (present[:, 1:] != present[:, :-1]).sum(1).gt(1).any() or not lengths.all():
        raise ValueError("attention_mask has a hole or an empty row. Padding must be on one side of a prompt.")
    if prompt_mask is not None:
        free = ~prompt_mask.to(x.device).bool().repeat(copies, 1) & present
    else:
        free = (x == mask_id) & present if mask_id is not None else torch.zeros_like(present)
    _check_kept(x[present & ~free], vocab_size, mask_id, reserved_id)
    if max_length is not None and int(lengths.max()) > max_length:
        raise ValueError(f"max_length={max_length}, but a prompt has {int(lengths.max())} tokens already.")

    # Tokens to the left, and behind them the new positions, as many as each row has.
    order = (~present).to(torch.uint8).argsort(dim=1, stable=True)
    ends = [length + max_new_tokens if max_new_tokens else max_length or length for length in lengths.tolist()]
    T, P = max(ends), x.shape[1]
    _check_size(len(ends), T, longest)
    x, free = (F.pad(y.gather(1, order), (0, max(0, T - P)))[:, :T] for y in (x, free))
    columns = torch.arange(T, device=x.device)
    free = free | (columns >= lengths[:, None]) & (columns < torch.tensor(ends, device=x.device)[:, None])
    if not free.any():
        remedy = "Give max_new_tokens or prompt_mask" + (", or put masks there." if mask_id is not None else ".")
        raise ValueError(f"There is nothing to generate: input_ids has no free position. {remedy}")
    return Texts(x, free, ends, padding)


def _check_size(rows: int, length: int, longest: int | None):
    """Refuse what is too long for the model, or too much for a call, while there is no tensor of it yet."""
    if longest is not None and length > longest:
        raise ValueError(
            f"The text would be {length} tokens long, but this model takes at most {longest}. Ask for less, or give a "
            "stride, to write it in windows."
        )
    if rows * length > MOST_POSITIONS:
        raise ValueError(
            f"{rows} texts of {length} tokens are {rows * length} positions. A call can generate {MOST_POSITIONS}: ask "
            "for fewer at a time, or for shorter ones."
        )


def _check_kept(kept: torch.Tensor, vocab_size: int, mask_id: int | None, reserved_id: int):
    if len(kept):
        check_token_ids(int(kept.min()), int(kept.max()), vocab_size)
    if mask_id is not None and (kept == mask_id).any():
        raise ValueError("prompt_mask keeps positions that hold the mask. Leave them free, or put a token there.")
    if mask_id is None and (kept == reserved_id).any():
        raise ValueError(
            f"input_ids holds the id {reserved_id}, but a uniform-state model knows no mask. Mark the positions to "
            "fill with zeros in prompt_mask."
        )
