"""What an attempt at a run begins with, so that the next attempt can begin with the same."""

from __future__ import annotations

import torch
from transformers import Trainer


class Restart:
    """The trainable weights, extra state and generators of a trainer, as they are now.

    Args:
        trainer: a `ResumableTrainer`, whose weights are whole, neither split by FSDP nor replaced by DeepSpeed.
    """

    def __init__(self, trainer: Trainer):
        self.trainer, parameters = trainer, trainer.model.named_parameters()
        self.weights = {name: p.detach().cpu().clone() for name, p in parameters if p.requires_grad}
        self.extra = trainer.extra_state() | trainer.process_state()
        self.generators = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    @torch.no_grad()
    def restore(self) -> None:
        """Bring the trainer back to this point. Its optimizer forgets all steps."""
        trainer, parameters = self.trainer, dict(self.trainer.model.named_parameters())
        for name, value in self.weights.items():
            parameters[name].copy_(value)
        trainer.load_extra_state(self.extra)
        if trainer.ema is not None:
            trainer.ema.reset(trainer.model)
        if trainer.optimizer is not None:
            getattr(trainer.optimizer, "optimizer", trainer.optimizer).state.clear()
        torch.set_rng_state(self.generators[0])
        if self.generators[1]:
            torch.cuda.set_rng_state_all(self.generators[1])
