"""What `DriftTrainer` cannot work with, said before anything is done."""

from __future__ import annotations

import logging

import datasets
import torch
from transformers import TrainerCallback
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_utils import IntervalStrategy, has_length

from ..models.lora import base_of
from .drift_config import DriftConfig

logger = logging.getLogger(__name__)

WITHOUT_EFFECT = {
    "compute_loss_func": "the loss is that of `objective` and base_loss_weight. Override compute_loss for another one",
    "compute_metrics": "an evaluation makes no predictions. It measures eval_loss and, of samples, gen_ppl_*. The "
    "on_evaluate of a callback can add to these",
    "preprocess_logits_for_metrics": "an evaluation makes no predictions",
    "model_init": "the frozen encoder and the adapters belong to one model. Pass that model",
}


def refuse_model(model, args, peft_config) -> None:
    """Raise ValueError for arguments of another class, and for models that cannot be refined."""
    if not isinstance(args, DriftConfig):
        raise ValueError(f"args must be a DriftConfig, but it is a {type(args).__name__}.")
    if is_deepspeed_zero3_enabled():
        raise ValueError(
            "DeepSpeed ZeRO-3 splits the weights that the default of encoder= copies, and gradients through a "
            "split frozen encoder are untested. Use ZeRO stage 1 or 2, or FSDP."
        )
    if hasattr(model, "peft_config") and not hasattr(model, "get_base_model"):
        raise ValueError(
            f"The model has adapters in a {type(model).__name__}, which cannot switch them off and save them alone. "
            "Use a PeftModel: peft's get_peft_model without mixed=True, or peft_config=."
        )
    base = base_of(model)
    if not hasattr(base, "process"):
        raise ValueError(
            f"{type(base).__name__} has no diffusion process. DriftTrainer refines MDLMForMaskedLM, "
            "DUOForMaskedLM, and other masked language models once they went through as_diffusion(model, ...)."
        )
    refuse_windows(args, base.longest)
    if peft_config is not None and hasattr(model, "peft_config"):
        raise ValueError(
            "The model already has adapters and peft_config asks for more. Pass the bare model, merge the adapters "
            "first (merge_and_unload), or leave peft_config out to go on training them."
        )


def refuse_windows(args: DriftConfig, longest: int) -> None:
    """Raise ValueError for a window of tokens that is wider than rows of this length."""
    if args.objective == "mmd" and args.mmd_credit != "sequence" and args.mmd_credit >= longest:
        raise ValueError(
            f"mmd_credit={args.mmd_credit} reaches beyond a row, which has {longest} tokens. Give a number below that, "
            "such as 1, or 'sequence'."
        )
    if args.objective == "alpha" and args.alpha_window is not None and args.alpha_window > longest:
        raise ValueError(
            f"alpha_window={args.alpha_window} is longer than a row, which has {longest} tokens. Give a number up to "
            "that, or null for the whole row."
        )


def refuse_shared_weights(model) -> None:
    """Raise ValueError for a model that FSDP cannot split.

    accelerate 1.15 keeps the embedding and a head that shares its weights together. Other weights with two names, such
    as the bias of BERT's head, come into two groups, which torch 2.13 refuses in the first step, without a way out.
    """
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    names.pop(base_of(model).get_input_embeddings().weight, None)
    twice = next((both for both in names.values() if len(both) > 1), None)
    if twice is not None:
        raise ValueError(
            f"{type(base_of(model)).__name__} has one weight under two names ({', '.join(twice)}), which FSDP puts "
            "into two groups. Launch with DDP (recipes/accelerate/ddp.yaml) instead."
        )


def refuse_arguments(args: DriftConfig, arguments: dict) -> None:
    """Raise ValueError for arguments of `Trainer` without effect, no rows, and a metric that nobody measures."""
    for name, reason in WITHOUT_EFFECT.items():
        if arguments.get(name) is not None:
            raise ValueError(f"{name} has no effect here: {reason}.")
    metric, data = args.metric_for_best_model, arguments.get("eval_dataset")
    named = {f"eval_dataset[{name!r}]": rows for name, rows in data.items()} if isinstance(data, dict) else {}
    named |= {"train_dataset": arguments.get("train_dataset")} | ({} if named else {"eval_dataset": data})
    for name, rows in named.items():
        _refuse_no_rows(name, rows)
    if args.eval_strategy != "no" and data is None:
        strategy = IntervalStrategy(args.eval_strategy).value
        raise ValueError(
            f"eval_strategy={strategy!r} needs rows to evaluate: give eval_dataset (in a recipe: validation_split), or "
            "set eval_strategy to 'no'."
        )
    if metric is None or arguments.get("callbacks"):  # whose on_evaluate may measure anything
        return
    kinds = ["entropy"] if args.gen_ppl_judge is None else ["entropy", "gen_ppl"]
    measured = ["loss", *(f"{kind}_nfe{n}" for kind in kinds for n in args.gen_ppl_num_steps)]
    if isinstance(data, dict):
        measured = [f"{name}_{metric}" for name in data for metric in measured]
    if metric.removeprefix("eval_") not in measured:
        raise ValueError(
            f"metric_for_best_model={metric!r} is not measured: choose one of {', '.join(measured)}, or pass a "
            "callback whose on_evaluate adds it."
        )


