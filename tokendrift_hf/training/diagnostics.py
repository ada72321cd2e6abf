"""Diagnostics: what moves while the normalised loss does not, from one log line to the next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor


class Diagnostics:
    """Scalars noted in every micro-step, averaged when the log asks for them. They stay on their device till then."""

    def __init__(self):
        self._values: dict[str, list[Tensor]] = defaultdict(list)

    def note(self, **scalars: Tensor) -> None:
        """Keep scalars, detached, under the names of the log."""
        for name, value in scalars.items():
            self._values[name].append(value.detach())

    def means(self, average: Callable[[list[float]], list[float]]) -> dict[str, float]:
        """The mean of each since the last call. `average` takes the means of a list of them over processes."""
        if not self._values:
            return {}
        means = [float(torch.stack(values).mean()) for values in self._values.values()]
        names = list(self._values)
        self._values.clear()
        return dict(zip(names, average(means), strict=True))
