"""DriftTrainer: Algorithm 1 of the TokenDrift paper on the Hugging Face Trainer. It wires and holds no formula."""

from __future__ import annotations

import logging
import os
import shutil
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_utils import has_length

from .cards import Card
from .checkpoint import MANIFEST, last_complete_checkpoint, read_manifest, write_manifest
from .collator import CleanCollator
from .drift import DriftField, drift_field
from .drift_config import DriftConfig
from .ema import WeightEMA
from .encoder import FrozenEncoder
from .hub.process_tokendrift import stratified_times
from .lift import soft_lift, token_entropy
from .lora import add_adapters, hide_local_base
from .monitor import Dynamics, SampleMonitor, entropy_ratio
from .noise import EVALUATE, TRAIN, row_noise, spread_times
from .objectives import feature_loss, mirror_loss
from .queue import FeatureQueue

logger = logging.getLogger(__name__)

SMALLEST_TIME = 1e-3  # the reference's sampling_eps: t is drawn from [1e-3, 1]
QUEUES_FILE, EMA_FILE = "drift_queues.safetensors", "drift_ema.safetensors"
# Settings whose silent change would make a resumed run another run.
RECORDED = (
    "seed objective base_loss_weight drift_scale mirror_step_size mirror_eta encoder_input drift_kernel temperatures "
    "attraction repulsion queue_size gather_features feature_layers feature_pooling feature_tokens encoder_timestep "
    "ema_decay gradient_accumulation_steps"
).split()


@dataclass(frozen=True)
class CorruptedBatch:
    """A batch and its noisy version; everything [B, L] but t."""

    x_0: Tensor
    x_t: Tensor
    t: Tensor  # [B]
    exists: Tensor  # bool: no padding
    free: Tensor  # bool: neither padding nor prompt, so corruptible
    predicted: Tensor  # bool: M, a part of the free positions
    attention_mask: Tensor | None  # as given; None: everything exists
    order: Tensor  # uniforms that choose the positions of token features


