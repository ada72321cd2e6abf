"""The frozen encoder phi: embeddings in, unit features out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from .hidden_states import HiddenStates


class FrozenEncoder:
    """A frozen model as feature space (section 4.1 of the paper: a copy of the initial checkpoint, last two blocks).

    It is no `nn.Module`, so it never lands in an optimizer, a checkpoint or a push. Gradients flow through it to its
    inputs, never to its weights. Blocks above the deepest layer are not run.

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
        ValueError: no model, a layer that the model does not have, or a time outside [0, 1].
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[int] | Callable[[int], Sequence[int]] = (-2, -1),
        timestep: float = 0.0,
        frozen: Callable[[], AbstractContextManager] | None = None,
    ):
        if not isinstance(getattr(model, "config", None), PreTrainedConfig) or isinstance(model, type):
            raise ValueError(
                f"The encoder is {str(model)[:60]!r}. Needed is a model of transformers, or 'base' with adapters."
            )
        if not isinstance(timestep, (int, float)) or not 0 <= timestep <= 1:
            raise ValueError(f"timestep={timestep!r}. A diffusion time is from 0 (clean text) to 1 (noise).")
        count = model.config.num_hidden_layers + 1
        layers = layers(count - 1) if callable(layers) else layers
        whole = isinstance(layers, (list, tuple)) and all(type(layer) is int for layer in layers)
        if not whole or not layers or any(not -count <= layer < count for layer in layers):
            raise ValueError(
                f"feature_layers={layers!r}: this encoder has hidden states 0 (the embeddings) to {count - 1} "
                f"(its last block), or -{count} to -1. Give a list of these numbers."
            )
        self.model = model if frozen else model.eval().requires_grad_(False)
        self.layers, self.timestep = tuple(layers), timestep
        self.frozen = frozen or nullcontext
        self._indices = [layer % count for layer in layers]
        self._states = HiddenStates(model, max(self._indices))

    @classmethod
    def copy_of(cls, model: PreTrainedModel, **kwargs) -> FrozenEncoder:
        """Freeze a copy, and leave `model` as it is."""
        return cls(copy.deepcopy(model), **kwargs)

    @classmethod
    def without_adapters(cls, model, base_features: Tensor | None = None, **kwargs) -> FrozenEncoder:
        """The base of a peft model, with its adapters disabled while it encodes: no second copy of the weights.

        Args:
            model: of peft.
            base_features: what `probe` gave for the base before it got adapters. None: the base is whatever the model
                is with its adapters off.
            kwargs: as for the class.

        Raises:
            ValueError: the model has no adapters, or features and gradients would be wrong: with activation
                checkpointing (the recomputation in backward would run with adapters), with dropout, where weights that
                are trained reach the encoder, or where the adapters have changed the base.
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
        encoder = cls(model, frozen=model.disable_adapter, **kwargs)
        encoder._check_that_it_is_frozen(base_features)
        return encoder

    @classmethod
    def probe(cls, model: PreTrainedModel, **kwargs) -> Tensor:
        """The features ``[1, n, m]`` of the first few ids of a model as it is now, to compare it with later."""
        return cls(model, frozen=nullcontext, **kwargs)._probe().detach()

    def _probe(self) -> Tensor:
        return self.token_features(self.embedding[None, :8])

    def _check_that_it_is_frozen(self, base_features: Tensor | None) -> None:
        with self.frozen():  # what is off now is not trained as part of the encoder
            trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
            in_table = self.model.get_input_embeddings().weight.requires_grad
        with torch.enable_grad():
            features = self._probe()
        gradients = [None] * len(trained)
        if features.requires_grad:
            gradients = torch.autograd.grad(features.sum(), list(trained.values()), allow_unused=True)
        reached = [name for name, gradient in zip(trained, gradients, strict=True) if gradient is not None]
        if reached or in_table:
            raise ValueError(
                "encoder='base' would not stay frozen: with the adapters off, weights that are trained still reach it "
                f"({', '.join(reached[:3]) or 'the embedding table'}). Train nothing but adapters (bias: none), or "
                "leave encoder out for a frozen copy."
            )
        if base_features is not None and not torch.allclose(features, base_features, rtol=1e-4, atol=1e-5):
            difference = float((features - base_features).norm() / base_features.norm())
            raise ValueError(
                f"encoder='base': with the adapters off the model is not its base any more. Features differ by "
                f"{difference:.2g} of their norm, since adding these adapters changed the base's weights, as some "
                "initialisations do (PiSSA is one). Choose another, or leave encoder out for a frozen copy."
            )

    @classmethod
    def of(
        cls,
        encoder: str | PreTrainedModel | FrozenEncoder,
        model,
        checkpointing: bool = False,
        base_features: Tensor | None = None,
        **kwargs,
    ) -> FrozenEncoder:
        """What a user may give as the encoder of `model`, the model that is trained: "base", a model, an encoder.

        Raises:
            ValueError: the trained model itself, or "base" with activation checkpointing or as in
                `without_adapters`.
        """
        if isinstance(encoder, str) and encoder == "base":
            if checkpointing:
                raise ValueError(
                    "encoder='base' cannot be combined with gradient_checkpointing: backward would recompute the "
                    "encoder with the adapters on. Switch one of them off."
                )
            return cls.without_adapters(model, base_features, **kwargs)
        shared = isinstance(encoder, FrozenEncoder) and encoder.frozen is not nullcontext
        found = encoder.model if isinstance(encoder, FrozenEncoder) else encoder
        if not shared and any(found is module for module in model.modules()):
            raise ValueError("encoder= is the model that is trained. Leave encoder out: a frozen copy is the default.")
        if isinstance(encoder, FrozenEncoder):
            return encoder
        return cls(encoder, **kwargs)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Whether it can embed what a model of `vocab_size` ids predicts. Only the last id, the mask, may be unknown.

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
        """E, ``[V, d]``, without gradient: what the frozen blocks are given for each id, scaled if they scale."""
        module = self.model.get_input_embeddings()
        with self.frozen():  # where adapters replace the table, the encoder keeps the base's
            table = module.weight.detach()
        return table * module.embed_scale if hasattr(module, "embed_scale") else table

    def to(self, device: torch.device) -> FrozenEncoder:
        self.model.to(device)
        return self

    def token_features(self, inputs_embeds: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The hidden states of the layers side by side as they are, ``[B, L, m]``, float32 or wider."""
        timesteps = inputs_embeds.new_full((inputs_embeds.shape[0],), self.timestep, dtype=torch.float32)
        with self.frozen():
            hidden_states = self._states(inputs_embeds, timesteps, attention_mask)
        features = torch.cat([hidden_states[index] for index in self._indices], dim=-1)
        return features.to(torch.promote_types(features.dtype, torch.float32))

    def __call__(
        self, inputs_embeds: Tensor, attention_mask: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Features of unit norm, float32.

        Args:
            inputs_embeds: ``[B, L, d]``.
            attention_mask: ``[B, L]``, non-zero where a position exists. The mean leaves the others out.
            positions: ``[B, S]`` indices: one feature for each of these positions instead of their mean.

        Returns:
            ``[B, m]``, or ``[B * S, m]`` with `positions`, m = d * number of layers. Zeros for a position that does not
            exist, and for a row that has none.

        Raises:
            TypeError: something else than tensors, embeddings that are no floating numbers, positions that are no
                integers.
            ValueError: shapes that do not fit.
        """
        _check_inputs(inputs_embeds, attention_mask, positions)
        x = self.token_features(inputs_embeds, attention_mask).float()
        exists = x.new_ones(x.shape[:2]) if attention_mask is None else attention_mask.bool().to(x.dtype)
        if positions is not None:
            x = x * exists[..., None]
            x = x.gather(1, positions.unsqueeze(-1).expand(-1, -1, x.shape[-1])).flatten(0, 1)
        else:
            x = (x * exists[..., None]).sum(dim=1) / exists.sum(dim=1, keepdim=True).clamp_min(1)
        return F.normalize(x, dim=-1)


def _check_inputs(inputs_embeds: Tensor, attention_mask: Tensor | None, positions: Tensor | None) -> None:
    for name, x in {"inputs_embeds": inputs_embeds, "attention_mask": attention_mask, "positions": positions}.items():
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, but it is {type(x).__name__}.")
    if not inputs_embeds.is_floating_point():
        raise TypeError(f"inputs_embeds must be floating numbers [B, L, d], but they are {inputs_embeds.dtype}.")
    if inputs_embeds.dim() != 3:
        raise ValueError(f"inputs_embeds must be [B, L, d], got {list(inputs_embeds.shape)}.")
    if attention_mask is not None and attention_mask.shape != inputs_embeds.shape[:2]:
        raise ValueError(
            f"attention_mask must be {list(inputs_embeds.shape[:2])} like the embeddings, got "
            f"{list(attention_mask.shape)}."
        )
    if positions is not None:
        if positions.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"positions must be integers, but they are {positions.dtype}.")
        if positions.dim() != 2 or len(positions) != len(inputs_embeds):
            raise ValueError(f"positions must be [{len(inputs_embeds)}, S], got {list(positions.shape)}.")
