"""generate() for discrete diffusion language models: its arguments, windows and results."""

import copy
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.utils import ModelOutput, logging

from .canvas_tokendrift import Texts, prompted, unprompted
from .denoiser_tokendrift import Denoiser, RowStreams, draw_dtype
from .ending_tokendrift import Ending
from .observer_tokendrift import DiffusionStep, Observer
from .samplers_tokendrift import SAMPLERS, is_whole
from .settings_tokendrift import DiffusionGenerationConfig, check_controls, check_lengths, check_sampler

logger = logging.get_logger(__name__)


@dataclass
class DiffusionGenerationOutput(ModelOutput):
    """What `generate(return_dict_in_generate=True)` returns.

    Attributes:
        sequences: ids [B, T], prompts included.
        lengths: of the rows, [B].
        num_forward_calls: predictions asked for, the NFE of papers. Those for which no row needs a token are not made.
        calls_per_row: in how many of them each row took part, [B].
        num_forward_passes: forward passes of the network. A large batch needs several for one prediction.
        tokens_per_forward: generated tokens of a row, padding left out, by its calls, [B].
        history: ids [B, L] at the start and after each step, of all windows.
        settings: those in force.
    """

    sequences: torch.LongTensor | None = None
    lengths: torch.LongTensor | None = None
    num_forward_calls: int | None = None
    calls_per_row: torch.LongTensor | None = None
    num_forward_passes: int | None = None
    tokens_per_forward: torch.Tensor | None = None
    history: tuple[torch.LongTensor, ...] | None = None
    settings: dict[str, Any] | None = None


