"""Who watches a run of generate(): a streamer, a callback, and the history that its result can hold."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .canvas_tokendrift import Canvas, Texts
from .ending_tokendrift import Ending


@dataclass
class DiffusionStep:
    """What a step callback is given.

    Attributes:
        step: 0, 1, ... in this block, or in this window where there are no blocks. The last one is noise removal.
        t: the time that x has reached, 0 when it is clean.
        tokens: ids [B, L] of the window.
        confidence: the probability of each token under the last prediction that was asked for at its position, [B, L].
            It is nan where none was.
        window: 0 but for text longer than the model.
        block: 0 but for text that is written in blocks. It counts from 0 in each window.
    """

    step: int
    t: float
    tokens: torch.Tensor
    confidence: torch.Tensor
    window: int
    block: int


class Observer:
    """Shows a run to a streamer and a callback, and keeps its history.

    Args:
        streamer: gets the prompt, the new text of each block, and drafts if it has `put_draft`. The first row decides
            where its text is cut into parts.
        callback: called with a `DiffusionStep` after each step.
        keep_history: whether `history` gets the ids at the start of each window and after each step.
    """

    def __init__(
        self, texts: Texts, streamer=None, callback: Callable[[DiffusionStep], None] | None = None, keep_history=False
    ):
        if callback is not None and not callable(callback):
            raise ValueError(f"callback is a {type(callback).__name__}. It must be a function of a DiffusionStep.")
        if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
            raise ValueError(f"streamer is a {type(streamer).__name__}. It must have put() and end(), as BaseStreamer.")
        self.texts, self.streamer, self.callback = texts, streamer, callback
        self.history: list[torch.Tensor] | None = [] if keep_history else None
        self.shown = int(texts.free[0].to(torch.uint8).argmax())  # where the part that the streamer was given ends
        self.window, self.block = -1, 0
        if streamer is not None:
            streamer.put(texts.tokens[:, : self.shown].cpu())

    def begin(self, canvas: Canvas):
        """A window is about to be sampled."""
        self.window, self.block = self.window + 1, 0
        if self.history is not None:
            self.history.append(canvas.x.clone())

    def step(self, canvas: Canvas, step: int, t: float):
        """A step has reached time t."""
        if self.history is not None:
            self.history.append(canvas.x.clone())
        if hasattr(self.streamer, "put_draft"):
            self.streamer.put_draft(canvas.x[:, self.shown - int(canvas.columns[0, 0]) :].cpu())
        if self.callback is not None:
            self.callback(DiffusionStep(step, t, canvas.x.clone(), canvas.confidence.clone(), self.window, self.block))

    def finish(self, ending: Ending):
        """A block is written. The streamer gets what stands before the first open position and before a row's end."""
        self.block += 1
        if self.streamer is None:
            return
        is_open = self.texts.free[0]
        end = int(is_open.to(torch.uint8).argmax()) if is_open.any() else len(is_open)
        end = min(end, int(ending.lengths()[0]))
        if end > self.shown:
            self.streamer.put(self.texts.tokens[:, self.shown : end].cpu())
            self.shown = end

    def end(self):
        if self.streamer is not None:
            self.streamer.end()
