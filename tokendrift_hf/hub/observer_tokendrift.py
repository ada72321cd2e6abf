"""Who watches a run of generate(): a streamer, a callback, and the history that its result can hold."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .canvas_tokendrift import Canvas, Texts


@dataclass
class DiffusionStep:
    """What a step callback is given.

    Attributes:
        step: 0, 1, ... in this window. The last one is noise removal.
        t: the time that x has reached, 0 when it is clean.
        tokens: ids [B, L] of the window.
        confidence: the probability of each token under the last prediction that was asked for at its position, [B, L].
            It is nan where none was.
        window: 0 but for text longer than the model.
    """

    step: int
    t: float
    tokens: torch.Tensor
    confidence: torch.Tensor
    window: int


class Observer:
    """Shows a run to a streamer and a callback, and keeps its history.

    Args:
        streamer: gets the prompt, each window's new text, and drafts if it has `put_draft`. It sees the first row.
        callback: called with a `DiffusionStep` after each step.
        keep_history: whether `history` gets the ids at the start of each window and after each step.
    """

    def __init__(
        self, texts: Texts, streamer=None, callback: Callable[[DiffusionStep], None] | None = None, keep_history=False
    ):
        self.texts, self.streamer, self.callback = texts, streamer, callback
        self.history: list[torch.Tensor] | None = [] if keep_history else None
        self.shown = int(texts.free[0].to(torch.uint8).argmax())  # where the part that the streamer was given ends
        self.window, self.first_column = -1, 0
        if streamer is not None:
            streamer.put(texts.tokens[:, : self.shown].cpu())

    def begin(self, canvas: Canvas, columns: torch.Tensor):
        """A window with its columns [B, W] of the texts is about to be sampled."""
        self.window, self.first_column = self.window + 1, int(columns[0, 0])
        if self.history is not None:
            self.history.append(canvas.x.clone())

    def step(self, canvas: Canvas, step: int, t: float):
        """A step has reached time t."""
        if self.history is not None:
            self.history.append(canvas.x.clone())
        if hasattr(self.streamer, "put_draft"):
            self.streamer.put_draft(canvas.x[:, self.shown - self.first_column :].cpu())
        if self.callback is not None:
            self.callback(DiffusionStep(step, t, canvas.x.clone(), canvas.confidence.clone(), self.window))

    def finish(self, end: int):
        """A window is written. `end` is where it ends in the first row."""
        if self.streamer is not None:
            self.streamer.put(self.texts.tokens[:, self.shown : end].cpu())
        self.shown = end

    def end(self):
        if self.streamer is not None:
            self.streamer.end()
