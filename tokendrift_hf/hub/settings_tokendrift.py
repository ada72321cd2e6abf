"""The settings of `generate()`, and what they may be."""

import copy
from typing import Any, ClassVar

from transformers import GenerationConfig
from transformers.utils import logging

from .samplers_tokendrift import SAMPLERS, are_fractions, is_number, is_whole, kappas, time_grid

logger = logging.get_logger(__name__)

MOST_STEPS = 10**6  # all times are listed beforehand
METADATA = ("_from_model_config", "_commit_hash", "transformers_version")  # beside the settings in every such class


class DiffusionGenerationConfig(GenerationConfig):
    """The settings of `generate()`. One that is None is not set and is taken from the next place that has it.

    Args:
        num_steps: N. The network is called at most N + 1 times, since noise removal is a step more (papers label such
            runs "NFE N"). `first_hitting` has no steps, and the ordered samplers make at most N calls.
        sampler: "ancestral" (MDLM 2406.07524, DUO 2506.10892), "psi" (both: ReMDM 2503.00307 and predictor-corrector
            2602.21185), and for masked models "first_hitting" (one token a
            call, no discretisation, 2409.02908), and "confidence", "margin", "entropy" (surest positions first,
            2502.06768, which gives less diverse text).
        temperature, top_k, top_p: act, in this order, on the clean-token prediction p(x_0 | x_t), never on the
            posterior. p ~ p^(1 / temperature), where 0 is greedy (the likeliest token) and 1 changes nothing. Then
            the top_k likeliest are kept (1805.04833, 0 keeps all). Last the likeliest that together reach top_p are
            kept (1904.09751, 1 keeps all).
        suppress_tokens: ids that are never sampled, such as those that the tokenizer does not know. The text is that of
            a model whose vocabulary never had them: the other tokens keep their odds, and they are no noise either.
        noise_removal: "ancestral" (a last posterior step to clean text), "greedy" (argmax), or "none" (masks or noise
            may be left). Not for samplers that end clean by themselves.
        time_grid: "linear", "cosine", "linear-constant-linear-c[-inv]", or N + 1 falling times, see `time_grid`.
        psi: mode of the psi sampler, or three for the early, middle and late steps, see `kappas`.
        psi_fractions: the fractions of the steps that are early and middle.
        precision: "float64" or "float32", of the random numbers and distribution functions. float32 draws lose rare
            tokens, which lowers both perplexity and entropy (2409.02908). Devices without float64 use float32 and warn.
        max_new_tokens: tokens to generate after the prompt. Without a prompt it counts all (default: the longest).
        max_length: the same, the prompt included.
        stride: allows text longer than the model: it is written in windows of the model's length, each `stride` new
            tokens after the one before, which see the end of the text so far.
        block_length: write in blocks of so many positions from left to right, each in its own num_steps, while those
            behind it are masks (semi-autoregressive, LLaDA 2502.09992). Only for masked models.
        trim_eos: end a row at its first generated eos_token_id (not at one that opens an unprompted row), and write
            nothing behind it.
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
        *("suppress_tokens", "block_length"),
    )

    def __init__(self, **kwargs):
        # As in transformers' own diffusion model, without super().__init__(): its fields are for autoregression.
        for name in (*self.fields, *METADATA):
            setattr(self, name, kwargs.pop(name, None))
        if kwargs:
            raise ValueError(f"Unknown generation settings {sorted(kwargs)}. Known are {sorted(self.fields)}.")

    def __setattr__(self, name: str, value):
        if name not in (*self.fields, *METADATA) and not name.startswith("_"):
            logger.warning_once(
                f"{name}={value!r} is no setting of a diffusion model: generate() and saving ignore it."
            )
        super().__setattr__(name, value)

    def to_dict(self) -> dict[str, Any]:
        """The settings and nothing else, so that what is saved can be read."""
        return {name: value for name, value in super().to_dict().items() if name in (*self.fields, *METADATA)}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs) -> "DiffusionGenerationConfig":
        """The settings of a dictionary, such as the content of generation_config.json. Others are ignored, and named.

        Raises:
            ValueError: it is no dictionary.
        """
        cls._check_form(config_dict)
        unknown = sorted(set(config_dict) - {*cls.fields, *METADATA})
        if unknown:
            logger.warning(f"generation_config.json has {unknown}, which no diffusion model knows. They are ignored.")
        known = {name: value for name, value in config_dict.items() if name not in unknown}
        return super().from_dict(known, **kwargs)

    @classmethod
    def _dict_from_json_file(cls, json_file):
        # transformers makes an OSError of an unreadable file, as of a missing one, which is no error.
        try:
            content = super()._dict_from_json_file(json_file)
        except ValueError as error:
            raise ValueError(f"{json_file} is no JSON ({error}). Mend or delete it.") from None
        cls._check_form(content)  # at once: transformers 5.17 writes into it
        return content

    @staticmethod
    def _check_form(content):
        if not isinstance(content, dict):
            raise ValueError(
                f"generation_config.json holds a {type(content).__name__}. It must hold an object with settings. "
                "Mend or delete it."
            )

    @classmethod
    def of(cls, other) -> "DiffusionGenerationConfig":
        """A copy of settings of this class, or what a `GenerationConfig` of transformers says beyond its defaults.

        Raises:
            ValueError: it is neither, or it says what only autoregressive models know.
        """
        if not hasattr(other, "to_diff_dict"):
            raise ValueError(
                f"generation_config is a {type(other).__name__}. Give a DiffusionGenerationConfig, or the settings "
                "themselves as arguments."
            )
        if hasattr(other, "fields"):  # ours, maybe another copy of this class, as custom code has
            return cls(**{name: copy.deepcopy(getattr(other, name, None)) for name in cls.fields})
        said = {name: value for name, value in other.to_diff_dict().items() if name not in METADATA}
        unknown = sorted(set(said) - set(cls.fields))
        if unknown:
            raise ValueError(
                f"generation_config sets {unknown}, which no diffusion model knows. Leave them out. Known are "
                f"{sorted(cls.fields)}."
            )
        return cls(**said)

    def validate(self, **unused):
        """Nothing: values are checked by `generate()`, with the model at hand, so saving never fails."""

    def get_generation_mode(self, *args, **kwargs):
        raise NotImplementedError("Diffusion models have samplers, not generation modes.")

    @classmethod
    def from_model_config(cls, model_config) -> "DiffusionGenerationConfig":
        """What a new model starts with: the defaults."""
        return cls(**copy.deepcopy(cls.defaults))


def check_sampler(settings: DiffusionGenerationConfig, given: set[str], process):
    """Refuse a sampler that this process cannot use, and settings that this sampler does not read.

    Args:
        given: names of the settings given in the call itself. Stored ones may belong to another sampler.
        process: of the model.
    """
    # The sampler itself.
    has_mask = process.mask_id is not None
    possible = [name for name, sampler in SAMPLERS.items() if has_mask or not sampler.needs_mask]
    if settings.sampler not in possible:
        why = "needs a process with masks" if settings.sampler in list(SAMPLERS) else "is not known"
        raise ValueError(f"sampler={settings.sampler!r} {why}. Give one of {possible}.")
    # Settings that it would not read. Stored ones are no mistake: they may be another sampler's.
    for name in SAMPLERS[settings.sampler].unused:
        if name in given:
            raise ValueError(
                f"{name}={getattr(settings, name)!r} has no meaning for sampler={settings.sampler!r}. Leave it out, or "
                "give another sampler."
            )
    if "psi_fractions" in given and settings.sampler != "psi" and "constant" not in str(settings.time_grid):
        raise ValueError(
            f"psi_fractions={settings.psi_fractions!r} has no meaning for sampler={settings.sampler!r}. They belong to "
            "sampler='psi' and to the time grids with a plateau."
        )
    if settings.block_length is not None and not has_mask:
        raise ValueError(
            f"block_length={settings.block_length!r} needs a process with masks: the blocks to come would look like "
            "text. Leave it out, or write in windows with stride."
        )
    # Settings that it reads.
    if not is_whole(settings.num_steps, 1):
        raise ValueError(f"num_steps={settings.num_steps!r}. It must be a whole number, at least 1.")
    if settings.num_steps > MOST_STEPS:
        raise ValueError(f"num_steps={settings.num_steps}. It must be at most {MOST_STEPS}.")
    if settings.noise_removal not in ("ancestral", "greedy", "none"):
        raise ValueError(f"noise_removal={settings.noise_removal!r}. Give 'ancestral', 'greedy' or 'none'.")
    if not are_fractions(settings.psi_fractions):
        raise ValueError(
            f"psi_fractions={settings.psi_fractions!r}. Give two fractions of the steps, early and middle, of sum at "
            "most 1."
        )
    if "time_grid" not in SAMPLERS[settings.sampler].unused:
        times = time_grid(settings.time_grid, settings.num_steps, settings.psi_fractions)
        if settings.sampler == "psi":
            kappas(settings.psi, settings.psi_fractions, [1 - t / 2 for t in times])


def check_lengths(settings: DiffusionGenerationConfig, longest: int):
    """Refuse impossible lengths. `longest` is the model's, in tokens."""
    for name in ("max_new_tokens", "max_length", "stride", "block_length"):
        value = getattr(settings, name)
        if value is not None and not is_whole(value, 1):
            raise ValueError(f"{name}={value!r}. It must be a positive whole number.")
    if settings.max_new_tokens is not None and settings.max_length is not None:
        raise ValueError("Both max_new_tokens and max_length are given. Give one of them.")
    if settings.stride is not None and settings.stride > longest:
        raise ValueError(f"stride={settings.stride}. It must be at most the model's {longest}.")
    if settings.trim_eos and settings.eos_token_id is None:
        raise ValueError("trim_eos=True without an eos_token_id. Give it here or in generation_config.json.")


