"""DriftConfig: TrainingArguments plus the settings of TokenDrift."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from pathlib import Path

from transformers import TrainingArguments

from ..hub.settings_tokendrift import MOST_STEPS
from ..objective.drift_objective import DriftObjective
from ..objective.lift import MODES
from ..objective.mmd_objective import MMDObjective
from ..objective.objectives import OBJECTIVES
from .libraries import check_accelerator_config, check_libraries
from .schedule import check_schedule

KERNELS = ("paper", "drifting")
POOLINGS = ("mean", "tokens")
TEMPERATURES = (1e-4, 1e4)  # of distances around 1: beyond, one reference has all the weight, or all have the same
MOST_POWER = 100  # of exp(k s): at k = 100 a mean log-probability s of -0.9 is 0 in float32
BANDWIDTHS = (0.01, 100)  # in median distances: the kernel of such a distance is exp(-5000), or 1 but for 5e-5
ENCODER_FIELDS = ("encoder_input", "feature_layers", "feature_pooling", "feature_tokens", "encoder_timestep")
FEATURE_FIELDS = ("encoder_input", "feature_pooling", "feature_tokens")  # how the drift makes features of a prediction
# The fields of TrainingArguments that decide, beside our own, which weights a batch of rows makes of which.
OPTIMISATION = (
    "learning_rate",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "optim",
    "optim_args",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "weight_decay",
    "max_grad_norm",
    "gradient_accumulation_steps",
    "bf16",
    "fp16",
    "seed",
)


def _choice(name: str, value, allowed) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not known; choose one of {', '.join(map(repr, allowed))}.")


def _number(name: str, value, *, at_least=None, above=None, at_most=math.inf, whole=False) -> None:
    kind = int if whole else (int, float)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{name} must be a{' whole' if whole else ''} number, but it is {value!r}.")
    low = (at_least is not None and value < at_least) or (above is not None and value <= above)
    if low or value > at_most or not math.isfinite(value):
        needed = f"at least {at_least}" if at_least is not None else f"above {above}"
        needed += f", at most {at_most}" if at_most < math.inf else ""
        raise ValueError(f"{name}={value} is out of range: it must be {needed}.")


_SHOWN: ContextVar[bool] = ContextVar("shown", default=False)


@dataclass
class DriftConfig(TrainingArguments):
    """Arguments of `DriftTrainer`. Fields of `TrainingArguments` keep their meaning. Ours are below.

    Defaults that differ from `TrainingArguments`: learning_rate 3e-5 (the paper's for MDLM), logging_steps 10,
    ddp_find_unused_parameters False (every parameter is used), remove_unused_columns True for the columns of
    `DriftTrainer`. Default values of the method are those of the paper (Oba, Furuta and Okazaki, section 4.1 and
    appendix).
    """

    learning_rate: float = field(default=3e-5, metadata={"help": "Peak learning rate of AdamW."})
    logging_steps: float = field(default=10, metadata={"help": "Log every so many optimizer steps."})
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "Left off: every parameter takes part in every step."}
    )

    # Objective
    objective: str = field(
        default="feature",
        metadata={
            "help": "feature: L2 to the drifted feature (the paper's main method); mirror_kl, mirror_mse: a mirror "
            "teacher in logit space; mmd: draws against the real row, by policy gradient; alpha: a power of the "
            "likelihood of windows of text; none: none of these, which with base_loss_weight=1 is plain continued "
            "training."
        },
    )
    base_loss_weight: float = field(default=0.0, metadata={"help": "Weight of the model's own NELBO in the loss."})
    drift_scale: float = field(default=1.0, metadata={"help": "alpha: how far along the field the target lies."})
    mirror_step_size: float = field(
        default=1.0,
        metadata={
            "help": "Step s of the mirror teacher: it changes p by about s^2/2 nats (KL) a position, at any length and "
            "vocabulary."
        },
    )
    mirror_eta: float | None = field(
        default=None, metadata={"help": "The paper's raw step size eta instead of mirror_step_size; null: not used."}
    )
    encoder_input: str = field(
        default="soft",
        metadata={
            "help": "soft: expected embedding p E; hard_st, sampled_st: the likeliest or a drawn one, straight-through."
        },
    )

    # Drift field
    drift_kernel: str = field(
        default="paper",
        metadata={"help": "paper: affinity exp(-|h-u|^2/tau); drifting: distance over its mean, as in Drifting."},
    )
    temperatures: list[float] = field(
        default_factory=lambda: [0.02, 0.05, 0.2], metadata={"help": "tau: the widths of the affinity kernel."}
    )
    attraction: float = field(default=1.0, metadata={"help": "Weight of the pull towards real features."})
    repulsion: float = field(default=1.0, metadata={"help": "Weight of the push away from generated features."})
    queue_size: int = field(
        default=1024,
        metadata={"help": "Past real and past generated features kept as references, each; 0: none."},
    )
    gather_features: bool = field(
        default=True, metadata={"help": "Use the features of all processes as anchors and references."}
    )

    # Draws (objective mmd)
    mmd_groups: int = field(default=4, metadata={"help": "Groups of draws from one prediction, at least 2."})
    mmd_samples: int = field(default=2, metadata={"help": "Draws a group, at least 2."})
    mmd_bandwidth: float = field(
        default=1.0,
        metadata={
            "help": "Width of the kernel, in median distances between features of real tokens at first, 0.01 to 100."
        },
    )
    mmd_credit: int | str = field(
        default=1,
        metadata={
            "help": "Whose reward a drawn token is given: that of the tokens within so many of it (0: its own alone), "
            "or 'sequence', that of the whole draw as published, which needs batches of hundreds of rows."
        },
    )

    # Powers of the likelihood (objective alpha)
    alpha_power: float = field(
        default=1.0,
        metadata={"help": "k: the gradient of a window of mean log-probability s has the weight exp(k s)."},
    )
    alpha_window: int | None = field(
        default=8, metadata={"help": "Predicted positions a window; null: the whole row, as published."}
    )

    # Encoder
    feature_layers: list[int] | None = field(
        default=None,
        metadata={
            "help": "Hidden states that make the feature: 0 embeddings, i output of block i, -1 last block. null: the "
            "objective's own, which is [-2, -1] as in the paper, and for mmd the block a third up the stack."
        },
    )
    feature_pooling: str = field(
        default="mean", metadata={"help": "mean: one feature a sequence; tokens: one a position (feature_tokens)."}
    )
    feature_tokens: int = field(default=16, metadata={"help": "Positions a sequence, with feature_pooling=tokens."})
    encoder_timestep: float = field(
        default=0.0, metadata={"help": "Diffusion time that a time-conditioned encoder is told, in [0, 1]."}
    )

    # Samples during training, at every evaluation (eval_strategy, eval_steps)
    gen_ppl_num_steps: list[int] = field(
        default_factory=list,
        metadata={"help": "Sample at these numbers of steps at every evaluation; logs eval_entropy_nfe4 and the like."},
    )
    gen_ppl_num_samples: int = field(default=64, metadata={"help": "Sequences sampled at each number of steps."})
    gen_ppl_judge: str | None = field(
        default=None,
        metadata={"help": "Judge (folder or Hub id) of these samples: logs eval_gen_ppl_nfe4 and the like."},
    )
    gen_ppl_min_entropy_ratio: float | None = field(
        default=None,
        metadata={
            "help": "Stop once the entropy of the samples is below this fraction of that at the start, e.g. 0.9; "
            "such a checkpoint never counts as the best."
        },
    )

    # Weights that are evaluated and saved
    ema_decay: float | None = field(
        default=None, metadata={"help": "Decay of a float32 moving average of the weights, e.g. 0.999; null: none."}
    )

    def __getstate__(self) -> dict:
        state = dict(vars(self))
        if not _SHOWN.get():
            return state
        secret = state.keys() - without_secrets(state).keys()
        paths = {name: Path(x).name for name, x in state.items() if isinstance(x, str) and os.path.isabs(x)}
        return state | dict.fromkeys(secret) | paths

    def __post_init__(self):
        self._check_types()
        check_accelerator_config(self.accelerator_config)
        super().__post_init__()
        self._check_trainer()
        if self.max_steps == 0:
            raise ValueError("max_steps=0: give the number of steps, or -1 for num_train_epochs passes over the text.")
        if self.num_train_epochs == 0 and self.max_steps < 0:
            raise ValueError("num_train_epochs=0 trains nothing: give the passes over the text, or max_steps above 0.")
        check_schedule(self)
        check_libraries(self)
        self._check_inherited()
        self._check_objective()
        self._check_drift()
        self._check_draws_and_powers()
        self._check_encoder()
        self._check_averages()
        self._check_samples()

    def _check_types(self):
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type in (bool, "bool") and not isinstance(value, bool):
                raise ValueError(f"{f.name} must be true or false, but it is {value!r}.")
        if not isinstance(self.output_dir, str | os.PathLike | None):
            raise ValueError(f"output_dir must be a path, but it is {self.output_dir!r}.")
        if self.output_dir is not None and not str(self.output_dir).strip():
            raise ValueError(f"output_dir={self.output_dir!r} names no directory. Give a name, or leave it out.")

    def _check_inherited(self):
        for name in ("bf16_full_eval", "fp16_full_eval"):
            if getattr(self, name):
                raise ValueError(
                    f"{name}=True casts the weights that are trained, in place, at the first evaluation. Set "
                    f"{name.removesuffix('_full_eval')}=True: then evaluations run in that precision as well."
                )
        for name, unused in (("label_smoothing_factor", 0), ("use_liger_kernel", False)):
            if getattr(self, name) != unused:
                raise ValueError(f"{name}={getattr(self, name)} has no effect on this loss. Leave it out.")

    def _check_objective(self):
        _choice("objective", self.objective, (*OBJECTIVES, "none"))
        _number("base_loss_weight", self.base_loss_weight, at_least=0)
        if self.objective == "none" and self.base_loss_weight == 0:
            raise ValueError(
                "objective='none' with base_loss_weight=0 leaves nothing to train on. Set base_loss_weight=1 for "
                "continued training, or choose an objective."
            )

    def _check_drift(self):
        _choice("encoder_input", self.encoder_input, MODES)
        _choice("drift_kernel", self.drift_kernel, KERNELS)
        _number("drift_scale", self.drift_scale, above=0)
        _number("mirror_step_size", self.mirror_step_size, above=0)
        if self.mirror_eta is not None:
            _number("mirror_eta", self.mirror_eta, above=0)
        _number("attraction", self.attraction, at_least=0)
        _number("repulsion", self.repulsion, at_least=0)
        if OBJECTIVES.get(self.objective) is DriftObjective and self.attraction == self.repulsion == 0:
            raise ValueError("attraction=0 and repulsion=0 give a field of zero: set at least one of them above 0.")
        _number("queue_size", self.queue_size, at_least=0, whole=True)
        if not isinstance(self.temperatures, (list, tuple)) or not self.temperatures:
            raise ValueError(f"temperatures must be a list of positive numbers, but it is {self.temperatures!r}.")
        for temperature in self.temperatures:
            _number("temperatures", temperature, at_least=TEMPERATURES[0], at_most=TEMPERATURES[1])
        self.temperatures = list(self.temperatures)

    def _check_draws_and_powers(self):
        _number("mmd_bandwidth", self.mmd_bandwidth, above=0)
        least, most = BANDWIDTHS
        if not least <= self.mmd_bandwidth <= most:
            raise ValueError(
                f"mmd_bandwidth={self.mmd_bandwidth} is out of range: it must be from {least} to {most}, in median "
                "distances between features of real tokens. Far from 1 the kernel is 0 or 1 for all pairs, within the "
                "rounding of float32, and the gradient is zero or noise."
            )
        for name, use in (("mmd_groups", "a baseline"), ("mmd_samples", "a repulsion")):
            _number(name, getattr(self, name), whole=True)
            if getattr(self, name) < 2:
                raise ValueError(f"{name}={getattr(self, name)} leaves no other draw for {use}: give 2 or more.")
        if self.mmd_credit != "sequence":
            if isinstance(self.mmd_credit, str):
                raise ValueError(f"mmd_credit={self.mmd_credit!r} is not known: give 'sequence' or a number of tokens.")
            _number("mmd_credit", self.mmd_credit, at_least=0, whole=True)
        _number("alpha_power", self.alpha_power, above=0, at_most=MOST_POWER)
        if self.alpha_window is not None:
            _number("alpha_window", self.alpha_window, at_least=1, whole=True)

    def _check_encoder(self):
        _choice("feature_pooling", self.feature_pooling, POOLINGS)
        _number("feature_tokens", self.feature_tokens, at_least=1, whole=True)
        _number("encoder_timestep", self.encoder_timestep, at_least=0)
        if self.encoder_timestep > 1:
            raise ValueError(f"encoder_timestep={self.encoder_timestep} is out of range: a time lies in [0, 1].")
        objective = OBJECTIVES.get(self.objective)
        if objective is MMDObjective:
            self._refuse_unused(FEATURE_FIELDS, "gives its encoder drawn tokens and compares those one by one")
        if objective is not None and not objective.needs_encoder:
            self._refuse_unused(ENCODER_FIELDS, "has no encoder")
            return
        default = getattr(objective, "default_layers", (-2, -1))
        if self.feature_layers is None and not callable(default):  # else it depends on the encoder's depth
            self.feature_layers = list(default)
        if self.feature_layers is not None:
            if not isinstance(self.feature_layers, (list, tuple)) or not self.feature_layers:
                raise ValueError(f"feature_layers must be a list of whole numbers, but it is {self.feature_layers!r}.")
            for layer in self.feature_layers:
                _number("feature_layers", layer, whole=True)
            self.feature_layers = list(self.feature_layers)

    def _refuse_unused(self, names: tuple[str, ...], reason: str):
        for name in names:
            if getattr(self, name) != self.__dataclass_fields__[name].default:
                raise ValueError(
                    f"objective={self.objective!r} {reason}, so {name}={getattr(self, name)!r} would do nothing: leave "
                    "it out."
                )

    def _check_averages(self):
        if self.ema_decay is None:
            return
        _number("ema_decay", self.ema_decay, above=0)
        if self.ema_decay >= 1:
            raise ValueError(f"ema_decay={self.ema_decay} never takes in a new weight: it must be below 1.")
        if self.save_only_model and self.load_best_model_at_end:
            raise ValueError(
                "ema_decay with save_only_model=True leaves the averaged weights out of the checkpoints, so that "
                "load_best_model_at_end cannot restore them. Switch one of the three off."
            )

    def _check_trainer(self):
        """Numbers of `TrainingArguments` that it takes as they come."""
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            _number(name, getattr(self, name), at_least=1, whole=True)
        _number("dataloader_num_workers", self.dataloader_num_workers, at_least=0, whole=True)
        for name in ("seed", "data_seed"):
            if getattr(self, name) is not None:
                _number(name, getattr(self, name), at_least=0, at_most=2**32 - 1, whole=True)  # numpy takes no more
        if self.dataloader_prefetch_factor is not None:
            _number("dataloader_prefetch_factor", self.dataloader_prefetch_factor, at_least=1, whole=True)
        for name in ("learning_rate", "weight_decay", "max_grad_norm", "num_train_epochs", "adam_epsilon"):
            _number(name, getattr(self, name), at_least=0)
        _number("max_steps", self.max_steps, at_least=-1, whole=True)
        for name in ("adam_beta1", "adam_beta2"):
            _number(name, getattr(self, name), at_least=0)
            if getattr(self, name) >= 1:
                raise ValueError(f"{name}={getattr(self, name)} never takes in a new gradient: it must be below 1.")
        if self.save_total_limit is not None:
            _number("save_total_limit", self.save_total_limit, at_least=0, whole=True)
        for name in ("logging_steps", "save_steps"):
            _number(name, getattr(self, name), above=0)

    def _check_samples(self):
        if not isinstance(self.gen_ppl_num_steps, (list, tuple)):
            raise ValueError(f"gen_ppl_num_steps must be a list like [4, 16], but it is {self.gen_ppl_num_steps!r}.")
        for num_steps in self.gen_ppl_num_steps:
            _number("gen_ppl_num_steps", num_steps, at_least=1, at_most=MOST_STEPS, whole=True)
        _number("gen_ppl_num_samples", self.gen_ppl_num_samples, at_least=1, whole=True)
        if self.gen_ppl_min_entropy_ratio is not None:
            _number("gen_ppl_min_entropy_ratio", self.gen_ppl_min_entropy_ratio, above=0, at_most=1)
        for name in ("gen_ppl_judge", "gen_ppl_min_entropy_ratio"):
            if getattr(self, name) is not None and not self.gen_ppl_num_steps:
                raise ValueError(f"{name} needs samples: give gen_ppl_num_steps, such as [4, 16].")
        if self.gen_ppl_num_steps and self.eval_strategy != "no":
            self.eval_on_start = True  # the start is what entropy is compared with


def own_fields() -> list[str]:
    """The names of the settings of the method: the fields that `TrainingArguments` lacks, without those of samples."""
    theirs = {f.name for f in fields(TrainingArguments)}
    names = [f.name for f in fields(DriftConfig) if f.name not in theirs]
    return [name for name in names if not name.startswith("gen_ppl_")]


def hyperparameters(args: DriftConfig) -> dict:
    """Name -> value of everything that decides what a step does to the weights."""
    return {name: getattr(args, name) for name in (*own_fields(), *OPTIMISATION)}


@contextmanager
def shown_to_others() -> Iterator[None]:
    """Inside, a pickled `DriftConfig` holds no token, and of a path of this machine its last part alone."""
    before = _SHOWN.set(True)
    try:
        yield
    finally:
        _SHOWN.reset(before)


def without_secrets(values: dict) -> dict:
    """Arguments by name, without the tokens among them."""
    return {name: value for name, value in values.items() if not name.endswith("_token")}


def recorded_settings(args: DriftConfig, num_processes: int) -> dict:
    """The settings that a resumed run should share with its checkpoint, as JSON gives them back."""
    # Rows are shared out among processes without changing the run: what counts is how many a micro-batch has.
    settings = hyperparameters(args) | {"global_micro_batch": args.train_batch_size * num_processes}
    return json.loads(json.dumps(settings))