class DiffusionGenerationMixin:
    """Adds `generate()` to a model with `process`, `logits()` and `forward(..., positions=)`."""

    @property
    def longest(self) -> int:
        """The longest sequence that the model takes, in tokens."""
        return self.config.max_position_embeddings

    @torch.no_grad()
    def generate(
        self,
        input_ids: torch.Tensor | None = None,
        *,
        num_samples: int | None = None,
        attention_mask: torch.Tensor | None = None,
        prompt_mask: torch.Tensor | None = None,
        seed: int | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        generation_config: DiffusionGenerationConfig | None = None,
        streamer=None,
        callback: Callable[[DiffusionStep], None] | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        chunk_size: int | None = None,
        rows_per_call: int | None = None,
        **settings,
    ) -> torch.LongTensor | DiffusionGenerationOutput:
        """Sample text.

        1. Settings: arguments, then `generation_config`, then the model's own, then the defaults.
        2. Canvases: the prompts, packed to the left, and the positions to fill.
        3. For each window of the model's length: noise at the free positions, then the sampler, block by block.
        4. Trim and pad.

        Args:
            input_ids: prompts [B, P]. A masked model fills their masks. `max_new_tokens` or `max_length` adds
                positions behind them. Both models fill what `prompt_mask` leaves free. Everything else is kept.
            num_samples: B, by default 1 or one for each prompt. A single prompt is repeated.
            attention_mask: [B, P], non-zero where prompts of unequal length have tokens (padding on either side).
                Each row gets what it would get alone, at the left of its row of the result.
            prompt_mask: [B, P], non-zero where `input_ids` is kept, zero where it is filled whatever it holds.
            seed: of a fresh generator.
            generator: a generator, or one for each row. Each gives every row a stream of its own, so that row i of a
                batch is a single run with its generator, up to `rows_per_call`. A generator moves on by one number a
                row. Without seed and generator torch's global state is used, else it is left alone.
            streamer: a transformers streamer. `TextDiffusionStreamer` shows the drafts (one row only).
            callback: called after every step with a `DiffusionStep`.
            logits_processor: transformers' processors of logits. They act on the clean-token prediction, before
                temperature, top_k and top_p. `scores` is [n, V] for n positions of one row, and `input_ids` that row's
                ids, n times. A parameter `cur_step` gets the number of steps that are left.
            stopping_criteria: transformers' criteria, asked for each row after each block or window. Nothing more is
                written where they hold.
            chunk_size: positions for which logits are held at once. It changes memory and speed only.
            rows_per_call: rows that share a forward pass. Default: as many as hold 2^10 tokens on a CPU and 2^16 on a
                GPU. A product over several rows rounds in another way than over one. About one draw in 10^5 is decided
                by that in float32. With 1, row i of a batch equals its single run to the bit, with every sampler.
            **settings: the fields of `DiffusionGenerationConfig`. None means not given.

        Returns:
            ids [B, T], or a `DiffusionGenerationOutput`.

        Raises:
            ValueError: unknown, impossible or contradictory arguments.
        """
        # 1. Settings
        given, settings = self._settings(generation_config, settings)
        check_sampler(settings, given, self.process)
        check_lengths(settings, self.longest)
        check_controls(settings, given, self.process)
        for name, value in (("chunk_size", chunk_size), ("rows_per_call", rows_per_call)):
            if value is not None and not is_whole(value, 1):
                raise ValueError(f"{name}={value!r}. It must be a positive whole number.")

        processors = _listed("logits_processor", logits_processor, LogitsProcessorList)
        criteria = _listed("stopping_criteria", stopping_criteria, StoppingCriteriaList)

        # 2. Canvases
        texts = self._texts(input_ids, attention_mask, prompt_mask, num_samples, settings)
        if criteria and len(texts.tokens) > 1 and _padding(texts, settings) is None:
            raise ValueError("stopping_criteria with several rows: give pad_token_id, since they can end apart.")
        noise = self._noise(seed, generator, len(texts.tokens), settings.precision)
        observer = Observer(texts, streamer, callback, settings.output_history)
        eos_token_id = settings.eos_token_id if settings.trim_eos else None
        ending = Ending(
            texts, eos_token_id, criteria, self.process.mask_id if SAMPLERS[settings.sampler].keeps else None
        )
        denoiser = Denoiser(
            self,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            suppress_tokens=settings.suppress_tokens,
            processors=processors,
            chunk_size=chunk_size,
            rows_per_call=rows_per_call,
        )

        # 3. Windows
        with _evaluating(self):
            for ends in texts.window_ends(self.longest, settings.stride):
                self._sample_window(texts, ends, settings, noise, denoiser, observer, ending)
                if ending.done.all():
                    break
        observer.end()

        # 4. Trim and pad
        lengths = ending.lengths()
        sequences = texts.tokens[:, : int(lengths.max())]
        beyond = torch.arange(texts.tokens.shape[1], device=self.device) >= lengths[:, None]
        if beyond[:, : sequences.shape[1]].any():
            sequences = sequences.masked_fill(beyond[:, : sequences.shape[1]], _padding(texts, settings))
        if not settings.return_dict_in_generate:
            return sequences
        num_tokens = (ending.generated & ~beyond).sum(1)
        return DiffusionGenerationOutput(
            sequences=sequences,
            lengths=lengths,
            num_forward_calls=denoiser.num_calls,
            calls_per_row=denoiser.calls_per_row,
            num_forward_passes=denoiser.num_forward_passes,
            tokens_per_forward=num_tokens / denoiser.calls_per_row.clamp_min(1),
            history=None if observer.history is None else tuple(observer.history),
            settings={name: getattr(settings, name) for name in settings.fields},
        )

    def _sample_window(self, texts: Texts, ends: list[int], settings, noise: RowStreams, denoiser, observer, ending):
        """Sample the window that ends at `ends` in the rows, block by block, and write it into the texts."""
        process, sampler = self.process.without(settings.suppress_tokens or ()), SAMPLERS[settings.sampler]
        canvas = texts.window(ends, self.longest, process, noise)
        denoiser.present = None if canvas.inside.all() else canvas.inside
        observer.begin(canvas)

        def on_step(step: int, t: float):
            observer.step(canvas, step, t)
            ending.after_step(canvas)

        lengths = canvas.lengths
        for block in canvas.blocks(settings.block_length):
            canvas.free = block & ~ending.done[:, None]
            active = canvas.free.any(1).tolist()
            canvas.lengths = [n if takes_part else 0 for n, takes_part in zip(lengths, active, strict=True)]
            if any(active):
                sampler.run(canvas, denoiser, noise, process, settings, on_step)
            texts.write(canvas, block)
            ending.after_block(canvas, block)
            observer.finish(ending)

    def _noise(self, seed: int | None, generator, num_rows: int, precision: str) -> RowStreams:
        """The random numbers of all rows."""
        if seed is not None and not (is_whole(seed, 0) and seed < 2**64):
            raise ValueError(f"seed={seed!r}. It must be a whole number from 0 to 2^64 - 1.")
        if seed is not None and generator is not None:
            raise ValueError("Both seed and generator are given. Give one of them.")
        sources = generator if isinstance(generator, (list, tuple)) else [generator]
        if not all(source is None or isinstance(source, torch.Generator) for source in sources):
            raise ValueError(f"generator={generator!r}. Give a torch.Generator, or a list with one a row.")
        if isinstance(generator, (list, tuple)) and len(generator) != num_rows:
            raise ValueError(f"{len(generator)} generators for {num_rows} rows. Give one a row, or one.")
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
        dtype = draw_dtype(precision, self.device)
        if dtype != getattr(torch, precision):
            logger.warning_once("This device has no float64: random numbers and draws are in float32.")
        return RowStreams(generator, num_rows, dtype, self.device)

    def _settings(self, generation_config, arguments: dict) -> tuple[set[str], DiffusionGenerationConfig]:
        """The names given in this call, and the settings in force."""
        settings = DiffusionGenerationConfig()
        if generation_config is not None:
            settings = DiffusionGenerationConfig.of(generation_config)
        unknown = sorted(set(arguments) - set(settings.fields))
        if unknown:
            raise ValueError(f"generate() got unknown arguments {unknown}. Settings are {sorted(settings.fields)}.")
        given = {name: value for name, value in arguments.items() if value is not None}
        lengths = {"max_new_tokens", "max_length"}  # two names of one setting, so that either replaces a stored one
        if lengths & set(given):
            settings.max_new_tokens = settings.max_length = None
        for name, value in given.items():
            setattr(settings, name, value)
        has_length = any(getattr(settings, name) is not None for name in lengths)
        for source in (self.generation_config.to_dict(), settings.defaults):
            for name in settings.fields:
                if getattr(settings, name) is None and not (has_length and name in lengths):
                    # No ids: what the Trainer of transformers 5.17 stores if the tokenizer has no such token.
                    setattr(settings, name, copy.deepcopy(source.get(name)) if source.get(name) != [] else None)
        return set(given), settings

    def _texts(self, input_ids, attention_mask, prompt_mask, num_samples, settings) -> Texts:
        longest = self.longest if settings.stride is None else None
        if num_samples is not None and not is_whole(num_samples, 1):
            raise ValueError(f"num_samples={num_samples!r}. It must be a positive whole number.")
        if input_ids is not None:
            return prompted(
                input_ids.to(self.device) if isinstance(input_ids, torch.Tensor) else input_ids,
                attention_mask,
                prompt_mask,
                num_samples=num_samples,
                max_new_tokens=settings.max_new_tokens,
                max_length=settings.max_length,
                longest=longest,
                vocab_size=self.config.vocab_size,
                mask_id=self.process.mask_id,
                reserved_id=getattr(self.config, "mask_token_id", self.config.vocab_size - 1),
            )
        if prompt_mask is not None or attention_mask is not None:
            raise ValueError("prompt_mask or attention_mask without input_ids. They describe a prompt: give it.")
        length = settings.max_new_tokens or settings.max_length or self.longest
        return unprompted(num_samples or 1, length, longest, self.device)

    def adjust_generation_fn(
        self,
        generation_config,
        from_auto_class,
        from_pipeline,
        pretrained_model_name_or_path,
        cache_dir,
        force_download,
        proxies,
        local_files_only,
        token,
        revision,
        subfolder,
        trust_remote_code=False,
        **config_fields,
    ):
        """Called by `from_pretrained`: reads generation_config.json, where there is one."""
        if generation_config is not None:
            self.generation_config = DiffusionGenerationConfig.of(generation_config)
        elif pretrained_model_name_or_path is not None:
            try:
                self.generation_config = DiffusionGenerationConfig.from_pretrained(
                    pretrained_model_name_or_path,
                    cache_dir=cache_dir,
                    force_download=force_download,
                    proxies=proxies,
                    local_files_only=local_files_only,
                    token=token,
                    revision=revision,
                    subfolder=subfolder,
                    _from_auto=from_auto_class,
                    _from_pipeline=from_pipeline,
                )
            except OSError:
                logger.info("No generation_config.json: the defaults are used.")
        self.generation_config.update(**DiffusionGenerationConfig.defaults, defaults_only=True)


@contextmanager
def _evaluating(model):
    """Eval mode. Afterwards every module has the mode that it had."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _listed(name: str, value, list_class: type[list]):
    """Processors or criteria as transformers' list of them, which calls one after the other."""
    if value is not None and not (isinstance(value, (list, tuple)) and all(callable(part) for part in value)):
        raise ValueError(f"{name} is a {type(value).__name__}. It must be a {list_class.__name__}.")
    return list_class(value or [])


def _padding(texts: Texts, settings) -> int | None:
    """The id behind the end of a row: the one asked for, else eos, else what padded the prompts."""
    padding = settings.pad_token_id if settings.pad_token_id is not None else settings.eos_token_id
    return texts.padding if padding is None else int(torch.as_tensor(padding).flatten()[0])
