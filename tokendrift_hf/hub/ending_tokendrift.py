"""Where rows end before their last position: at a generated end of text, or where a stopping criterion says so."""

import torch
from transformers import StoppingCriteriaList

from .canvas_tokendrift import Canvas, Texts


class Ending:
    """Notes which rows are done, and how long they are.

    Args:
        texts: what is written. Its free positions are those that count as generated.
        eos_token_id: an id or a list of ids. A row is done at the first generated one, but for one in column 0, with
            which unprompted rows of the released models begin. None: no token ends a row.
        criteria: asked for each row after each of its blocks, with the row's ids so far and `new_token_length`.
        mask_id: the mask, if a token stays once it is written. What lies behind an end of text without a mask before
            it need not be written then. None: tokens may change until their block is finished.

    Attributes:
        generated: positions that are generated, bool [B, T].
        done: rows that need nothing more, bool [B].
    """

    def __init__(self, texts: Texts, eos_token_id, criteria: StoppingCriteriaList, mask_id: int | None):
        self.texts, self.criteria, self.mask_id = texts, criteria, mask_id
        self.eos = None if eos_token_id is None else torch.as_tensor(eos_token_id, device=texts.tokens.device)
        self.generated = texts.free.clone()
        self.generated_behind_first = self.generated.clone()
        self.generated_behind_first[:, 0] = False
        self.done = torch.zeros(len(texts.tokens), dtype=torch.bool, device=texts.tokens.device)

    def after_step(self, canvas: Canvas):
        """Let go of what lies behind an end of text that is certain."""
        if self.eos is None or self.mask_id is None:
            return
        is_eos = torch.isin(canvas.x, self.eos) & self.generated_behind_first.gather(1, canvas.columns) & canvas.inside
        num_masks_before = ((canvas.x == self.mask_id) & canvas.inside).cumsum(1)
        canvas.free = canvas.free & ((is_eos & (num_masks_before == 0)).cumsum(1) == 0)

    def after_block(self, canvas: Canvas, block: torch.Tensor):
        """Note the rows that are done, once a block [B, W] is in the texts."""
        if self.eos is not None:
            self.done |= self._ends_of_text().any(1)
        if not self.criteria:
            return
        for row in (block.any(1) & ~self.done).nonzero()[:, 0].tolist():
            end = int(canvas.columns[row, block[row]].max()) + 1
            ids = self.texts.tokens[row : row + 1, :end]
            if bool(torch.as_tensor(self.criteria(ids, None, new_token_length=int(block[row].sum()))).all()):
                self.done[row] = True
                self.texts.lengths[row] = end

    def lengths(self) -> torch.Tensor:
        """The lengths of the rows, [B]."""
        lengths = torch.tensor(self.texts.lengths, device=self.texts.tokens.device)
        if self.eos is None:
            return lengths
        ends = self._ends_of_text()
        return torch.where(ends.any(1), ends.to(torch.uint8).argmax(1) + 1, lengths)

    def _ends_of_text(self) -> torch.Tensor:
        return torch.isin(self.texts.tokens, self.eos) & self.generated_behind_first & ~self.texts.free
