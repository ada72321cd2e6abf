"""The frozen encoder phi: embeddings in, unit features out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel


class FrozenEncoder:
    """A frozen model as feature space (section 4.1 of the paper: a copy of the initial checkpoint, last two blocks).

    It is no `nn.Module`, so it never lands in an optimizer, a checkpoint or a push. Gradients flow through it to its
    inputs, never to its weights.

    Args:
        model: a transformers model that takes `inputs_embeds`. It is put into eval mode and frozen in place, unless
            `frozen` is given: pass a copy (`FrozenEncoder.copy_of`) if the model is trained elsewhere.
        layers: which hidden states make the feature, concatenated: 0 the embeddings, i the output of block i, negative
            from the end (-1 is the last block, before any final norm). Or a function that names them, given the number
            of blocks.
        timestep: the diffusion time in [0, 1] that a time-conditioned model is told.
        frozen: a context in which `model` acts as the frozen encoder although it is trained outside of it
            (peft's `disable_adapter`).

    Raises:
        ValueError: a layer that the model does not have, or a time outside [0, 1].
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[int] | Callable[[int], Sequence[int]] = (-2, -1),
        timestep: float = 0.0,
        frozen: Callable[[], AbstractContextManager] | None = None,
    ):
        if not 0 <= timestep <= 1:
            raise ValueError(f"timestep={timestep}. A diffusion time is from 0 (clean text) to 1 (noise).")
        self.model = model if frozen else model.eval().requires_grad_(False)
        count = model.config.num_hidden_layers + 1
        self.layers, self.timestep = tuple(layers(count - 1) if callable(layers) else layers), timestep
        self.frozen = frozen or nullcontext
        if not self.layers or any(not -count <= layer < count for layer in self.layers):
            raise ValueError(
                f"feature_layers={list(self.layers)}: this encoder has hidden states 0 (the embeddings) to {count - 1} "
                f"(its last block), or -{count} to -1."
            )

    @classmethod
    def copy_of(cls, model: PreTrainedModel, **kwargs) -> FrozenEncoder:
        """Freeze a copy, and leave `model` as it is."""
        return cls(copy.deepcopy(model), **kwargs)

    @classmethod
    def without_adapters(cls, model, **kwargs) -> FrozenEncoder:
        """The base of a peft model, with its adapters disabled while it encodes: no second copy of the weights.

        Raises:
            ValueError: the model has no adapters, or features and gradients would be wrong: with activation
                checkpointing (the recomputation in backward would run with adapters) or with dropout.
        """
        if not hasattr(model, "disable_adapter"):
            raise ValueError("encoder='base' needs adapters: pass a peft_config, or leave encoder out for a copy.")
        fields = {name: p for name, p in model.config.to_dict().items() if "dropout" in name and type(p) is float and p}
        dropouts = {name: module.p for name, module in model.named_modules() if getattr(module, "p", 0)}
        if fields or dropouts:
            found = ", ".join(f"{name}.p={p}" for name, p in list(dropouts.items())[:3])
            raise ValueError(
                f"encoder='base' shares its modules with the student, whose dropout would reach the encoder (model "
                f"{', '.join(f'{name}={p}' for name, p in fields.items()) or 'dropout=0'}, modules: "
                f"{found or 'none'}). Set dropout: 0 and lora_dropout=0, or leave encoder out for a frozen copy."
            )
        # transformers renamed it in 5.24, and warns of the old name.
        name = (
            "is_activation_checkpointing"
            if hasattr(model, "is_activation_checkpointing")
            else "is_gradient_checkpointing"
        )
        if getattr(model, name, False):
            raise ValueError(
                "encoder='base' cannot be combined with activation checkpointing: backward would recompute the encoder "
                "with the adapters on. Switch one of them off."
            )
        return cls(model, frozen=model.disable_adapter, **kwargs)

    @classmethod
    def of(
        cls, encoder: str | PreTrainedModel | FrozenEncoder, model, checkpointing: bool = False, **kwargs
    ) -> FrozenEncoder:
        """What a user may give as the encoder of `model`, the model that is trained: "base", a model, an encoder.

        Raises:
            ValueError: the trained model itself; "base" with activation checkpointing or as in
                `without_adapters`.
        """
        if isinstance(encoder, str) and encoder == "base":
            if checkpointing:
                raise ValueError(
                    "encoder='base' cannot be combined with gradient_checkpointing: backward would recompute the "
                    "encoder with the adapters on. Switch one of them off."
                )
            return cls.without_adapters(model, **kwargs)
        shared = isinstance(encoder, FrozenEncoder) and encoder.frozen is not nullcontext
        found = encoder.model if isinstance(encoder, FrozenEncoder) else encoder
        if not shared and any(found is module for module in model.modules()):
            raise ValueError("encoder= is the model that is trained. Leave encoder out: a frozen copy is the default.")
        if isinstance(encoder, FrozenEncoder):
            return encoder
        return cls(encoder, **kwargs)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Whether it can embed what a model of `vocab_size` ids predicts; only the last id, the mask, may be unknown.

        Raises:
            ValueError: it cannot.
        """
        rows = len(self.embedding)
        if rows not in (vocab_size, vocab_size - 1):
            raise ValueError(
                f"The encoder embeds {rows} ids and the model predicts {vocab_size}. They must share a tokenizer (the "
                "encoder may lack the last id, the mask)."
            )

    @property
    def embedding(self) -> Tensor:
        """E, ``[V, d]``, without gradient: what the model's blocks are given for each id, scaled where it scales."""
        module = self.model.get_input_embeddings()
        table = module.weight.detach()
        return table * module.embed_scale if hasattr(module, "embed_scale") else table

    def to(self, device: torch.device) -> FrozenEncoder:
        self.model.to(device)
        return self

    def hidden_states(self, inputs_embeds: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, ...]:
        model = self.model
        if hasattr(model, "process"):  # a diffusion model of ours: skip the vocabulary head
            timesteps = inputs_embeds.new_full((inputs_embeds.shape[0],), self.timestep, dtype=torch.float32)
            return model.hidden_states(inputs_embeds, timesteps, attention_mask)[0]
        return model(
            inputs_embeds=inputs_embeds, attention_mask=attention_mask, output_hidden_states=True, return_dict=True
        ).hidden_states

    def token_features(self, inputs_embeds: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The hidden states of the layers side by side as they are, ``[B, L, m]``, float32 or wider."""
        with self.frozen():
            hidden_states = self.hidden_states(inputs_embeds, attention_mask)
        features = torch.cat([hidden_states[layer] for layer in self.layers], dim=-1)
        return features.to(torch.promote_types(features.dtype, torch.float32))

    def __call__(
        self, inputs_embeds: Tensor, attention_mask: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Features of unit norm, float32.

        Args:
            inputs_embeds: ``[B, L, d]``.
            attention_mask: ``[B, L]``, non-zero where a position exists; the mean leaves the others out.
            positions: ``[B, S]`` indices: one feature for each of these positions instead of their mean.

        Returns:
            ``[B, m]``, or ``[B * S, m]`` with `positions`; m = d * number of layers. Zeros for a position that does not
            exist, and for a row that has none.
        """
        x = self.token_features(inputs_embeds, attention_mask).float()
        exists = x.new_ones(x.shape[:2]) if attention_mask is None else attention_mask.bool().to(x.dtype)
        if positions is not None:
            x = x * exists[..., None]
            x = x.gather(1, positions.unsqueeze(-1).expand(-1, -1, x.shape[-1])).flatten(0, 1)
        else:
            x = (x * exists[..., None]).sum(dim=1) / exists.sum(dim=1, keepdim=True).clamp_min(1)
        return F.normalize(x, dim=-1)
