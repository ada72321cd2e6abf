"""A terminal view of text taking shape: the step callback of `tokendrift generate --watch`."""

from __future__ import annotations

import itertools
import sys
import time

from transformers import PreTrainedTokenizerBase

from ..data.decoding import decode

CLEAR = "\x1b[2J\x1b[H"  # the screen, since the text may have any number of lines, and to its top


class Watch:
    """Show one sequence after every step, over the one before. Where stdout is no terminal nothing is shown.

    Args:
        tokenizer: decodes the tokens.
        mask_id: shown as a block. None for models without a mask.
        pause: seconds to wait after each step, so that eyes can follow.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, mask_id: int | None, pause: float = 0.15):
        self.tokenizer, self.mask_id, self.pause = tokenizer, mask_id, pause

    def __call__(self, step) -> None:
        """`step`: the sampler's `DiffusionStep`."""
        if sys.stdout.isatty():
            sys.stdout.write(f"{CLEAR}step {step.step}, t = {step.t:.3f}\n{self.text(step.tokens[0].tolist())}\n")
            sys.stdout.flush()
            time.sleep(self.pause)

    def text(self, ids: list[int]) -> str:
        """Masks as blocks, and what is between them decoded in one piece, since a character can take several tokens."""
        runs = itertools.groupby(ids, lambda token: token == self.mask_id)
        return "".join("░" * len(list(run)) if masked else decode(self.tokenizer, [run])[0][0] for masked, run in runs)

    def end(self) -> None:
        """Make room for the finished text."""
        if sys.stdout.isatty():
            sys.stdout.write(CLEAR)
