"""MMDObjective: match whole draws of the model with the real row, by policy gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .corruption import CorruptedBatch
from .encoder import FrozenEncoder
from .lift import token_entropy
from .mmd import kernel_means, local_advantages, median_distance, sequence_advantages
from .predictions import Predictions
from .processes import OneProcess
from .tokens import draw_tokens, log_probs

# The bandwidth is measured from so many features a row, and of a large batch from so many altogether.
BANDWIDTH_POSITIONS, BANDWIDTH_FEATURES = 32, 1024


class MMDObjective:
    """The paired conditional MMD of Representation-Space MMD (arXiv 2610.06648), with local credit as an option.

    From one prediction of the student, D = `mmd_groups` x `mmd_samples` rows are drawn: hard tokens at the predicted
    positions, the real ones elsewhere. A frozen encoder reads them and the real row, and every draw is rewarded by how
    near its features are to the real ones and how far from those of other draws. The gradient flows through the
    log-probabilities of the drawn tokens alone, never through the encoder. Unlike a lift of expected embeddings, draws
    show whether tokens that are drawn independently go together.

    `mmd_credit` says which reward a token is given. "sequence" is the published form: one reward for all tokens of a
    group. Its expectation is the exact gradient, but its variance needs batches of hundreds of rows. A number of tokens
    is the window of `mmd.local_advantages`. It is biased by leaving out what a token does to features further away, and
    learns with 16 rows a step. See that function for what is exact.

    Rows with fewer than two predicted positions take no part. With DUO every position is predicted, at every time: the
    kernels cost (L / n)^2 times as much as for n masks, and at small t most draws repeat the clean token, so that their
    advantages are small.

    Args:
        encoder: phi, frozen, of the model's vocabulary. Its layers are taken raw, side by side.
        config: any object with the fields mmd_groups, mmd_samples, mmd_bandwidth and mmd_credit of `DriftConfig`.

    Attributes:
        bandwidth: of the kernel, in feature units. Measured at the first call: `mmd_bandwidth` times the median
            distance between features of real tokens.
    """

    needs_encoder = True

    def __init__(self, encoder: FrozenEncoder, config: Any):
        self.encoder, self.config = encoder, config
        self.bandwidth: Tensor | None = None

    @staticmethod
    def default_layers(num_blocks: int) -> tuple[int, ...]:
        """One block a third up the stack, as published (the 4th of 12)."""
        return (max(1, round(num_blocks / 3)),)

    def __call__(
        self, logits: Tensor | Predictions, batch: CorruptedBatch, processes: OneProcess | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch, called as `DriftObjective` is."""
        config, processes = self.config, processes or OneProcess()
        # 1. Draw D rows from one prediction.
        predictions, predicted = Predictions.of(logits, batch.predicted), batch.predicted
        count = config.mmd_groups * config.mmd_samples
        ids = draw_tokens(predictions, predicted, batch.noise.draws(count))
        # 2. Features of the real row and of every draw, at the predicted positions.
        real = self._features(batch.x_0, batch)
        if self.bandwidth is None:
            self.bandwidth = self._measured_bandwidth(real, batch, processes)
        real = predictions.at(real)
        draws = [predictions.at(self._features(batch.x_0.masked_scatter(predicted, x), batch)) for x in ids.T]
        # 3. Rewards by the kernel, a row at a time, and what they say of every drawn token.
        sizes = predicted.sum(1).tolist()
        columns = predictions.positions % predicted.shape[1]
        rows = zip(real.split(sizes), torch.stack(draws).split(sizes, dim=1), columns.split(sizes), strict=True)
        advantages, sums = zip(*[self._advantages(*row) for row in rows], strict=True)
        advantages = torch.cat(advantages, dim=1)
        # 4. The policy gradient, over the tokens of all processes.
        taking_part = real.new_tensor(sum(n for n in sizes if n >= 2))
        totals = processes.sum(torch.stack([advantages.square().sum(), taking_part, *torch.stack(sums).sum(0)]))
        num_tokens = totals[1].clamp_min(1)
        rms = (totals[0] / (num_tokens * count)).sqrt()
        if config.mmd_credit != "sequence":
            advantages = advantages / rms.clamp_min(torch.finfo(rms.dtype).tiny)
        reward = predictions.total(lambda ell, ids, w: (log_probs(ell, ids) * w).sum(-1), ids, advantages.T)
        loss = -reward / (num_tokens * count)
        attraction, repulsion = totals[2:4] / totals[4].clamp_min(1)
        return loss, {
            "mmd_attraction": attraction,
            "mmd_repulsion": repulsion,
            "mmd_advantage": rms,
            "mmd_bandwidth": self.bandwidth,
            "token_entropy": token_entropy(predictions, predicted),
        }

    def accept(self) -> None:
        """Nothing waits for a step to be accepted."""

    def state_dict(self) -> dict[str, Tensor]:
        """The measured bandwidth: tensors only, fit for safetensors."""
        return {} if self.bandwidth is None else {"bandwidth": self.bandwidth.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore `state_dict()`. A state without a bandwidth lets the next call measure it."""
        self.bandwidth = state.get("bandwidth")

    @torch.no_grad()
    def _features(self, ids: Tensor, batch: CorruptedBatch) -> Tensor:
        """``[B, L, m]``, raw, float32."""
        E = self.encoder.embedding
        return self.encoder.token_features(E[ids.clamp_max(len(E) - 1)], batch.attention_mask)

    def _measured_bandwidth(self, real: Tensor, batch: CorruptedBatch, processes: OneProcess) -> Tensor:
        """From features evenly spread over the positions that exist, of the rows of all processes."""
        steps = torch.arange(BANDWIDTH_POSITIONS, device=real.device)
        lengths = batch.exists.sum(1, keepdim=True)
        order = batch.exists.int().argsort(dim=1, descending=True, stable=True)  # the positions that exist come first
        positions = order.gather(1, steps * lengths // BANDWIDTH_POSITIONS)
        chosen = real.gather(1, positions[..., None].expand(-1, -1, real.shape[-1]))
        chosen = chosen.masked_fill(lengths[..., None] == 0, torch.nan).flatten(0, 1)
        chosen, _ = processes.gather(chosen, BANDWIDTH_POSITIONS)
        chosen = chosen[chosen.isfinite().all(1)]
        scale = median_distance(chosen[:: -(-len(chosen) // BANDWIDTH_FEATURES)])
        if not scale > 0:
            raise ValueError(
                "The bandwidth of objective 'mmd' cannot be measured: the encoder gives all tokens of the first batch "
                "the same features. Use an encoder that tells tokens apart, or another block (feature_layers)."
            )
        return self.config.mmd_bandwidth * scale

    def _advantages(self, real: Tensor, draws: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of one row: the advantage of every drawn token ``[D, n]``, and (attraction, repulsion, 1) for the log."""
        config = self.config
        G, B, n = config.mmd_groups, config.mmd_samples, len(real)
        if n < 2:  # there are no two positions to compare
            return draws.new_zeros(G * B, n), draws.new_zeros(3)
        if config.mmd_credit == "sequence":
            groups = [kernel_means(real, group, self.bandwidth) for group in draws.split(B)]
            attraction, repulsion = (torch.stack(parts) for parts in zip(*groups, strict=True))
            advantages = sequence_advantages(attraction, repulsion).repeat_interleave(B)[:, None].expand(-1, n)
            pairs = G * B * (B - 1)
        else:
            attraction, repulsion = kernel_means(real, draws, self.bandwidth)
            advantages = local_advantages(attraction, repulsion, positions, config.mmd_credit)
            pairs = G * B * (G * B - 1)
        means = [attraction.mean(), repulsion.mean(-1).sum() / pairs, attraction.new_ones(())]
        return advantages, torch.stack(means)
