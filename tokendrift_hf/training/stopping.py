"""Stopping on a signal, as clusters send one before they take a machine away: SIGTERM, and SIGUSR1 where asked for."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transformers import TrainerCallback

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: not done, try again
SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]


class TrainingStopped(SystemExit):
    """A signal stopped a run before its end. Nobody catching it, the program ends with status 75.

    Attributes:
        message: what has been saved, and how to go on.
    """

    def __init__(self, message: str):
        super().__init__(STOPPED)
        self.message = message

    def __str__(self) -> str:
        return self.message


class StopSignals:
    """Inside this context a stop signal is noted and does nothing else.

    Outside the main thread of a program no signal can be received, and the context does nothing.

    Attributes:
        received: the name of the last signal. None: none has come.
    """

    def __init__(self):
        self.received: str | None = None

    def __enter__(self) -> StopSignals:
        self._handlers = {}
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame) -> None:
        self.received = signal.Signals(number).name


class StopCallback(TrainerCallback):
    """Ends training after the step during which a signal came, and has it saved.

    Args:
        asked: whether a signal has come, on any process. All processes ask after every step.
    """

    def __init__(self, asked: Callable[[], bool]):
        self.asked, self.stopping = asked, False

    def on_train_begin(self, args, state, control, **kwargs):
        self.stopping = False

    def on_step_end(self, args, state, control, **kwargs):
        self.stopping = self.stopping or self.asked()
        if self.stopping:
            control.should_save = control.should_training_stop = True

    def on_epoch_end(self, args, state, control, **kwargs):
        if self.stopping:  # what the end of an epoch evaluates belongs into the checkpoint
            control.should_save = True


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside this context a stop signal raises `TrainingStopped` where the program stands.

    Every file is written whole, so whatever is under way can be made again.
    """

    def end(number: int, frame) -> None:
        raise TrainingStopped(f"Stopped by {signal.Signals(number).name}. What was finished is kept.")

    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.signal(number, end) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _drop_handlers() -> None:
    """Give a forked worker, such as those of `datasets`, the signals' default actions instead of the handlers here.

    Its parent ends it by SIGTERM. An exception that a handler raises there can be lost in the hook of another library,
    such as fsspec's after a fork. The worker then waits for ever, and its parent for the worker.
    """
    for number in SIGNALS:
        if getattr(signal.getsignal(number), "__module__", None) == __name__:
            signal.signal(number, signal.SIG_DFL)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_handlers)
