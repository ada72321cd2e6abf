"""Any masked language model of transformers as a diffusion model, with the members that our own models have.

The model stays what it is: its modules, weights, configuration and files. It gets `process`, `longest`, `blocks`,
`hidden_states`, `logits`, a `forward` that takes diffusion times and positions, and `generate()`. So the trainer, the
sampler and the harness never ask which family it is of.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..hub.generation_tokendrift import DiffusionGenerationConfig, DiffusionGenerationMixin
from ..hub.modeling_tokendrift import DiffusionPreTrainedModel
from ..hub.process_tokendrift import NEGATIVE_INFINITY, AbsorbingProcess
from .adaptation import Adaptation, check_told, read_adaptation, write_adaptation
from .families import Family, family_of, is_masked_language_model
from .probe import block_list, check, probe_rows, removed_after, trace


def as_diffusion(
    model: PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    mask_token_id: int | None = None,
    kept_token_ids: Sequence[int] | None = None,
    num_tokens: int | None = None,
    frame: tuple[int, int] | None = None,
    max_length: int | None = None,
    shift: bool | None = None,
) -> PreTrainedModel:
    """Turn a masked language model of transformers into what `DriftTrainer` and the command line take.

    The model is changed in place and returned: its class becomes a subclass of its own class, of the same name, so
    it saves in the family's format and loads with the family's class. Nothing happens to a model of this package.

    What is not given is read from `diffusion.json` beside the model's weights, where a trainer left it.

    Args:
        model: a masked language model (`AutoModelForMaskedLM`), or a decoder that sees both sides
            (`config.is_causal = False`).
        tokenizer: the model's. It gives what the other arguments leave open.
        mask_token_id: default: the tokenizer's mask, else `config.mask_token_id`.
        kept_token_ids: ids that are never corrupted and never predicted. Default: for masked language models the
            tokenizer's special tokens, for decoders none, since their end of text is predicted.
        num_tokens: how many ids have a token. Default: the length of the tokenizer, else the size of the vocabulary.
        frame: the ids that begin and end a row of text. Default: the tokenizer's bos or cls and eos or sep, where
            they are kept.
        max_length: the longest sequence. Default: the model's own limit.
        shift: whether the logits at position i predict token i + 1. Default: as the family does.

    Raises:
        ValueError: no mask token, an encoder-decoder, a model without a vocabulary head, a model that is causal, a
            family that is not known or does not fit, or ids outside the vocabulary.
    """
    if hasattr(model, "process"):
        return model
    family = _refuse_what_does_not_fit(model)
    told = read_adaptation(model.name_or_path, getattr(model.config, "_commit_hash", None))
    given = dict(
        mask_token_id=mask_token_id,
        kept_token_ids=kept_token_ids,
        num_tokens=num_tokens,
        frame=frame,
        max_length=max_length,
        shift=shift,
    )
    told |= {name: value for name, value in given.items() if value is not None}
    adapted = _adapt(model, family, _adaptation(model, family, tokenizer, told))
    generation = told.get("generation", {})
    adapted.generation_config = DiffusionGenerationConfig(**DiffusionGenerationConfig.defaults | generation)
    return adapted


def _adaptation(model, family: Family, tokenizer, told: dict) -> Adaptation:
    """What was told, completed by the tokenizer, the configuration and the family."""
    V = model.config.vocab_size
    check_told(told, model, tokenizer)
    mask_token_id = _mask_id(model, family, tokenizer, told.get("mask_token_id"))
    special = tokenizer is not None and is_masked_language_model(model.config.model_type)
    kept = set(told.get("kept_token_ids", tokenizer.all_special_ids if special else ())) - {mask_token_id}
    frame = told.get("frame")
    if frame is None and tokenizer is not None:
        last = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        first = tokenizer.cls_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        frame = (first, last) if {first, last} <= kept else None
    num_tokens = told.get("num_tokens", V if tokenizer is None else len(tokenizer))
    return Adaptation(
        mask_token_id=mask_token_id,
        kept_token_ids=tuple(sorted(kept)),
        num_tokens=max(num_tokens, mask_token_id + 1),
        frame=None if frame is None else tuple(frame),
        max_length=_length(model, told.get("max_length")),
        shift=told.get("shift", family.shift),
    )


def _refuse_what_does_not_fit(model: PreTrainedModel) -> Family:
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"as_diffusion takes a model of transformers, without adapters, but it was given a {name}.")
    family = family_of(model)
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(
            f"{name} has no vocabulary head, so it predicts no tokens. Load the checkpoint with AutoModelForMaskedLM."
        )
    rows = {len(head.weight), len(model.get_input_embeddings().weight), model.config.vocab_size}
    if len(rows) > 1:
        raise ValueError(
            f"{name} embeds {len(model.get_input_embeddings().weight)} ids, predicts {len(head.weight)} and has "
            f"vocab_size={model.config.vocab_size}: these must be one number. Call model.resize_token_embeddings."
        )
    return family


def _mask_id(model, family: Family, tokenizer, mask_token_id: int | None) -> int:
    options = [mask_token_id, getattr(tokenizer, "mask_token_id", None), getattr(model.config, "mask_token_id", None)]
    if tokenizer is not None and family.mask_token is not None:
        options.insert(2, tokenizer.get_vocab().get(family.mask_token))
    found = next((option for option in options if option is not None), None)
    if found is None:
        raise ValueError(
            f"{type(model).__name__} has no mask token: neither its tokenizer nor its configuration names one. Give "
            "mask_token_id, the id that stood for a masked token when the model was trained, to as_diffusion or in "
            "the model's config.json."
        )
    if not 0 <= found < model.config.vocab_size:
        raise ValueError(
            f"mask_token_id={found} is outside the vocabulary of {model.config.vocab_size} ids. Where the mask is a "
            "new token, call model.resize_token_embeddings(len(tokenizer)) first."
        )
    return found


def _length(model, max_length: int | None) -> int:
    """The longest sequence: as asked for, at most what the model's table of positions holds."""
    names = ("max_position_embeddings", "max_sequence_length")  # the second is LLaDA's
    limit = next((getattr(model.config, name) for name in names if hasattr(model.config, name)), max_length)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            # RoBERTa and its kin count positions from the row after the padding's.
            limit = module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    if limit is None:
        raise ValueError(f"{type(model).__name__} does not say how long a sequence may be. Give max_length.")
    if max_length is not None and not 3 <= max_length <= limit:
        raise ValueError(f"max_length={max_length}: {type(model).__name__} takes 3 to {limit} tokens.")
    return max_length or limit


