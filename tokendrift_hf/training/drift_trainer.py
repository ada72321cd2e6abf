"""DriftTrainer: Algorithm 1 of the TokenDrift paper on the Hugging Face Trainer. It wires and holds no formula."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, set_seed
from transformers.trainer_utils import has_length

from ..data.collators import CleanCollator, checked
from ..hub.process_tokendrift import stratified_times
from ..models.compiled import compile_blocks, uncompiled
from ..models.digest import weights_digest
from ..models.loading import load_encoder
from ..models.lora import add_adapters, base_of, hide_local_base, set_task_type
from ..objective.corruption import CorruptedBatch, corrupt, positions
from ..objective.encoder import FrozenEncoder
from ..objective.nelbo import ask_for_nelbo, batch_nelbo, row_nelbo
from ..objective.noise import EVALUATE, SMALLEST_TIME, TRAIN, row_noise, spread_times
from ..objective.objectives import OBJECTIVES, make_objective
from ..objective.predictions import Predictions, predict
from ..publishing.cards import Card
from .checkpoint import ResumableTrainer, temporarily
from .diagnostics import Diagnostics
from .drift_config import DriftConfig, hyperparameters
from .gather import AllProcesses, mean_over_processes, own_rows, row_counts, sum_over_processes
from .monitor import DynamicsCallback, SampleMonitor, entropy_ratio
from .refusals import (
    HalfPrecisionCallback,
    refuse_arguments,
    refuse_model,
    refuse_shared_weights,
    refuse_sharing,
    refuse_unmeasured,
)
from .row_numbers import ROW_NUMBER, NumberedCollator, NumberedRows, NumberedStream, RowSums

logger = logging.getLogger(__name__)


class DriftTrainer(ResumableTrainer):
    """Refine a discrete diffusion language model with the drift objective (or continue its training).

    The training set holds clean `input_ids`, and optionally `attention_mask` (0 = padding) and `prompt_mask` (1 =
    prompt) or `labels` (-100 = prompt): prompts and padding are never corrupted, predicted or lifted, but the network
    and the encoder see prompts. `evaluate()` reports `eval_loss`, the NELBO in nats per token.

    Gradient accumulation changes the drift objective, not only its noise: the field is made within a micro-batch (of
    all processes), and the queues take in every micro-batch.

    Args:
        model: an MDLM or DUO model, of this package or loaded as custom code.
        args: a `DriftConfig`.
        encoder: the frozen encoder phi: a path, a model or a `FrozenEncoder` of the same vocabulary. None: a copy of
            the model as it is now. "base" with peft: the model with its adapters disabled, without a second copy.
        peft_config: wrap the model in adapters (peft's LoraConfig and the like) and train only those.
        kwargs: everything else that `Trainer` takes.

    Raises:
        ValueError: a model without a diffusion process, an encoder that does not fit, a model that already has adapters
            together with a peft_config, adapters that are no PeftModel, arguments of `Trainer` that would have no
            effect, a sharing of rows that leaves a process without, DeepSpeed ZeRO-3, or FSDP with encoder "base"
            or with a weight that has two names, such as BERT's.
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
        model = uncompiled(model)
        refuse_model(model, args, peft_config)
        refuse_arguments(args, kwargs)
        base = base_of(model)
        self.process = base.process
        # Before adapters are added: by default the encoder is a copy of the model as it is now, without them.
        self.encoder = _frozen_copy(model, args) if encoder is None else None
        base_features = _base_features(encoder, model, args)
        if peft_config is not None:
            set_seed(args.seed)  # adapters start at random, and before the Trainer sets it
            model = add_adapters(model, peft_config)
        elif base is not model:
            set_task_type(model)
        # After: "base" is the model with its adapters off, and an encoder must not be the model that is trained.
        if encoder is not None:
            self.encoder = _frozen_encoder(encoder, model, args, base_features)
        if self.encoder is not None:
            self.encoder.check_vocabulary(self.process.vocab_size)
            args.feature_layers = list(self.encoder.layers)  # the card and a resumed run name what was used
        kwargs["data_collator"] = kwargs.get("data_collator") or CleanCollator.of(base)
        with temporarily(args, torch_compile_backend=None):  # accelerate would compile the model as a whole
            super().__init__(model=model, args=args, **kwargs)
        if self.optimizer is None and self.optimizer_cls_and_kwargs is None:  # a library that it lacks is missed now
            self.get_optimizer_cls_and_kwargs(args, model)
        # After the Trainer has read the launch: only now the device and FSDP are known.
        if self.is_fsdp_enabled:
            refuse_shared_weights(model)
            if encoder == "base":
                raise ValueError("encoder='base' does not work with FSDP, which splits its weights: leave encoder out.")
        self.model_accepts_loss_kwargs = False  # what loss_is_scaled_for_ga says to transformers before 5.24
        if self.encoder is not None:
            self.encoder.to(self.args.device)
        _compile(model, self.encoder, args)
        self.train_objective = make_objective(args, self.encoder)
        self.monitor = self._make_monitor()
        self.card = self._make_card()
        self.begin()
        if self.is_world_process_zero():
            self.frozen = _frozen_digests(self.model, self.encoder)
        refuse_sharing(args, self.train_dataset, queues=hasattr(self.train_objective, "real_queue"))
        self.add_callback(HalfPrecisionCallback())
        self._row_sums = RowSums()

    def _make_monitor(self) -> SampleMonitor | None:
        """The samples at every evaluation and what watches them, if the run asks for any."""
        if not self.args.gen_ppl_num_steps:
            return None
        self.add_callback(DynamicsCallback(self.args.gen_ppl_min_entropy_ratio))
        return SampleMonitor(self.args, self.processing_class)

    def _make_card(self) -> Card:
        names = ("max_steps", "num_train_epochs", "per_device_train_batch_size")
        settings = hyperparameters(self.args) | {name: getattr(self.args, name) for name in names}
        card = Card.of_run(self.model, self.args, settings, has_tokenizer=self.processing_class is not None)
        if self.args.push_to_hub:  # now that the card knows where the adapters' base lies
            hide_local_base(self.model)
        return card

    def begin(self) -> None:
        self._micro_step = (-1, 0)  # (optimizer step, index of its last micro-batch)
        self.diagnostics = Diagnostics()
        self._rows_without_text = torch.tensor(0, device=self.args.device)  # since the last log line

    def _set_signature_columns_if_needed(self):
        self._signature_columns = ["input_ids", "attention_mask", "prompt_mask", "labels", ROW_NUMBER]

    def _corrupt(
        self, inputs: dict[str, Tensor], key: tuple[int, ...], rows: Sequence[int], num_rows: int | None
    ) -> CorruptedBatch:
        """Draw t and x_t for the rows at these global positions. `num_rows` strata of t, or None: spread over a set."""
        noise = row_noise(key, rows, inputs["input_ids"].shape[1], self.process.vocab_size)
        if num_rows is None:
            t = SMALLEST_TIME + (1 - SMALLEST_TIME) * spread_times(rows)
        else:
            t = stratified_times(noise.time, SMALLEST_TIME, first_row=rows[0], num_rows=num_rows)
        return corrupt(self.process, inputs, noise, t)

    def _next_micro_step(self) -> tuple[int, int]:
        """The optimizer step under way, and which of its micro-batches comes now."""
        step = self.state.global_step
        self._micro_step = (step, self._micro_step[1] + 1 if self._micro_step[0] == step else 0)
        return self._micro_step

    def _get_num_items_in_batch(self, batch_samples, device):
        """The tokens that a step learns from, on all processes: what the Trainer would count by `labels` alone."""
        tokens = [positions(self.process, batch)[1].sum().to(device) for batch in batch_samples]
        return sum_over_processes(self.accelerator, torch.stack(tokens).sum()) if tokens else None

    def _predict(self, model, batch: CorruptedBatch) -> Predictions:
        if self.args.torch_compile:  # a CUDA graph may now write over what the batch before left
            torch.compiler.cudagraph_mark_step_begin()
        return predict(model, base_of(self.accelerator.unwrap_model(model)), batch)

    # Training

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The mean loss of a micro-batch over all processes: the objective plus `base_loss_weight` times the NELBO.

        Raises:
            ValueError: the loss is not finite. The message names the step. No weight has been touched by then.
        """
        step, micro = self._next_micro_step()
        counts = row_counts(self.accelerator, inputs["input_ids"])
        rows, num_rows = own_rows(self.accelerator, counts), sum(counts)
        batch = self._corrupt(inputs, (self.args.seed, TRAIN, step, micro), rows, num_rows)
        predictions = self._predict(model, batch)
        if num_items_in_batch is not None:
            num_items_in_batch = num_items_in_batch / self.current_gradient_accumulation_steps
        processes = AllProcesses(self.accelerator, counts, num_items_in_batch)
        # Every process has its share of the loss, and the processes' gradients are averaged: hence the factor.
        factor = self.accelerator.num_processes
        loss = torch.zeros((), device=batch.t.device)
        with self.accelerator.autocast():
            if self.args.base_loss_weight > 0:
                ask_for_nelbo(self.process, predictions, batch)
            if self.train_objective is not None:
                share, statistics = self.train_objective(predictions, batch, processes)
                self.diagnostics.note(**statistics)
                loss = loss + share * factor
            if self.args.base_loss_weight > 0:
                nelbo = batch_nelbo(self.process, predictions, batch)
                base_loss = processes.token_mean(nelbo, batch.free.sum(1)) * factor
                self.diagnostics.note(base_loss=base_loss)
                loss = loss + self.args.base_loss_weight * base_loss
        if sum_over_processes(self.accelerator, (~loss.detach().isfinite()).float()) > 0:
            self.abandon_step("loss", f"{loss.item()} on this process")
        if self.train_objective is not None:
            self.train_objective.accept()
        self._rows_without_text += (~batch.free.any(dim=1)).sum()
        return (loss, {}) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs |= self.diagnostics.means(mean_over_processes)
            if idle := int(sum_over_processes(self.accelerator, self._rows_without_text)):
                logs["rows_without_text"] = idle
                logger.warning("%d rows since the last log line are padding or prompt alone: they teach nothing.", idle)
                self._rows_without_text.zero_()
        super().log(logs, start_time)

    # Evaluation

    def _get_dataloader(self, dataset, *args, is_training=False, **kwargs):
        """As in `Trainer`, but batches are looked at, and rows that are evaluated carry their number.

        Every process gets equally many, by repetition, whatever the settings for training: so no process waits for
        another that has none, and no row is left out. A row that is repeated counts once.
        """
        collate = checked(self.data_collator, CleanCollator.of(base_of(self.model)))
        if is_training:
            with temporarily(self, data_collator=collate):
                return super()._get_dataloader(dataset, *args, is_training=True, **kwargs)
        numbered = NumberedRows(dataset) if has_length(dataset) else NumberedStream(dataset)
        with (
            temporarily(self, data_collator=NumberedCollator(collate)),
            temporarily(self.args, dataloader_drop_last=False),
            temporarily(self.accelerator.dataloader_config, even_batches=True),
        ):
            return super()._get_dataloader(numbered, *args, **kwargs)

    def evaluation_loop(self, *args, metric_key_prefix="eval", **kwargs):
        """As in `Trainer`, on the averaged weights if there are any. The training trajectory stays as it was.

        The loss is the NELBO in nats per token of the whole data set, whatever the batch size and the padding.
        """
        self._row_sums = RowSums()
        devices = [self.args.device] if self.args.device.type == "cuda" else []
        with self.averaged(), torch.random.fork_rng(devices):
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
            measured = {"loss": self._row_sums.mean()}
            if self.monitor is not None:
                with self.compute_loss_context_manager():
                    sampled = self.monitor.measure(self.model)
                # The mean over processes, so that all of them stop, or none.
                measured |= dict(zip(sampled, mean_over_processes(list(sampled.values())), strict=True))
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in measured.items()})
        return output

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """The NELBO of a batch, with noise that depends on the rows' places in the data set alone.

        Nothing is returned, since what the Trainer would do with it is a collective of all processes.
        """
        inputs = self._prepare_inputs(inputs)
        numbers = inputs.pop(ROW_NUMBER).tolist()
        with torch.no_grad(), self.compute_loss_context_manager(), self.accelerator.autocast():
            batch = self._corrupt(inputs, (self.args.seed, EVALUATE), numbers, num_rows=None)
            totals, tokens = row_nelbo(self.process, self._predict(model, batch), batch)
            self._row_sums.add(numbers, totals, tokens)
        return None, None, None

    def _determine_best_metric(self, metrics, trial):
        floor = self.args.gen_ppl_min_entropy_ratio
        if floor is not None and entropy_ratio(self.state.log_history) < floor:
            return self.stop.stopping
        refuse_unmeasured(self.args.metric_for_best_model, metrics)
        return super()._determine_best_metric(metrics, trial)

    # What is saved

    def extra_state(self):
        return self._queues(shared=True)

    def process_state(self):
        return self._queues(shared=False)

    def _queues(self, shared: bool) -> dict[str, dict[str, Tensor]]:
        """What the objective remembers, if that is (not) the same on all processes."""
        if self.train_objective is None or shared != (self.args.gather_features or self.args.world_size == 1):
            return {}
        return {"drift_queues": self.train_objective.state_dict()}

    def load_extra_state(self, state):
        if self.train_objective is not None:
            self.train_objective.load_state_dict(state["drift_queues"])

    def write_card(self, folder):
        base = base_of(self.model)
        if hasattr(base, "save_adaptation"):  # a folder of adapters does not hold what the model was told
            base.save_adaptation(folder)
        self.card.repo = self.hub_model_id or self.args.hub_model_id
        self.card.settings["trained_steps"] = self.state.global_step
        self.card.save(Path(folder))


def _frozen_copy(model, args: DriftConfig) -> FrozenEncoder | None:
    if not _needs_encoder(args):
        return None
    return FrozenEncoder.copy_of(model, **_encoder_settings(args))


def _base_features(encoder, model, args: DriftConfig) -> Tensor | None:
    """What the encoder "base" has to give once the model has adapters, if it has none yet."""
    if not _needs_encoder(args) or not isinstance(encoder, str) or encoder != "base" or hasattr(model, "peft_config"):
        return None
    return FrozenEncoder.probe(model, **_encoder_settings(args))


def _frozen_encoder(encoder, model, args: DriftConfig, base_features: Tensor | None) -> FrozenEncoder | None:
    """What the user gave as the encoder of `model`: "base", a path, a model or an encoder."""
    if not _needs_encoder(args):
        return None
    if isinstance(encoder, (str, os.PathLike)) and encoder != "base":
        encoder = load_encoder(encoder)
    settings = {"checkpointing": args.gradient_checkpointing, "base_features": base_features}
    return FrozenEncoder.of(encoder, model, **settings, **_encoder_settings(args))


def _encoder_settings(args: DriftConfig) -> dict:
    layers = args.feature_layers or OBJECTIVES[args.objective].default_layers
    return {"layers": layers, "timestep": args.encoder_timestep}


def _compile(model, encoder: FrozenEncoder | None, args: DriftConfig) -> None:
    if args.torch_compile:
        frozen = None if encoder is None else encoder.model
        compile_blocks(model, frozen, backend=args.torch_compile_backend, mode=args.torch_compile_mode)


def _needs_encoder(args: DriftConfig) -> bool:
    return args.objective in OBJECTIVES and OBJECTIVES[args.objective].needs_encoder


def _frozen_digests(model, encoder: FrozenEncoder | None) -> dict[str, str]:
    """Of the weights that a run rests on and no checkpoint holds, taken before they are split or moved."""
    weights = {"base of the adapters": {name: p for name, p in model.named_parameters() if not p.requires_grad}}
    if encoder is not None and encoder.frozen is nullcontext:  # otherwise it is that base
        weights["encoder"] = encoder.model.state_dict()
    return {what: weights_digest(tensors) for what, tensors in weights.items() if tensors}
