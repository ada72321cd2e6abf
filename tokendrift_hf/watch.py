"""A terminal view of text taking shape: the step callback of `tokendrift generate --watch`."""

from __future__ import annotations

import sys
import time

from transformers import PreTrainedTokenizerBase


class Watch:
    """Print one sequence after every step, over the one before.

    Args:
        tokenizer: decodes the tokens.
        mask_id: shown as a block; None for models without a mask.
        pause: seconds to wait after each step, so that eyes can follow.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, mask_id: int | None, pause: float = 0.15):
        self.tokenizer, self.mask_id, self.pause = tokenizer, mask_id, pause

    def __call__(self, step) -> None:
        """`step`: the sampler's `DiffusionStep`."""
        text = "".join(
            "░" if token == self.mask_id else self.tokenizer.decode([token]) for token in step.tokens[0].tolist()
        )
        # Clear the screen and go to its top: the text may have any number of lines.
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[2J\x1b[H")
        sys.stdout.write(f"step {step.step}, t = {step.t:.3f}\n{text}\n")
        sys.stdout.flush()
        time.sleep(self.pause)
