"""A first-in, first-out memory of features: Q_real and Q_gen of the paper's Algorithm 1."""

from __future__ import annotations

import torch
from torch import Tensor


class FeatureQueue:
    """The newest ``size`` feature rows, oldest first. Never padded: it holds what was pushed and nothing else.

    Rows are detached float32 and live on the device of the last push. A size of 0 is a queue that stays empty.

    Args:
        size: largest number of rows, >= 0.

    Raises:
        ValueError: a size that is negative or no whole number.
    """

    def __init__(self, size: int) -> None:
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise ValueError(f"The queue size must be a whole number, 0 (no queue) or more, got {size!r}.")
        self.size = size
        self._features = torch.empty(0, 0)

    def __len__(self) -> int:
        return self._features.shape[0]

    @property
    def features(self) -> Tensor:
        """``[n, m]``, n = ``len(self)`` <= size, oldest first (``[0, 0]`` before the first push)."""
        return self._features

    def push(self, features: Tensor, checked: bool = False) -> None:
        """Append rows ``[B, m]``, any B, and drop the oldest beyond ``size``.

        Args:
            features: the rows.
            checked: they are known to be finite, so nothing waits for their device.

        Raises:
            TypeError: no floating tensor.
            ValueError: not two-dimensional, another m than the rows that are already held, or a number that is not
                finite: it would stay in the references for a whole turn of the queue.
        """
        self._check(features)
        if not checked and not features.isfinite().all():
            count = int((~features.isfinite().all(1)).sum())
            raise ValueError(f"{count} of {len(features)} features hold NaN or infinite numbers: none was taken in.")
        rows = features.detach().to(torch.float32)
        if len(self) > 0:
            rows = torch.cat([self._features.to(rows.device), rows])
        # clone: a view would keep the evicted rows alive, or follow later writes to the caller's tensor.
        self._features = rows[max(0, len(rows) - self.size) :].clone()

    def union(self, features: Tensor) -> Tensor:
        """``[B + n, m]``: the rows given, then the queue's. So ``arange(B)`` indexes the current rows among them.

        Raises:
            TypeError, ValueError: as `push`, but for numbers that are not finite.
        """
        self._check(features)
        return torch.cat([features, self._features.to(features.device)]) if len(self) > 0 else features

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors only, fit for safetensors: those that are held. A push makes new ones and leaves them as they are."""
        return {"features": self._features}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the rows in their order. Of more than ``size`` the newest ``size`` stay.

        Raises:
            ValueError: no two-dimensional floating ``"features"`` in the state.
        """
        features = state.get("features") if isinstance(state, dict) else None
        if not isinstance(features, Tensor) or not features.is_floating_point() or features.dim() != 2:
            found = sorted(state) if isinstance(state, dict) else type(state).__name__
            raise ValueError(f"A queue state is {{'features': [n, m]}} with a floating tensor, got {found}.")
        features = state["features"].detach().to(torch.float32)
        self._features = features[max(0, len(features) - self.size) :].clone()

    def _check(self, features: Tensor) -> None:
        if not isinstance(features, Tensor) or not features.is_floating_point():
            found = features.dtype if isinstance(features, Tensor) else type(features).__name__
            raise TypeError(f"Features must be a floating tensor, but they are {found}.")
        if features.dim() != 2:
            raise ValueError(f"Features must be [rows, m], got shape {list(features.shape)}.")
        if len(self) > 0 and features.shape[1] != self._features.shape[1]:
            raise ValueError(
                f"The queue holds features of size {self._features.shape[1]}, got {features.shape[1]}. "
                "Another encoder, other layers or another pooling need a new queue."
            )
