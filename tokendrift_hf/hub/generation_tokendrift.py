"""generate() for discrete diffusion language models: its settings, arguments, windows and results."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig
from transformers.utils import ModelOutput, logging

from .denoiser_tokendrift import Denoiser, Noise
from .samplers_tokendrift import ORDERED, Canvas, denoise, first_hitting, ordered

logger = logging.get_logger(__name__)

SAMPLERS = {"ancestral": "both", "psi": "both", "analytic": "masked", "first_hitting": "masked"} | dict.fromkeys(
    ORDERED, "masked"
)


class DiffusionGenerationConfig(GenerationConfig):
    """The settings of `generate()`; one that is None is not set and is taken from the next place that has it.

    Args:
        num_steps: N. The network is called at most N + 1 times, since noise removal is a step more (papers label such
            runs "NFE N"); `first_hitting` has no steps, and the ordered samplers make at most N calls.
        sampler: "ancestral" (MDLM, DUO), "psi" (both: ReMDM and predictor-corrector, see `psi`), and for masked models
            "analytic" (the same law as ancestral), "first_hitting" (one token a call, no discretisation), and
            "confidence", "margin", "entropy" (surest first; less diverse text).
        temperature, top_k, top_p: act on the clean-token prediction, never on the posterior. temperature 0 is greedy;
            temperature 1, top_k 0 and top_p 1 change nothing.
        noise_removal: "ancestral" (a last posterior step to clean text), "greedy" (argmax), or "none" (masks or noise
            may be left). Not for samplers that end clean by themselves.
        time_grid: "linear", "cosine", "linear-constant-linear-c[-inv]", or N + 1 falling times.
        psi: mode of the psi sampler, or three for the early, middle and late steps, see `kappas`.
        psi_fractions: the fractions of the steps that are early and middle.
        precision: "float64" or "float32", of the random numbers and distribution functions. float32 draws lose rare
            tokens, which lowers both perplexity and entropy.
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
        tokens, free, lengths = self._canvases(input_ids, attention_mask, prompt_mask, num_samples, settings)
        B, T = tokens.shape
        if isinstance(generator, (list, tuple)) and len(generator) != B:
            raise ValueError(f"{len(generator)} generators for {B} rows: give one for each row, or a single one.")
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
        noise = Noise(generator, B, self._precision(settings.precision), self.device)
        history, num_calls = [], 0
        prompt_length = int(free[0].to(torch.uint8).argmax()) if B == 1 and settings.max_new_tokens else 0
        if streamer is not None:
            streamer.put(tokens[:1, :prompt_length].cpu())

        modes = {module: module.training for module in self.modules()}
        self.eval()
        try:
            windows = list(self._windows(free, lengths, settings.stride))
            for number, (starts, ends) in enumerate(windows):
                canvas, columns = self._cut(tokens, free, starts, ends, noise)
                new = int(columns[0, canvas.free[0].to(torch.uint8).argmax()]) if number or prompt_length else 0
                denoiser = self._denoiser(canvas, settings, noise, chunk_size)

                def on_step(step, t, canvas=canvas, number=number, first=new - starts[0]):
                    if settings.output_history:
                        history.append(canvas.x.clone())
                    if streamer is not None and hasattr(streamer, "put_draft"):
                        streamer.put_draft(canvas.x[:, first:].cpu())
                    if callback is not None:
                        callback(DiffusionStep(step, t, canvas.x.clone(), canvas.confidence.clone(), number))

                if settings.output_history:
                    history.append(canvas.x.clone())
                self._sample(canvas, denoiser, noise, settings, on_step)
                num_calls += denoiser.num_calls
                inside = torch.arange(columns.shape[1], device=self.device) < torch.tensor(
                    canvas.lengths, device=self.device
                ).unsqueeze(1)
                rows = torch.arange(B, device=self.device)[:, None].expand_as(columns)
                tokens[rows[inside], columns[inside]] = canvas.x[inside]
                free[rows[inside], columns[inside]] = False
                if streamer is not None:
                    streamer.put(tokens[:1, new : ends[0]].cpu())
        finally:
            for module, mode in modes.items():
                module.training = mode
        if streamer is not None:
            streamer.end()
        raise NotImplementedError
