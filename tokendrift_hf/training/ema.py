"""A moving average of the weights, kept in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import TrainerCallback


class WeightEMA:
    """An exponential moving average of the trainable parameters, in float32 whatever their own type.

    The decay is warmed up as in the reference repositories: min(decay, (1 + n) / (10 + n)) after n updates.

    Args:
        model: the (unwrapped) model, whose trainable parameters are tracked by name.
        decay: in (0, 1).
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay, self.num_updates = decay, 0
        self.shadow = {name: p.detach().float().clone() for name, p in _trainable(model)}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take in the present weights. Call it once after every optimizer step."""
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        for name, p in _trainable(model):
            self.shadow[name].lerp_(p.detach().float(), 1 - decay)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Inside, `model` has the averaged weights. Afterwards it has its own, bit for bit, whatever happened."""
        raw = {name: p.detach().clone() for name, p in _trainable(model)}
        try:
            _assign(model, self.shadow)
            yield
        finally:
            _assign(model, raw)

    @torch.no_grad()
    def reset(self, model: nn.Module) -> None:
        """Start anew at the present weights."""
        self.num_updates = 0
        for name, p in _trainable(model):
            self.shadow[name].copy_(p)

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors only, fit for safetensors."""
        return {"num_updates": torch.tensor(self.num_updates)} | {f"shadow.{k}": v for k, v in self.shadow.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore `state_dict()`.

        Raises:
            ValueError: the names are not those of this model.
        """
        found = {name.removeprefix("shadow.") for name in state} - {"num_updates"}
        if found != set(self.shadow):
            raise ValueError(
                f"The saved moving average belongs to another model: {sorted(found ^ set(self.shadow))[:5]} differ."
            )
        self.num_updates = int(state["num_updates"])
        for name, shadow in self.shadow.items():
            shadow.copy_(state[f"shadow.{name}"])


class EMACallback(TrainerCallback):
    """Lets `ema` take in the weights after every optimizer step."""

    def __init__(self, ema: WeightEMA):
        self.ema = ema

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.ema.update(model)


def _trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


@torch.no_grad()
def _assign(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, p in _trainable(model):
        p.copy_(values[name])
