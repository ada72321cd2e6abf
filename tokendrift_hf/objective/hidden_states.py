"""The hidden states of a model up to a block, without running what comes after it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class _Reached(Exception):
    """The forward pass has come as far as it is needed."""


class HiddenStates:
    """The hidden states 0 to `num_blocks` of a model, [B, L, d] each. The blocks after these are not run.

    Models of this package take the number as an argument. Others are stopped by a hook on the first block that is not
    needed, if a trial shows that this gives what their `output_hidden_states` gives. Else they run to their end.

    Args:
        model: of transformers, or of this package.
        num_blocks: how many blocks are run, 0 to all.
    """

    def __init__(self, model: nn.Module, num_blocks: int):
        self.model, self.num_blocks = model, num_blocks
        self.of_ours = hasattr(model, "process")
        self.stops = self.of_ours and "num_blocks" in inspect.signature(model.hidden_states).parameters
        self.blocks: Sequence[nn.Module] = ()
        if not self.stops and num_blocks < model.config.num_hidden_layers:
            self.blocks = self._blocks()

    def __call__(self, inputs_embeds: Tensor, timesteps: Tensor, attention_mask: Tensor | None) -> Sequence[Tensor]:
        if self.stops:
            return self.model.hidden_states(inputs_embeds, timesteps, attention_mask, num_blocks=self.num_blocks)[0]
        if self.blocks:
            return self._stopped(self.blocks, inputs_embeds, timesteps, attention_mask)
        return self._run(inputs_embeds, timesteps, attention_mask)

    def _run(self, inputs_embeds: Tensor, timesteps: Tensor, attention_mask: Tensor | None) -> Sequence[Tensor]:
        if self.of_ours:  # without the vocabulary head
            return self.model.hidden_states(inputs_embeds, timesteps, attention_mask)[0]
        return self.model(
            inputs_embeds=inputs_embeds, attention_mask=attention_mask, output_hidden_states=True, return_dict=True
        ).hidden_states

    def _stopped(self, blocks: Sequence[nn.Module], *inputs) -> list[Tensor]:
        """What each of the first blocks is given, and the one at which the pass ends."""
        states: list[Tensor] = []

        def note(module, args, kwargs):
            states.append(args[0] if args else next(iter(kwargs.values())))
            if len(states) > self.num_blocks:
                raise _Reached

        handles = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks[: self.num_blocks + 1]]
        try:
            self._run(*inputs)
        except _Reached:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return states

    @torch.no_grad()
    def _blocks(self) -> Sequence[nn.Module]:
        """The blocks, if stopping at one of them gives the same hidden states, bit for bit, or else nothing."""
        count, weight = self.model.config.num_hidden_layers, self.model.get_input_embeddings().weight
        inputs = weight[:4][None], weight.new_zeros(1, dtype=torch.float32), None
        expected = self._run(*inputs)[: self.num_blocks + 1]
        for module in self.model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                found = self._stopped(list(module), *inputs)
                if len(found) == len(expected) and all(map(torch.equal, found, expected)):
                    return list(module)
        return ()