def check_controls(settings: DiffusionGenerationConfig, given: set[str], process):
    """Refuse what is no control of the prediction of a process, no precision, no id and no form of output."""
    temperature, top_k, top_p = settings.temperature, settings.top_k, settings.top_p
    if not (is_number(temperature) and (temperature == 0 or 1e-6 <= temperature < float("inf"))):
        raise ValueError(f"temperature={temperature!r}. It must be 0, which is greedy, or a number from 1e-6.")
    if not is_whole(top_k, 0):
        raise ValueError(f"top_k={top_k!r}. It must be a whole number. 0 keeps every token.")
    if not (is_number(top_p) and 0 < top_p <= 1):
        raise ValueError(f"top_p={top_p!r}. It must be a number in (0, 1]. 1 keeps every token.")
    if settings.suppress_tokens is not None:
        _check_suppressed(settings.suppress_tokens, process)
    _check_ids_and_flags(settings)
    if settings.precision not in ("float64", "float32"):
        raise ValueError(f"precision={settings.precision!r}. Give 'float64' or 'float32'.")
    if "output_history" in given and settings.output_history and not settings.return_dict_in_generate:
        raise ValueError(
            "output_history=True without return_dict_in_generate=True. The history is a field of the dict: ask for it."
        )


def _check_suppressed(ids, process):
    if not isinstance(ids, (list, tuple)) or not all(
        is_whole(token, 0) and token < process.vocab_size for token in ids
    ):
        raise ValueError(f"suppress_tokens={ids!r}. It must be a list of ids from 0 to {process.vocab_size - 1}.")
    if len({*ids} | {process.mask_id} - {None}) == process.vocab_size:
        raise ValueError("suppress_tokens holds every id that can be sampled. Leave some out.")


def _check_ids_and_flags(settings: DiffusionGenerationConfig):
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(settings, name)
        several = list(value) if isinstance(value, (list, tuple)) else [value]
        if value is not None and not (several and all(is_whole(token, 0) for token in several)):
            raise ValueError(f"{name}={value!r}. It must be an id, or a list of ids.")
    for name in ("trim_eos", "return_dict_in_generate", "output_history"):
        value = getattr(settings, name)
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r}. It must be True or False.")