class DriftTrainer(Trainer):
    """Refine a discrete diffusion language model with the drift objective (or continue its training).

    The training set holds clean `input_ids`, and optionally `attention_mask` (0 = padding) and `prompt_mask` (1 =
    prompt) or `labels` (-100 = prompt): prompts and padding are never corrupted, predicted or lifted, but the network
    and the encoder see prompts. `evaluate()` reports `eval_loss`, the NELBO in nats per token.

    Gradient accumulation changes the drift objective, not only its noise: the field is made within a micro-batch (of
    all processes), and the queues take in every micro-batch.

    Args:
        model: an MDLM or DUO model, of this package or loaded as custom code.
        args: a `DriftConfig`.
        encoder: the frozen encoder phi. None: a copy of the model as it is now; "base" with peft: the model with its
            adapters disabled, without a second copy; or a path, a model or a `FrozenEncoder` of the same vocabulary.
        peft_config: wrap the model in adapters (peft's LoraConfig and the like) and train only those.
        kwargs: everything else that `Trainer` takes.

    Raises:
        ValueError: a model without a diffusion process, an encoder that does not fit, a model that already has adapters
            together with a peft_config, DeepSpeed ZeRO-3.
    """

    loss_is_scaled_for_ga = False  # compute_loss returns the mean over a micro-batch

    def __init__(
        self,
        model: PreTrainedModel,
        args: DriftConfig,
        *,
        encoder: str | os.PathLike | PreTrainedModel | FrozenEncoder | None = None,
        peft_config=None,
        **kwargs,
    ):
        if not isinstance(args, DriftConfig):
            raise ValueError(f"args must be a DriftConfig, but it is a {type(args).__name__}.")
        if is_deepspeed_zero3_enabled():
            raise ValueError(
                "DeepSpeed ZeRO-3 splits the weights that the default of encoder= copies, and gradients through a "
                "split frozen encoder are untested. Use ZeRO stage 1 or 2, or FSDP."
            )
        has_adapters = hasattr(model, "peft_config")
        base = model.get_base_model() if has_adapters else model
        if not hasattr(base, "process"):
            raise ValueError(
                f"{type(base).__name__} has no diffusion process. DriftTrainer refines MDLMForMaskedLM and "
                "DUOForMaskedLM, which also read the released checkpoints."
            )
        if peft_config is not None and has_adapters:
            raise ValueError(
                "The model already has adapters and peft_config asks for more. Pass the bare model, merge the adapters "
                "first (merge_and_unload), or leave peft_config out to go on training them."
            )
        self.process = base.process
        self.encoder = None
        drifts = args.objective != "none"
        settings = {"layers": args.feature_layers, "timestep": args.encoder_timestep}
        if drifts and encoder is None:
            self.encoder = FrozenEncoder.copy_of(model, **settings)
        if peft_config is not None:
            model = add_adapters(model, peft_config)
        if drifts and encoder is not None:
            self.encoder = FrozenEncoder.of(encoder, model, checkpointing=args.gradient_checkpointing, **settings)
        if drifts:
            self.encoder.check_vocabulary(self.process.vocab_size)
        mask_id = getattr(self.process, "mask_id", None)
        kwargs.setdefault(
            "data_collator",
            CleanCollator(self.process.vocab_size, base.config.max_position_embeddings, mask_id),
        )
        super().__init__(model=model, args=args, **kwargs)
        self.model_accepts_loss_kwargs = False  # what loss_is_scaled_for_ga says to transformers before 5.24
        if self.encoder is not None:
            self.encoder.to(self.args.device)
        self.real_queue, self.generated_queue = FeatureQueue(args.queue_size), FeatureQueue(args.queue_size)
        self.ema = None
        if args.ema_decay is not None:
            if self.is_fsdp_enabled or self.is_deepspeed_enabled:
                raise ValueError("ema_decay does not work with FSDP or DeepSpeed, which split or replace the weights.")
            self.ema = WeightEMA(self.model, args.ema_decay)
            self.add_callback(_UpdateEMA(self))
        self.monitor = None
        if args.gen_ppl_num_steps:
            self.monitor = SampleMonitor(args, self.processing_class)
            self.add_callback(Dynamics(args.gen_ppl_min_entropy_ratio))
        _warn_of_half_precision(self.model)
        self.card = Card.of_run(self.model, args, has_tokenizer=self.processing_class is not None)
        if args.push_to_hub:
            hide_local_base(self.model)
        self._statistics: dict[str, list[Tensor]] = defaultdict(list)
        self._micro_step = (-1, 0)  # (optimizer step, index of the next micro-batch in it)
        self._eval_batches, self._eval_rows, self._eval_sums = 0, 0.0, torch.zeros(2)

    def _set_signature_columns_if_needed(self):
        self._signature_columns = ["input_ids", "attention_mask", "prompt_mask", "labels"]

    # Corruption

    def _corrupt(
        self, inputs: dict[str, Tensor], key: tuple[int, ...], rows: range, num_rows: int | None
    ) -> CorruptedBatch:
        """Draw t and x_t for the rows at these global positions; `num_rows` strata of t, or None: spread over a set."""
        x_0 = inputs["input_ids"]
        noise = row_noise(key, rows, x_0.shape[1], self.process.vocab_size)
        if num_rows is None:
            t = SMALLEST_TIME + (1 - SMALLEST_TIME) * spread_times(rows)
        else:
            t = stratified_times(noise.time, SMALLEST_TIME, first_row=rows.start, num_rows=num_rows)
        t, uniforms, order = (x.to(x_0.device, torch.float32) for x in (t, noise.uniforms, noise.order))
        exists = torch.ones_like(x_0, dtype=torch.bool)
        if "attention_mask" in inputs:
            exists = inputs["attention_mask"].bool()
        free = exists
        if "prompt_mask" in inputs:
            free = free & ~inputs["prompt_mask"].bool()
        if "labels" in inputs:
            free = free & (inputs["labels"] != -100)
        x_t = self.process.corrupt(x_0, t, uniforms, noise.random_tokens.to(x_0.device))
        x_t = torch.where(free, x_t, x_0)
        predicted = self.process.predicted_positions(x_t) & free
        return CorruptedBatch(x_0, x_t, t, exists, free, predicted, inputs.get("attention_mask"), order)

    def _own_rows(self, x: Tensor) -> tuple[range, int]:
        """The positions of this process's rows among those of all processes, and the number of all."""
        sizes = self._sizes(x)
        first = sum(sizes[: self.accelerator.process_index])
        return range(first, first + len(x)), sum(sizes)

    def _sizes(self, x: Tensor) -> list[int]:
        if self.accelerator.num_processes == 1:
            return [len(x)]
        return self.accelerator.gather(torch.tensor([len(x)], device=x.device)).tolist()

    def _gather_rows(self, x: Tensor) -> Tensor:
        """The rows of all processes in order, also when they hold different numbers of them. No gradient."""
        if self.accelerator.num_processes == 1:
            return x
        sizes = self._sizes(x)
        gathered = self.accelerator.gather(self.accelerator.pad_across_processes(x)).split(max(sizes))
        return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])

    def _sum(self, x: Tensor) -> Tensor:
        return self.accelerator.reduce(x, "sum") if self.accelerator.num_processes > 1 else x

    # Training

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The mean loss of a micro-batch over all processes: drift plus `base_loss_weight` times the NELBO.

        Raises:
            ValueError: the loss is not finite; the message names the step. No weight has been touched by then.
        """
        step = self.state.global_step
        micro = self._micro_step[1] if self._micro_step[0] == step else 0
        self._micro_step = (step, micro + 1)
        rows, num_rows = self._own_rows(inputs["input_ids"])
        batch = self._corrupt(inputs, (self.args.seed, TRAIN, step, micro), rows, num_rows)
        outputs = model(input_ids=batch.x_t, timesteps=batch.t, attention_mask=batch.attention_mask)
        # The processes' gradients are averaged; these factors make that the mean over all rows and all tokens.
        processes = self.accelerator.num_processes
        loss = torch.zeros((), device=outputs.logits.device)
        if self.args.objective != "none":
            loss = loss + self._drift_loss(outputs.logits, batch) * (len(rows) * processes / num_rows)
        if self.args.base_loss_weight > 0:
            totals, counts = self._nelbo(outputs.logits, batch)
            base_loss = totals.sum() * processes / self._sum(counts.sum()).clamp_min(1)
            self._statistics["base_loss"].append(base_loss.detach())
            loss = loss + self.args.base_loss_weight * base_loss
        if self._sum((~loss.detach().isfinite()).float()) > 0:
            raise ValueError(
                f"The loss at optimizer step {step + 1} is not finite ({loss.item()} on this process). Training "
                f"stopped before any weight took it in; checkpoints up to step {step} in {self.args.output_dir} are "
                "untouched. A lower learning rate, max_grad_norm or float32 instead of float16 usually help."
            )
        return (loss, outputs) if return_outputs else loss

    def _nelbo(self, logits: Tensor, batch: CorruptedBatch) -> tuple[Tensor, Tensor]:
        """For each row, the NELBO in nats and the number of tokens it is over: all that could have been corrupted."""
        nelbo = self.process.nelbo(logits, batch.x_0, batch.x_t, batch.t)
        return nelbo.where(batch.predicted, 0).sum(1), batch.free.sum(1)

    def _drift_loss(self, logits: Tensor, batch: CorruptedBatch) -> Tensor:
        args, E = self.args, self.encoder.embedding
        logits, last = logits[..., : len(E)], len(E) - 1  # another encoder may lack the mask, which has no mass anyway
        positions = None
        if args.feature_pooling == "tokens":
            shortest = self.accelerator.gather(batch.exists.sum(1).min().reshape(1)).min()
            count = min(args.feature_tokens, max(int(shortest), 1))
            positions = batch.order.masked_fill(~batch.exists, -1).topk(count).indices
        with self.accelerator.autocast():
            lifted = soft_lift(logits, E, batch.x_t.clamp_max(last), batch.predicted, mode=args.encoder_input)
            h = self.encoder(lifted, batch.attention_mask, positions)
            with torch.no_grad():
                u = self.encoder(E[batch.x_0.clamp_max(last)], batch.attention_mask, positions)
        all_h, all_u, own = h.detach(), u, range(len(h))
        if args.gather_features:
            own, _ = self._own_rows(h)
            all_h, all_u = self._gather_rows(h.detach()), self._gather_rows(u)
        real, generated = self.real_queue.union(all_u), self.generated_queue.union(all_h)
        drift = drift_field(
            all_h,
            real,
            generated,
            temperatures=args.temperatures,
            self_index=torch.arange(len(all_h), device=h.device),
            attraction=args.attraction,
            repulsion=args.repulsion,
            kernel=args.drift_kernel,
        )
        self._note_drift(drift, real, generated)
        self._statistics["token_entropy"].append(token_entropy(logits.detach(), batch.predicted))
        V = drift.field[own.start : own.stop]
        if args.objective == "feature":
            loss, _ = feature_loss(h, V, args.drift_scale)
        else:
            step = {"step_size": args.mirror_step_size} if args.mirror_eta is None else {"eta": args.mirror_eta}
            divergence = args.objective.removeprefix("mirror_")
            loss, statistics = mirror_loss(
                logits, h, V, batch.predicted, divergence=divergence, reduce=self._sum, **step
            )
            self._statistics["mirror_eta"].append(statistics["mirror_eta"])
        self.real_queue.push(all_u)
        self.generated_queue.push(all_h)
        return loss

    def _note_drift(self, drift: DriftField, real: Tensor, generated: Tensor) -> None:
        """Keep what moves while the normalised loss does not, until the next log."""
        for i, tau in enumerate(self.args.temperatures):
            self._statistics[f"drift_norm_{tau:g}"].append(drift.rms_per_temperature[i])
            self._statistics[f"effective_references_{tau:g}"].append(drift.effective_references[i])
        self._statistics["feature_distance"].append((real.mean(0) - generated.mean(0)).norm())
        self._statistics["queue_fill"].append(torch.tensor(float(len(self.real_queue)), device=real.device))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self._statistics:
            means = torch.stack([torch.stack([x.float() for x in xs]).mean() for xs in self._statistics.values()])
            means = self._sum(means) / self.accelerator.num_processes
            logs.update(zip(self._statistics, means.tolist(), strict=True))
            self._statistics.clear()
        super().log(logs, start_time)

    # Evaluation

    def _averaged(self):
        return nullcontext() if self.ema is None else self.ema.applied(self.model)

    def evaluation_loop(self, dataloader, description, *args, metric_key_prefix="eval", **kwargs):
        """As in `Trainer`, on the averaged weights if there are any; the training trajectory stays as it was.

        The loss is the NELBO in nats per token of the whole data set, whatever the batch size and the padding.
        """
        self._eval_batches, self._eval_sums = 0, torch.zeros(2, dtype=torch.float64)
        self._eval_rows = len(dataloader.dataset) if has_length(dataloader.dataset) else float("inf")
        devices = [self.args.device] if self.args.device.type == "cuda" else []
        with self._averaged(), torch.random.fork_rng(devices):
            output = super().evaluation_loop(
                dataloader, description, *args, metric_key_prefix=metric_key_prefix, **kwargs
            )
            sums = self._eval_sums if self.args.world_size == 1 else self._sum(self._eval_sums.to(self.args.device))
            output.metrics[f"{metric_key_prefix}_loss"] = float(sums[0] / sums[1].clamp_min(1))
            if self.monitor is not None:
                with self.compute_loss_context_manager():
                    measured = self.monitor.measure(self.model)
                # The mean over processes, so that all of them stop, or none.
                values = self._sum(torch.tensor(list(measured.values()), device=self.args.device))
                values = (values / self.accelerator.num_processes).tolist()
                for name, value in zip(measured, values, strict=True):
                    output.metrics[f"{metric_key_prefix}_{name}"] = value
        return output

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """The NELBO of a batch, with noise that depends on the rows' positions in the data set alone."""
        inputs = self._prepare_inputs(inputs)
        first = (self._eval_batches * self.accelerator.num_processes + self.accelerator.process_index) * (
            self.args.eval_batch_size
        )
        self._eval_batches += 1
        rows = range(first, first + len(inputs["input_ids"]))
        with torch.no_grad(), self.compute_loss_context_manager():
            batch = self._corrupt(inputs, (self.args.seed, EVALUATE), rows, num_rows=None)
            outputs = model(input_ids=batch.x_t, timesteps=batch.t, attention_mask=batch.attention_mask)
            totals, counts = self._nelbo(outputs.logits, batch)
        # Rows beyond the data set are repetitions that fill up the last batch of some process.
        real = [row < self._eval_rows for row in rows]
        self._eval_sums += torch.stack([totals.float(), counts.float()]).cpu().double()[:, real].sum(1)
        return totals.sum() / counts.sum().clamp_min(1), None, None

    def _determine_best_metric(self, metrics, trial):
        floor = self.args.gen_ppl_min_entropy_ratio
        if floor is not None and entropy_ratio(self.state.log_history) < floor:
            return False
        return super()._determine_best_metric(metrics, trial)

    # Checkpoints

    def train(self, resume_from_checkpoint: str | os.PathLike | bool | None = None, **kwargs):
        """As in `Trainer`; `resume_from_checkpoint=True` takes the newest complete checkpoint.

        Raises:
            ValueError: no complete checkpoint, or the one that is named is incomplete.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete_checkpoint(self.args.output_dir)
        if resume_from_checkpoint:
            old, new = read_manifest(Path(resume_from_checkpoint))["settings"], self._settings()
            changed = {name: (old.get(name), new[name]) for name in new if old.get(name) != new[name]}
            if changed:
                logger.warning("Resuming with other settings than the checkpoint's (old, new): %s", changed)
            resume_from_checkpoint = str(resume_from_checkpoint)
        return super().train(resume_from_checkpoint=resume_from_checkpoint or None, **kwargs)

    def _settings(self) -> dict:
        # Batches are shared out among processes without changing the run: what counts is all their rows.
        micro_batch = self.args.train_batch_size * self.accelerator.num_processes
        return {name: getattr(self.args, name) for name in RECORDED} | {"global_micro_batch": micro_batch}

    def _save_rng_state(self, output_dir):
        # The last of the Trainer's own files before trainer_state.json, written on every process and backend.
        super()._save_rng_state(output_dir)
        if self.args.should_save:
            queues = {"real": self.real_queue.features, "generated": self.generated_queue.features}
            save_file({k: v.contiguous() for k, v in queues.items()}, Path(output_dir, QUEUES_FILE))
            if self.ema is not None:
                save_file(self.ema.state_dict(), Path(output_dir, EMA_FILE))
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            write_manifest(
                Path(output_dir),
                {"global_step": self.state.global_step, "settings": self._settings()},
            )

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        queues = load_file(Path(checkpoint, QUEUES_FILE))
        self.real_queue.load_state_dict({"features": queues["real"]})
        self.generated_queue.load_state_dict({"features": queues["generated"]})
        self._load_ema(checkpoint)

    def _load_ema(self, checkpoint) -> None:
        if self.ema is None:
            return
        path = Path(checkpoint, EMA_FILE)
        if path.is_file():
            self.ema.load_state_dict(load_file(path))
        else:
            self.ema.reset(self.model)  # the checkpoint was written without ema_decay

    def _load_best_model(self):
        super()._load_best_model()
        self._load_ema(self.state.best_model_checkpoint)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in `Trainer`; unlike a checkpoint, a save by the user or for a push holds the averaged weights, if any."""
        if _internal_call and output_dir is not None:  # a checkpoint begins; what is there already no longer counts
            if self.args.should_save:
                Path(output_dir, MANIFEST).unlink(missing_ok=True)
            super().save_model(output_dir, _internal_call)
        else:
            with self._averaged():
                super().save_model(output_dir, _internal_call)

    # Cards and the hub

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            self._write_card(output_dir or self.args.output_dir)

    def _write_card(self, folder: str | os.PathLike) -> None:
        self.card.repo = self.hub_model_id or self.args.hub_model_id
        self.card.settings["trained_steps"] = self.state.global_step
        self.card.save(Path(folder))

    def create_model_card(self, *args, **kwargs) -> None:
        """Write `card`, the facts of this run, instead of the Trainer's draft, whose arguments have no effect."""
        if self.is_world_process_zero():
            self._write_card(self.args.output_dir)

    def push_to_hub(self, *args, **kwargs):
        """As in `Trainer`, with the card of this run; adapters never name a directory of this machine as their base."""
        hide_local_base(self.model)
        return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder):
        # The Trainer copies the files whose names it knows; code and card are not among them.
        if self.is_world_process_zero():
            for path in [*Path(checkpoint_folder).glob("*.py"), Path(checkpoint_folder, "README.md")]:
                shutil.copy(path, self.args.output_dir)
        super()._push_from_checkpoint(checkpoint_folder)


class _UpdateEMA(TrainerCallback):
    def __init__(self, trainer: DriftTrainer):
        self.trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.ema.update(self.trainer.model)


def _warn_of_half_precision(model) -> None:
    trainable = {p.dtype for p in model.parameters() if p.requires_grad}
    halves = [str(dtype) for dtype in (torch.float16, torch.bfloat16) if dtype in trainable]
    if halves:
        logger.warning(
            "The trainable weights are %s: small updates will be lost to rounding. Load the model with "
            "dtype=torch.float32 and set bf16=True instead.",
            ", ".join(halves),
        )
