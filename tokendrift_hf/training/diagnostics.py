"""Diagnostics: what moves while the normalised loss does not, from one log line to the next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..objective.drift import DriftField


class Diagnostics:
    """Scalars noted in every micro-step, averaged when the log asks for them. They stay on their device till then."""

    def __init__(self):
        self._values: dict[str, list[Tensor]] = defaultdict(list)

    def note(self, **scalars: Tensor) -> None:
        """Keep scalars, detached, under the names of the log."""
        for name, value in scalars.items():
            self._values[name].append(value.detach())

    def note_drift(self, drift: DriftField, real: Tensor, generated: Tensor, temperatures: Sequence[float]) -> None:
        """The field before normalisation, per temperature, and the distance between the mean references ``[n, m]``."""
        for i, tau in enumerate(temperatures):
            self._values[f"drift_norm_{tau:g}"].append(drift.rms_per_temperature[i])
            self._values[f"effective_references_{tau:g}"].append(drift.effective_references[i])
        self.note(feature_distance=(real.mean(0) - generated.mean(0)).norm())

    def means(self, average: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """The mean of each since the last call; `average` takes the mean of a vector over processes."""
        if not self._values:
            return {}
        means = [float(torch.stack(values).mean()) for values in self._values.values()]
        names = list(self._values)
        self._values.clear()
        return dict(zip(names, average(torch.tensor(means, dtype=torch.float64)).tolist(), strict=True))
