"""generate() for discrete diffusion language models: its settings, arguments, windows and results."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig
from transformers.utils import ModelOutput, logging

from .canvas_tokendrift import Texts, prompted, unprompted
from .denoiser_tokendrift import Denoiser, Noise, draw_dtype
from .samplers_tokendrift import ORDERED, denoise, first_hitting, ordered

logger = logging.get_logger(__name__)

SAMPLERS = {"ancestral": "both", "psi": "both", "analytic": "masked", "first_hitting": "masked"} | dict.fromkeys(
    ORDERED, "masked"
)


class DiffusionGenerationConfig(GenerationConfig):
    """The settings of `generate()`; one that is None is not set and is taken from the next place that has it.

    Args:
        num_steps: N. The network is called at most N + 1 times, since noise removal is a step more (papers label such
            runs "NFE N"); `first_hitting` has no steps, and the ordered samplers make at most N calls.
        sampler: "ancestral" (MDLM 2406.07524, DUO 2506.10892), "psi" (both: ReMDM 2503.00307 and predictor-corrector
            2602.21185), and for masked models "analytic" (the same law as ancestral), "first_hitting" (one token a
            call, no discretisation, 2409.02908), and "confidence", "margin", "entropy" (surest positions first
            2502.06768; less diverse text).
        temperature, top_k, top_p: act, in this order, on the clean-token prediction p(x_0 | x_t), never on the
            posterior. p ~ p^(1 / temperature), where 0 is greedy (the likeliest token) and 1 changes nothing; then
            the top_k likeliest (1805.04833; 0: all); then the likeliest that together reach top_p (1904.09751; 1: all).
        noise_removal: "ancestral" (a last posterior step to clean text), "greedy" (argmax), or "none" (masks or noise
            may be left). Not for samplers that end clean by themselves.
        time_grid: "linear", "cosine", "linear-constant-linear-c[-inv]", or N + 1 falling times, see `time_grid`.
        psi: mode of the psi sampler, or three for the early, middle and late steps, see `kappas`.
        psi_fractions: the fractions of the steps that are early and middle.
        precision: "float64" or "float32", of the random numbers and distribution functions. float32 draws lose rare
            tokens, which lowers both perplexity and entropy (2409.02908). Devices without float64 use float32 and warn.
        max_new_tokens: tokens to generate after the prompt; without a prompt, all of them (default: the longest).
        max_length: the same, the prompt included.
        stride: allows text longer than the model: it is written in windows of the model's length, each `stride` new
            tokens after the one before, which see the end of the text so far.
        trim_eos: cut a row after its first generated eos_token_id (not one that opens an unprompted row).
        return_dict_in_generate: return a `DiffusionGenerationOutput` instead of the ids.
        output_history: keep the ids after every step in it.
        bos_token_id, eos_token_id, pad_token_id: padding is needed only where rows end up of unequal length.
    """

    defaults: ClassVar[dict[str, Any]] = {
        "num_steps": 16,
        "sampler": "ancestral",
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "noise_removal": "ancestral",
        "time_grid": "linear",
        "psi": "max-capped-0.01",
        "psi_fractions": [0.0, 0.0],
        "precision": "float64",
        "trim_eos": False,
        "return_dict_in_generate": False,
        "output_history": False,
    }
    fields: ClassVar[tuple[str, ...]] = (
        *defaults,
        *("max_new_tokens", "max_length", "stride", "bos_token_id", "eos_token_id", "pad_token_id"),
    )

    def __init__(self, **kwargs):
        # As in transformers' own diffusion model, without super().__init__(): its fields are for autoregression.
        for name in (*self.fields, "_from_model_config", "_commit_hash", "transformers_version"):
            setattr(self, name, kwargs.pop(name, None))
        if kwargs:
            raise ValueError(f"Unknown generation settings {sorted(kwargs)}. Known are {sorted(self.fields)}.")

    def validate(self, **unused):
        """Values are checked by `generate()`, with the model at hand; so saving never fails."""

    def get_generation_mode(self, *args, **kwargs):
        raise NotImplementedError("Diffusion models have samplers, not generation modes.")

    @classmethod
    def from_model_config(cls, model_config) -> "DiffusionGenerationConfig":
        """What a new model starts with: the defaults."""
        return cls(**copy.deepcopy(cls.defaults))


@dataclass
class DiffusionStep:
    """What a step callback is given.

    step: 0, 1, ... in this window; the last one is noise removal. t: the time that x has reached, 0 when it is clean.
    tokens: ids [B, L] of the window. confidence: the probability of each token under the last prediction that was
    asked for at its position, [B, L], nan where none was. window: 0 but for text longer than the model.
    """

    step: int
    t: float
    tokens: torch.Tensor
    confidence: torch.Tensor
    window: int


@dataclass
class DiffusionGenerationOutput(ModelOutput):
    """sequences: ids [B, T], prompts included. lengths: of the rows, [B]. num_forward_calls: network calls made.
    history: ids [B, L] at the start and after each step, of all windows. settings: those in force."""

    sequences: torch.LongTensor | None = None
    lengths: torch.LongTensor | None = None
    num_forward_calls: int | None = None
    history: tuple[torch.LongTensor, ...] | None = None
    settings: dict[str, Any] | None = None


def _is_whole(value, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


class DiffusionGenerationMixin:
    """Adds `generate()` to a model with `process`, `logits()` and `forward(..., positions=)`."""

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
        chunk_size: int | None = None,
        **settings,
    ) -> torch.LongTensor | DiffusionGenerationOutput:
        """Sample text.

        1. Settings: arguments, then `generation_config`, then the model's own, then the defaults.
        2. Canvases: the prompts, packed to the left, and the positions to fill.
        3. For each window of the model's length: noise at the free positions, then the sampler.
        4. Trim and pad.

        Args:
            input_ids: prompts [B, P]. A masked model fills their masks; `max_new_tokens` or `max_length` adds
                positions behind them; both models fill what `prompt_mask` leaves free. Everything else is kept.
            num_samples: B; default 1, or one for each prompt. A single prompt is repeated.
            attention_mask: [B, P], non-zero where prompts of unequal length have tokens (padding on either side).
                Each row gets what it would get alone, at the left of its row of the result.
            prompt_mask: [B, P], non-zero where `input_ids` is kept, zero where it is filled whatever it holds.
            seed: of a fresh generator.
            generator: a generator, or one for each row. Each gives every row a stream of its own, so that row i of a
                batch equals a single run with its generator; a generator moves on by one number a row. Without seed
                and generator torch's global state is used, else it is left alone.
            streamer: a transformers streamer; `TextDiffusionStreamer` shows the drafts (one row only).
            callback: called after every step with a `DiffusionStep`.
            chunk_size: positions for which logits are held at once; changes memory and speed only.
            **settings: the fields of `DiffusionGenerationConfig`; None means not given.

        Returns:
            ids [B, T], or a `DiffusionGenerationOutput`.

        Raises:
            ValueError: unknown, impossible or contradictory arguments.
        """
        given, settings = self._settings(generation_config, settings)
        self._check(settings, given, seed, generator, chunk_size)
        texts = self._texts(input_ids, attention_mask, prompt_mask, num_samples, settings)
        if isinstance(generator, (list, tuple)) and len(generator) != len(texts.tokens):
            raise ValueError(f"{len(generator)} generators for {len(texts.tokens)} rows: give one a row, or one.")
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
        noise = Noise(generator, len(texts.tokens), draw_dtype(settings.precision, self.device), self.device)
        generated = texts.free.clone()
        longest, process = self.config.max_position_embeddings, self.process
        history, num_calls = [], 0
        shown = int(texts.free[0].to(torch.uint8).argmax())  # where the part that the streamer was given ends
        if streamer is not None:
            streamer.put(texts.tokens[:, :shown].cpu())

        modes = {module: module.training for module in self.modules()}
        self.eval()
        try:
            for number, ends in enumerate(texts.window_ends(longest, settings.stride)):
                canvas, columns, inside = texts.window(ends, longest, process, noise)
                denoiser = Denoiser(
                    self,
                    None if inside.all() else inside,
                    temperature=settings.temperature,
                    top_k=settings.top_k,
                    top_p=settings.top_p,
                    chunk_size=chunk_size,
                )
                draft = slice(shown - int(columns[0, 0]), None)

                def on_step(step, t, canvas=canvas, number=number, draft=draft):
                    if settings.output_history:
                        history.append(canvas.x.clone())
                    if hasattr(streamer, "put_draft"):
                        streamer.put_draft(canvas.x[:, draft].cpu())
                    if callback is not None:
                        callback(DiffusionStep(step, t, canvas.x.clone(), canvas.confidence.clone(), number))

                if settings.output_history:
                    history.append(canvas.x.clone())
                if settings.sampler == "first_hitting":
                    first_hitting(canvas, denoiser, noise, process, on_step)
                elif settings.sampler in ORDERED:
                    ordered(canvas, denoiser, noise, process, settings, on_step)
                else:
                    denoise(canvas, denoiser, noise, process, settings, on_step)
                num_calls += denoiser.num_calls
                texts.write(canvas, columns, inside)
                if streamer is not None:
                    streamer.put(texts.tokens[:, shown : ends[0]].cpu())
                shown = ends[0]
                if settings.trim_eos and texts.cut_at_eos(generated, settings.eos_token_id)[1].all():
                    break
        finally:
            for module, mode in modes.items():
                module.training = mode
        if streamer is not None:
            streamer.end()

        lengths = torch.tensor(texts.lengths, device=self.device)
        if settings.trim_eos:
            lengths, _ = texts.cut_at_eos(generated, settings.eos_token_id)
        sequences = texts.tokens[:, : int(lengths.max())]
        beyond = torch.arange(sequences.shape[1], device=self.device) >= lengths[:, None]
        if beyond.any():
            padding = settings.pad_token_id if settings.pad_token_id is not None else settings.eos_token_id
            if padding is None:
                padding = input_ids[attention_mask == 0][0]
            sequences = sequences.masked_fill(beyond, int(torch.as_tensor(padding).flatten()[0]))
        if not settings.return_dict_in_generate:
            return sequences
        return DiffusionGenerationOutput(
            sequences=sequences,
            lengths=lengths,
            num_forward_calls=num_calls,
            history=tuple(history) if settings.output_history else None,
            settings={name: getattr(settings, name) for name in settings.fields},
        )

    def _settings(self, generation_config, arguments: dict) -> tuple[set[str], DiffusionGenerationConfig]:
        """The names given in this call, and the settings in force."""
        settings = copy.deepcopy(generation_config) if generation_config is not None else DiffusionGenerationConfig()
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
                    setattr(settings, name, copy.deepcopy(source.get(name)))
        return set(given), settings

    def _check(self, settings, given: set[str], seed, generator, chunk_size):
        """Everything that can be said before looking at the prompts."""
        masked = hasattr(self.process, "mask_id")
        name = type(self).__name__

        def need(holds: bool, found: str, remedy: str):
            if not holds:
                raise ValueError(f"{found}. {remedy}")

        possible = [key for key, where in SAMPLERS.items() if masked or where == "both"]
        need(
            settings.sampler in possible,
            f"sampler={settings.sampler!r} is not one of {name}",
            f"Give one of {possible}"
            + ("." if settings.sampler not in SAMPLERS else "; this one needs a process with masks."),
        )
        for key, least in (("num_steps", 1), ("top_k", 0)):
            value = getattr(settings, key)
            need(_is_whole(value, least), f"{key}={value!r}", f"It must be a whole number, at least {least}.")
        for key in ("max_new_tokens", "max_length", "stride"):
            value = getattr(settings, key)
            need(value is None or _is_whole(value, 1), f"{key}={value!r}", "It must be a positive whole number.")
        need(chunk_size is None or _is_whole(chunk_size, 1), f"chunk_size={chunk_size!r}", "It must be positive.")
        temperature, top_p = settings.temperature, settings.top_p
        is_number = isinstance(temperature, (int, float)) and isinstance(top_p, (int, float))
        need(is_number, f"temperature={temperature!r}, top_p={top_p!r}", "They must be numbers.")
        need(
            temperature == 0 or 1e-6 <= temperature < float("inf"),
            f"temperature={temperature}",
            "It must be 0, which is greedy, or at least 1e-6.",
        )
        need(0 < top_p <= 1, f"top_p={top_p}", "It must be in (0, 1]; 1 keeps every token.")
        for key, values in (("noise_removal", ("ancestral", "greedy", "none")), ("precision", ("float64", "float32"))):
            value = getattr(settings, key)
            need(value in values, f"{key}={value!r}", f"Give one of {values}.")
        need(
            seed is None or (_is_whole(seed, 0) and seed < 2**64),
            f"seed={seed!r}",
            "It must be a whole number from 0 to 2^64 - 1.",
        )
        need(seed is None or generator is None, "Both seed and generator are given", "Give one of them.")
        both = settings.max_new_tokens is not None and settings.max_length is not None
        need(not both, "Both max_new_tokens and max_length are given", "Give one of them.")
        longest = self.config.max_position_embeddings
        need(
            (settings.stride or 1) <= longest, f"stride={settings.stride}", f"It must be at most the model's {longest}."
        )
        need(
            not settings.trim_eos or settings.eos_token_id is not None,
            "trim_eos=True without an eos_token_id",
            "Give eos_token_id, here or in generation_config.json.",
        )
        unused = {"first_hitting": ("num_steps", "time_grid", "noise_removal")}
        unused |= dict.fromkeys(ORDERED, ("noise_removal",))
        for key in unused.get(settings.sampler, ()):
            need(
                key not in given,
                f"{key}={getattr(settings, key)!r} has no meaning for sampler={settings.sampler!r}",
                "Leave it out: this sampler ends without masks by itself"
                + (" and makes one call a token." if settings.sampler == "first_hitting" else "."),
            )
        need(
            settings.sampler == "psi" or "psi" not in given,
            f"psi={settings.psi!r} with sampler={settings.sampler!r}",
            "psi belongs to sampler='psi'.",
        )
        need(
            "psi_fractions" not in given or settings.sampler == "psi" or "constant" in str(settings.time_grid),
            f"psi_fractions={settings.psi_fractions!r} with sampler={settings.sampler!r}",
            "They belong to sampler='psi' and to the time grids with a plateau.",
        )
        need(
            "output_history" not in given or not settings.output_history or settings.return_dict_in_generate,
            "output_history=True without return_dict_in_generate=True",
            "The history comes with the dict.",
        )
        if draw_dtype(settings.precision, self.device) != getattr(torch, settings.precision):
            logger.warning_once("This device has no float64: random numbers and draws are in float32.")

    def _texts(self, input_ids, attention_mask, prompt_mask, num_samples, settings) -> Texts:
        longest = self.config.max_position_embeddings
        if num_samples is not None and not _is_whole(num_samples, 1):
            raise ValueError(f"num_samples={num_samples!r}. It must be a positive whole number.")
        if input_ids is not None:
            texts = prompted(
                input_ids.to(self.device) if isinstance(input_ids, torch.Tensor) else input_ids,
                attention_mask,
                prompt_mask,
                num_samples=num_samples,
                max_new_tokens=settings.max_new_tokens,
                max_length=settings.max_length,
                vocab_size=self.config.vocab_size,
                mask_id=getattr(self.process, "mask_id", None),
                reserved_id=getattr(self.config, "mask_token_id", self.config.vocab_size - 1),
            )
        elif prompt_mask is None and attention_mask is None:
            length = settings.max_new_tokens or settings.max_length or longest
            texts = unprompted(num_samples or 1, length, self.device)
        else:
            raise ValueError("prompt_mask or attention_mask without input_ids. They describe a prompt: give it.")
        if max(texts.lengths) > longest and settings.stride is None:
            raise ValueError(
                f"The text would be {max(texts.lengths)} tokens long, but this model takes at most {longest}. Ask for "
                "less, or give a stride, to write it in windows."
            )
        return texts

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
            self.generation_config = DiffusionGenerationConfig.from_dict(generation_config.to_dict())
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