class _InputOfHead(Exception):
    """The forward pass has come to a module: carries what that module was given."""

    def __init__(self, value: Tensor):
        self.value = value


def _stop(module, args, kwargs):
    """A hook that lets the forward pass end where a module begins."""
    raise _InputOfHead(_first(args or tuple(kwargs.values())))


def _first(values):
    return values[0] if isinstance(values, tuple) else values


class AdaptedModel:
    """The members of our own models, in front of a family's class. `as_diffusion` puts the two together.

    Attributes:
        adaptation: what the adapter was told.
        family: how the family differs.
        block_list: the name of the list of blocks.
        head_names: the names of the modules that run after the last block, in their order. They are looked up by name,
            so that adapters which replace one of them take part.
    """

    adaptation: Adaptation
    family: Family
    block_list: str
    head_names: tuple[str, ...]

    forward = DiffusionPreTrainedModel.forward
    _wants_hidden = DiffusionPreTrainedModel._wants_hidden

    @property
    def process(self) -> AbsorbingProcess:
        kept = self.adaptation.kept_token_ids
        return AbsorbingProcess(self.config.vocab_size, self.adaptation.mask_token_id, kept_ids=kept)

    @property
    def longest(self) -> int:
        """The longest sequence that the model takes, in tokens."""
        return self.adaptation.max_length

    @property
    def auto_class(self) -> str:
        """The class of transformers that loads the model's files. Empty: they come with their own code."""
        if not type(self).__module__.startswith("transformers."):
            return ""
        is_masked = is_masked_language_model(self.config.model_type)
        return "AutoModelForMaskedLM" if is_masked else "AutoModelForCausalLM"

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks, whose outputs are the features of an encoder."""
        return self.get_submodule(self.block_list)

    def hidden_states(self, inputs_embeds, timesteps=None, attention_mask=None, positions=None, num_blocks=None):
        """The input of the first block and the outputs of all, [B, L, D], and an empty time conditioning [B, 0].

        The family's own forward runs until its vocabulary head begins. With `positions` [B, n] only the last hidden
        state at these positions is kept. With `num_blocks` it runs until so many blocks are done. `timesteps` are
        ignored: these models know no time.
        """
        states: list[Tensor] = []

        def note(module, args, kwargs):
            states.append(_first(args or tuple(kwargs.values())))

        blocks, end = list(self.blocks), self.get_submodule(self.head_names[0])
        whole = num_blocks is None or num_blocks == len(blocks)
        if not whole:
            blocks, end = blocks[:num_blocks], blocks[num_blocks]
        handles = [end.register_forward_pre_hook(_stop, with_kwargs=True)]
        if positions is None:
            handles += [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
        with removed_after(handles):
            hidden = self._run(inputs_embeds, attention_mask)
        if self.adaptation.shift and whole:
            hidden = torch.cat([hidden[:, :1], hidden[:, :-1]], dim=1)
        if positions is not None:
            hidden = hidden.take_along_dim(positions[..., None], dim=1)
        return (*states, hidden), hidden.new_zeros(len(hidden), 0)

    def _run(self, inputs_embeds: Tensor, attention_mask: Tensor | None) -> Tensor:
        try:
            super().forward(**self.family.inputs(self, inputs_embeds, attention_mask))
        except _InputOfHead as reached:
            return reached.value
        raise RuntimeError(f"{type(self).__name__} never reached {self.head_names[0]}.")

    def logits(self, hidden: Tensor, c: Tensor | None = None) -> Tensor:
        """The head on hidden states [B, L, D], or on any chosen rows [N, 1, D] -> [.., .., V]. `c` is not used.

        The mask, the kept ids and ids without a token get -1e6, so no argmax or softmax ever picks them.
        """
        for name in self.head_names:
            hidden = self.get_submodule(name)(hidden)
        value = max(NEGATIVE_INFINITY, torch.finfo(hidden.dtype).min)
        fill = hidden.index_fill if hidden.requires_grad else hidden.index_fill_
        return fill(-1, self.never_predicted, value)

    def linear_layers(self, which: str) -> list[str]:
        """The names of the linear layers that LoRA's targets "attention" and "linear" mean.

        "attention": the projections of every block's attention. "linear": all linear layers of the blocks and of the
        head, but no head that shares the embedding's weights, since merging would change these as well.
        """
        shared = self.get_input_embeddings().weight
        names = []
        for name, module in self.named_modules():
            if not isinstance(module, nn.Linear) or module.weight is shared:
                continue
            within = name.removeprefix(f"{self.block_list}.")
            if within == name:
                of_head = any(f"{name}.".startswith(f"{part}.") for part in self.head_names)
                names += [name] if of_head and which == "linear" else []
            elif which == "linear" or "att" in within.lower() or within.endswith(("q_proj", "k_proj", "v_proj")):
                names.append(name)
        return names

    def generate(self, input_ids=None, *, num_samples=None, generation_config=None, **kwargs):
        """As for our own models. Unprompted text is written between the ids that frame every row of training text."""
        described = any(kwargs.get(name) is not None for name in ("attention_mask", "prompt_mask"))
        if input_ids is None and self.adaptation.frame is not None and not described:
            asked = {name: kwargs.pop(name, None) for name in ("max_new_tokens", "max_length")}
            _, settings = self._settings(generation_config, asked)
            length = settings.max_new_tokens or settings.max_length or self.longest
            first, last = self.adaptation.frame
            row = torch.full((1, length), self.adaptation.mask_token_id, device=self.device)
            row[0, 0], row[0, -1] = first, last
            input_ids, num_samples = row, num_samples or 1
            kwargs["max_length"] = length
        return super().generate(input_ids, num_samples=num_samples, generation_config=generation_config, **kwargs)

    def save_pretrained(self, save_directory, *args, **kwargs):
        """As the family saves, with `diffusion.json` beside it."""
        ours, self.generation_config = self.generation_config, self.family_generation_config
        try:
            super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            self.generation_config = ours
        if kwargs.get("is_main_process", True):
            self.save_adaptation(save_directory)

    def save_adaptation(self, folder) -> None:
        """Write `diffusion.json`."""
        write_adaptation(folder, self.adaptation, self.generation_config)


@cache
def _class_of(family_class: type) -> type:
    """The family's class with our members in front. It keeps the name, which goes into config.json."""
    members = {name: getattr(family_class, name) for name in ("__module__", "__qualname__", "can_generate")}
    return type(family_class.__name__, (AdaptedModel, DiffusionGenerationMixin, family_class), members)


