"""A model that writes a step at a time, whenever it is asked to."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue

from transformers import PreTrainedModel


class _Stopped(BaseException):
    """Unwinds `generate()`. It is no Exception, so nothing on the way takes it for a failure."""


def write_steps(model: PreTrainedModel, arguments: dict) -> Iterator[tuple[object, float]]:
    """Run `model.generate(**arguments)` a step at a time.

    `generate()` runs in a thread of its own, which works only while the next step is awaited. So two models can take
    turns without disturbing each other's time, and closing the iterator ends the work at the step that it has reached.

    Args:
        model: with the `generate()` of this package.
        arguments: of `generate()`, without a callback.

    Yields:
        (`DiffusionStep`, seconds so far) for every step, then (what `generate()` returned, seconds). The seconds are
        those in which the model worked.

    Raises:
        Exception: whatever `generate()` raises.
    """
    # The two threads take turns: one queue says go on (True) or stop (False), the other carries what came of it.
    turns: SimpleQueue[bool] = SimpleQueue()
    results: SimpleQueue[tuple[str, object]] = SimpleQueue()

    def callback(step) -> None:
        results.put(("step", step))
        if not turns.get():
            raise _Stopped

    def work() -> None:
        try:
            if turns.get():
                results.put(("end", model.generate(**arguments, callback=callback)))
        except _Stopped:
            pass
        except Exception as error:
            results.put(("error", error))

    # Here each turn is timed. Whoever closes this iterator ends the work in `finally`.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    seconds, kind = 0.0, "step"
    try:
        while kind == "step":
            start = time.perf_counter()
            turns.put(True)
            kind, result = results.get()
            seconds += time.perf_counter() - start
            if kind == "error":
                raise result
            yield result, seconds
    finally:
        turns.put(False)
        thread.join()
