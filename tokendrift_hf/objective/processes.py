"""What an objective asks of the other processes that hold rows of the same micro-batch."""

from __future__ import annotations

from torch import Tensor


class OneProcess:
    """All rows are here: the default of every objective. `training.gather.AllProcesses` answers the same for many.

    Attributes:
        share: the fraction of the micro-batch's rows that this process holds, in (0, 1].
    """

    share = 1.0

    def gather(self, x: Tensor, per_row: int = 1) -> tuple[Tensor, range]:
        """``x`` of all processes without gradient, ``per_row`` entries a row of the batch, and where its own lie."""
        return x.detach(), range(len(x))

    def sum(self, x: Tensor) -> Tensor:
        """The sum over processes of a tensor that has one shape on all of them. No gradient."""
        return x.detach()

    def min(self, x: Tensor) -> Tensor:
        """The smallest of the scalars of all processes."""
        return x.detach()

    def token_mean(self, totals: Tensor, tokens: Tensor) -> Tensor:
        """The share of this process in a mean over the tokens of a step.

        Args:
            totals: ``[B]``, the sums over the tokens of a row.
            tokens: ``[B]``, how many these are.
        """
        return totals.sum() / tokens.sum().clamp_min(1)