def _adapt(model: PreTrainedModel, family: Family, adaptation: Adaptation) -> PreTrainedModel:
    """Find the blocks and the head, take on our members, and check that nothing has changed by it."""
    family.prepare(model)
    blocks = block_list(model)
    ids = probe_rows(model, adaptation)
    training, original, generation_config = model.training, type(model), getattr(model, "generation_config", None)
    model.eval()
    try:
        with torch.no_grad():
            last_block = model.get_submodule(blocks)[-1]
            expected, head_names = trace(model, last_block, ids)
            model.__class__ = _class_of(original)
            model.adaptation, model.family = adaptation, family
            model.block_list, model.head_names = blocks, head_names
            # What FSDP wraps: the blocks, and no embedding that the head shares.
            model._no_split_modules = [type(last_block).__name__]
            model.family_generation_config = generation_config
            model.generation_config = DiffusionGenerationConfig(**DiffusionGenerationConfig.defaults)
            never = {adaptation.mask_token_id, *adaptation.kept_token_ids}
            never |= set(range(adaptation.num_tokens, model.config.vocab_size))
            model.register_buffer("never_predicted", torch.tensor(sorted(never), device=ids.device), persistent=False)
            check(model, ids, expected)
    except Exception:
        model.__class__ = original
        model.generation_config = generation_config
        raise
    finally:
        model.train(training)
    return model
