"""DriftObjective: Algorithm 1 of the TokenDrift paper, from logits to a loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .corruption import CorruptedBatch
from .drift import unchecked_drift_field
from .encoder import FrozenEncoder
from .lift import soft_lift, token_entropy
from .losses import feature_loss, mirror_loss
from .predictions import Predictions
from .processes import OneProcess
from .queue import FeatureQueue


class DriftObjective:
    """One training step of TokenDrift (arXiv 2605.19470, Algorithm 1). It needs no Trainer.

    Example:
        A plain loop over blocks of clean ids ``[B, L]``, with `model` and a `config`::

            import torch
            from tokendrift_hf import DriftObjective, FrozenEncoder
            from tokendrift_hf.hub.process_tokendrift import stratified_times
            from tokendrift_hf.objective.corruption import corrupt
            from tokendrift_hf.objective.noise import TRAIN, row_noise

            objective = DriftObjective(FrozenEncoder.copy_of(model), config)
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
            for step, input_ids in enumerate(blocks):
                noise = row_noise((0, TRAIN, step), range(len(input_ids)), input_ids.shape[1], model.config.vocab_size)
                batch = corrupt(model.process, {"input_ids": input_ids}, noise, stratified_times(noise.time))
                logits = model(input_ids=batch.x_t, timesteps=batch.t).logits
                loss, statistics = objective(logits, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                objective.accept()

    Args:
        encoder: phi, frozen, of the model's vocabulary.
        config: any object with the fields that `DriftConfig` describes: objective, drift_scale, mirror_step_size,
            mirror_eta, encoder_input, drift_kernel, temperatures, attraction, repulsion, queue_size, gather_features,
            feature_pooling and feature_tokens.

    Attributes:
        real_queue: Q_real, features of past clean rows.
        generated_queue: Q_gen, features of past predictions.
    """

    needs_encoder = True
    default_layers = (-2, -1)  # the last two blocks, as in the paper

    def __init__(self, encoder: FrozenEncoder, config: Any):
        self.encoder, self.config = encoder, config
        self.real_queue, self.generated_queue = FeatureQueue(config.queue_size), FeatureQueue(config.queue_size)
        self._to_push: tuple[Tensor, Tensor] | None = None

    def __call__(
        self, logits: Tensor | Predictions, batch: CorruptedBatch, processes: OneProcess | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch.

        Args:
            logits: l, ``[B, L, V]``, of the student on ``batch.x_t``, or `predict` of it, which never makes all of
                them. They may have columns of -inf or -1e6.
            batch: what the student saw, of which text, and the noise that chooses the positions of token features.
            processes: those that hold the other rows of this micro-batch. None: there are none.

        Returns:
            The share of this process in the loss, a scalar with a graph to the logits: the shares of all processes add
            up to the mean over the micro-batch. And detached scalars for the log.
        """
        config, E, processes = self.config, self.encoder.embedding, processes or OneProcess()
        predicted, last_id = batch.predicted, len(E) - 1
        predictions = Predictions.of(logits, predicted).narrowed(len(E))
        uniforms = batch.noise.draws(1)[0] if config.encoder_input == "sampled_st" else None
        positions = self._feature_positions(batch, processes)
        # Line 3: encoder inputs, p E at the predicted positions and E[x_t] elsewhere.
        x_t = batch.x_t.clamp_max(last_id)
        lifted = soft_lift(predictions, E, x_t, predicted, mode=config.encoder_input, uniforms=uniforms)
        # Line 4: generated and real features.
        h = self.encoder(lifted, batch.attention_mask, positions)
        with torch.no_grad():
            u = self.encoder(E[batch.x_0.clamp_max(last_id)], batch.attention_mask, positions)
        # Line 5: those of all processes.
        all_h, all_u, own = h.detach(), u, range(len(h))
        if config.gather_features:
            features, own = processes.gather(torch.cat([h.detach(), u], dim=1), len(h) // len(predicted))
            all_h, all_u = features.chunk(2, dim=1)
        # Lines 6 and 7: the field at every anchor, with references from the queues as well.
        current_h, current_u = all_h, all_u
        if batch.attention_mask is None and processes.share == 1:
            V, statistics = self._field(all_h, all_u)
        else:  # a row of padding alone has no feature but zeros: it is no anchor and no reference
            present = (all_u != 0).any(dim=1).nonzero().squeeze(1)
            current_h, current_u, V = all_h[present], all_u[present], torch.zeros_like(all_h)
            V[present], statistics = self._field(current_h, current_u)
        V = V[own.start : own.stop]
        # Lines 8 and 9: targets along the field, and the loss; or the mirror teacher of section 3.4.
        loss, of_loss = self._loss(predictions, h, V, processes)
        statistics |= of_loss | {"token_entropy": token_entropy(predictions, predicted)}
        # Line 11 follows once the step is known to be good.
        self._to_push = current_u, current_h
        return loss * processes.share, statistics

    def accept(self) -> None:
        """Push the features of the last call into the queues: call it once that loss has turned out finite."""
        if self._to_push is not None:
            real, generated = self._to_push
            # Of a finite loss they are finite, so no check has to wait for the device.
            self.real_queue.push(real, checked=True)
            self.generated_queue.push(generated, checked=True)
            self._to_push = None

    def state_dict(self) -> dict[str, Tensor]:
        """Both queues: tensors only, fit for safetensors, which later pushes leave as they are. Nothing is copied."""
        return {"real": self.real_queue.features, "generated": self.generated_queue.features}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore `state_dict()`. A state of another objective, which has no queues, leaves them empty."""
        for name, queue in (("real", self.real_queue), ("generated", self.generated_queue)):
            queue.load_state_dict({"features": state.get(name, torch.empty(0, 0))})
        self._to_push = None

    def _feature_positions(self, batch: CorruptedBatch, processes: OneProcess) -> Tensor | None:
        """``[B, S]``, where the encoder's features are taken. None: one feature a row, the mean."""
        if self.config.feature_pooling == "mean":
            return None
        shortest = batch.exists.shape[1]
        if batch.attention_mask is not None or processes.share < 1:  # only the device knows, or another process
            lengths = batch.exists.sum(1)
            shortest = int(processes.min(lengths.masked_fill(lengths == 0, shortest).min()))
        count = min(self.config.feature_tokens, shortest)
        order = batch.noise.order.float().to(batch.exists.device)  # not every device has float64
        return order.masked_fill(~batch.exists, -1).topk(count).indices

    def _loss(
        self, predictions: Predictions, h: Tensor, V: Tensor, processes: OneProcess
    ) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config
        if config.objective == "feature":
            return feature_loss(h, V, config.drift_scale), {}
        step = {"step_size": config.mirror_step_size} if config.mirror_eta is None else {"eta": config.mirror_eta}
        divergence = config.objective.removeprefix("mirror_")
        return mirror_loss(
            predictions, h, V, predictions.predicted, divergence=divergence, reduce=processes.sum, **step
        )

    def _field(self, anchors: Tensor, real: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """V at the anchors, none of which is its own reference, and what moves while the normalised loss stays."""
        config, statistics = self.config, {}
        if not len(anchors):
            return anchors, statistics
        real, generated = self.real_queue.union(real), self.generated_queue.union(anchors)
        drift = unchecked_drift_field(
            anchors,
            real,
            generated,
            temperatures=config.temperatures,
            self_index=torch.arange(len(anchors), device=anchors.device),
            attraction=config.attraction,
            repulsion=config.repulsion,
            kernel=config.drift_kernel,
        )
        for i, tau in enumerate(config.temperatures):
            statistics[f"drift_norm_{tau:g}"] = drift.rms_per_temperature[i]
            statistics[f"effective_references_{tau:g}"] = drift.effective_references[i]
        statistics["feature_distance"] = (real.mean(0) - generated.mean(0)).norm()
        statistics["queue_fill"] = torch.tensor(float(len(self.real_queue)), device=real.device)
        return drift.field, statistics