def refuse_unmeasured(name: str | None, metrics: dict) -> None:
    """Raise ValueError if an evaluation did not measure the metric that chooses the best model."""
    if name is not None and f"eval_{name.removeprefix('eval_')}" not in metrics:
        raise ValueError(f"metric_for_best_model={name!r} was not measured. There are: {', '.join(metrics)}.")


def _refuse_no_rows(name: str, rows) -> None:
    stream = isinstance(rows, datasets.IterableDataset | torch.utils.data.IterableDataset)
    if rows is None or stream:
        return
    listed = hasattr(rows, "__getitem__") and hasattr(rows, "__len__") and not isinstance(rows, dict | str | bytes)
    if not listed:
        raise ValueError(
            f"{name} is a {type(rows).__name__}. Needed is a data set, a stream of datasets, or a list of rows, each "
            "a dictionary with input_ids."
        )
    if len(rows) == 0:
        raise ValueError(f"{name} has no rows.")
    columns = rows.column_names if isinstance(rows, datasets.Dataset) else ["input_ids"]
    if "input_ids" not in columns:
        raise ValueError(
            f"{name} has the columns {columns}, but no input_ids. Pack the text first: "
            "tokendrift_hf.data.pack_documents."
        )


def refuse_sharing(args: DriftConfig, rows, queues: bool) -> None:
    """Raise ValueError for ways to share out the rows that teach nothing, or leave a process waiting for others.

    Args:
        args: say how many rows a micro-batch has, and how they are shared.
        rows: the training set.
        queues: whether the objective compares with the rows of its micro-batch and of its queues.
    """
    config, processes = args.accelerator_config, args.world_size
    whole = args.train_batch_size if config.split_batches else args.train_batch_size * processes
    seen = whole if args.gather_features else whole // processes
    if queues and seen == 1 and not args.queue_size and args.feature_pooling == "mean":
        raise ValueError(
            "One row a micro-batch and queue_size=0 leave a feature alone with itself: there is nothing to drift to. "
            "Set per_device_train_batch_size to 2 or more, or queue_size above 0."
        )
    if args.dataloader_drop_last and has_length(rows) and len(rows) < whole:
        raise ValueError(
            f"The training set has {len(rows)} rows, and one batch of all processes takes {whole}: "
            "dataloader_drop_last=True would leave them all out, and nothing would be trained. Set it to false, take a "
            "smaller per_device_train_batch_size, or give more rows."
        )
    if processes == 1 or config.even_batches or args.dataloader_drop_last or not has_length(rows):
        return
    if config.split_batches:
        rest = len(rows) % args.train_batch_size
        idle = rest > 0 and rest <= args.train_batch_size // processes * (processes - 1)
    else:
        idle = -(-len(rows) // args.train_batch_size) % processes > 0
    if idle:
        raise ValueError(
            f"The last batch of {len(rows)} rows does not reach all {processes} processes: those without a row would "
            "wait for ever. Set even_batches: true, dataloader_drop_last: true, or another number of rows."
        )


def warn_of_half_precision(model) -> None:
    """Warn if weights that are trained are float16 or bfloat16."""
    trainable = {p.dtype for p in model.parameters() if p.requires_grad}
    halves = [str(dtype) for dtype in (torch.float16, torch.bfloat16) if dtype in trainable]
    if halves:
        logger.warning(
            "The trainable weights are %s: small updates will be lost to rounding. Load the model with "
            "dtype=torch.float32 and set bf16=True instead.",
            ", ".join(halves),
        )


class HalfPrecisionCallback(TrainerCallback):
    """Looks at the weights when training starts: much can have happened to them since the trainer was made."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        warn_of_half_precision(model)
