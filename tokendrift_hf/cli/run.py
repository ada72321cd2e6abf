"""A run: what `tokendrift train` does with a recipe. Refine, train the baselines, sample, score, write, publish."""

from __future__ import annotations

import copy
import functools
import gc
import hashlib
import json
import math
import tempfile
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data import load_text, pack_documents
from ..data.packing import spread_rows
from ..data.prompts import pack_prompts
from ..evaluation.comparison import Comparison, check_matches, evaluate_models
from ..evaluation.grid import Harness
from ..evaluation.report import PLOT, write_report
from ..evaluation.sampling import STEPLESS
from ..extras import need
from ..files import read_json, write_json
from ..lock import locked_by_first
from ..models.compiled import compile_blocks
from ..models.digest import weights_digest
from ..models.loading import load_judge, load_model, load_tokenizer
from ..models.lora import merge_adapter
from ..publishing.cards import Card
from ..publishing.upload import publish
from ..training.drift_config import DriftConfig, recorded_settings, without_secrets
from ..training.drift_trainer import DriftTrainer
from ..training.manifest import changed_settings
from ..training.refusals import refuse_windows
from .folder import (
    HISTORY,
    SETTINGS,
    files_left,
    is_finished,
    missing,
    read_history,
    refuse_lost_lines,
    refuse_other_content,
    run_folder,
)
from .measure import GIB, choose_bf16, peak_memory, reset_peak_memory
from .plan import BASE, MAIN_FOLDER, Training, labels_to_match, plan_trainings
from .recipe import AUTO, RESERVED, Recipe


def refine(recipe: Recipe, arguments: dict, resume: bool = False) -> dict:
    """Run a recipe. Returns the results, which are also in `output_dir`/results.json.

    Under `accelerate launch` or `torchrun` all processes train, sample and score. The first one alone writes.

    Args:
        recipe: what to refine, on what, and how to evaluate it.
        arguments: fields of `DriftConfig`.
        resume: go on with the run in `output_dir`: finished parts are kept, training goes on from its newest complete
            checkpoint.

    Raises:
        ValueError: bad fields, a model or text that cannot be used, an output directory that holds something else.
        ImportError: a library that the recipe needs is not installed.
    """
    start = time.perf_counter()
    run = Run.open(recipe, arguments, resume=resume)
    with locked_by_first(run.folder):  # nothing has been written so far
        refuse_lost_lines(run.folder, [] if run.judge is None else [training.label for training in run.trainings])
        refuse_other_content(run.folder, resume)  # which may have come while the model and the text were loaded
        results = {"recipe": asdict(recipe), "arguments": without_secrets(run.arguments), "training": {}}
        for training in run.trainings:
            results["training"][training.label] = run.train_or_resume(training, resume=resume)
        results["seconds_training"] = time.perf_counter() - start
        comparison = None if run.judge is None else run.evaluate()
        results |= {} if comparison is None else asdict(comparison)
        if PartialState().is_main_process:
            if recipe.tasks:
                results["tasks"] = run.evaluate_tasks()
            run.write_card(results["training"][run.main.label]["card"], comparison)
            results["seconds"] = time.perf_counter() - start
            write_json(run.folder / "results.json", results)
            print(f"Done in {results['seconds']:.0f} s. Refined model: {run.main.folder}; everything else beside it.")
            if run.main.config.push_to_hub:
                print(f"Pushed to {publish(run.main.folder, run.main.config)}")
    return results


@dataclass(frozen=True)
class Run:
    """A recipe, checked and with all that it names loaded.

    Attributes:
        recipe: what to refine, on what, and how to evaluate it.
        arguments: fields of `DriftConfig` that all trainings share.
        folder: where everything is written.
        trainings: what is trained. The run is about the first one.
        base: the model that all trainings begin with.
        tokenizer: of the model.
        splits: "train", and "validation" and "reference" where the recipe has them: rows of `input_ids`.
        judge: arguments of `GenPPL`. None: nothing is evaluated.
        train_rows: how many rows there are to train on, and a digest of them. None: they are a stream.
        task_index: where lm-evaluation-harness reads the recipe's tasks. None: it has none.
        losses_before: eval_loss of the base, by what decides the noise that it is measured with.
    """

    recipe: Recipe
    arguments: dict
    folder: Path
    trainings: list[Training]
    base: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    splits: dict[str, Dataset]
    judge: dict | None
    train_rows: str | None = None
    task_index: Any = None
    losses_before: dict[tuple, float] = field(default_factory=dict)

    @classmethod
    def open(cls, recipe: Recipe, arguments: dict, resume: bool = False) -> Run:
        """Check a recipe and load what it names. Nothing is written.

        Raises:
            ValueError: as `refine`.
        """
        arguments = {"report_to": "none", "use_cpu": not torch.accelerator.is_available()} | arguments
        folder = run_folder(arguments)
        refuse_other_content(folder, resume)
        recipe, arguments = _with_bf16(recipe, arguments, folder)
        trainings = plan_trainings(recipe, arguments, folder)
        labels = [training.label for training in trainings]
        check_matches(labels_to_match(recipe, trainings), BASE, [BASE, *labels], recipe.sampling.temperatures)
        config = trainings[0].config
        PartialState().wait_for_everyone()  # no process writes into the folder before all have seen it empty
        base = _load(recipe)
        tokenizer = load_tokenizer(recipe.tokenizer or recipe.model, recipe.trust_remote_code)
        longest = base.longest
        if recipe.block_size is not None and recipe.block_size > longest:
            raise ValueError(
                f"block_size={recipe.block_size} is longer than the model, which takes {longest} tokens. "
                f"Set block_size to {longest} or less."
            )
        judge = None if recipe.judge is None else load_judge(recipe.judge, config.device)
        if judge is not None:
            need("matplotlib", "eval", PLOT)
        if judge is not None or recipe.tasks:  # a wrong sampler is noticed now, not after the training
            sampler = recipe.sampling.sampler
            short = {"max_new_tokens": 3} if sampler == STEPLESS else {"num_steps": 1}  # a token in a frame
            base.generate(num_samples=1, seed=0, sampler=sampler, **short)
        task_index = _task_index(recipe) if recipe.tasks else None
        with config.main_process_first():  # the others find the packed rows in the cache
            splits = {
                name: _rows(recipe, split, tokenizer, recipe.block_size or longest, base.config.vocab_size)
                for name, split in (
                    ("train", recipe.train_split),
                    ("validation", recipe.validation_split),
                    ("reference", recipe.reference_split),
                )
                if split is not None
            }
        train_rows = _described(splits["train"])
        for training in trainings:
            refuse_windows(training.config, recipe.block_size or longest)
        run = cls(recipe, arguments, folder, trainings, base, tokenizer, splits, judge, train_rows, task_index)
        for training in trainings[1:]:  # the first one's trainer is built next, the others' after hours
            if not (resume and is_finished(training.folder)):
                run.check(training)
        return run

    @property
    def main(self) -> Training:
        """The training that the run is about: its model is published, the others are compared with it."""
        return self.trainings[0]

    @functools.cached_property
    def base_weights(self) -> str:
        """A digest: what lies under the model's name may be replaced between two calls."""
        return weights_digest(self.base.state_dict())

    # Training

    def build_trainer(self, training: Training) -> DriftTrainer:
        """The trainer of one training, at its start. Those that were built before must not be used any more."""
        AcceleratorState._reset_state()  # which keeps the precision of the trainer before and refuses another
        trainer = DriftTrainer(
            _load(training.recipe),
            training.config,
            encoder=training.recipe.encoder,
            peft_config=training.peft_config,
            train_dataset=self.splits["train"],
            eval_dataset=self.splits.get("validation"),
            processing_class=self.tokenizer,
        )
        names = "dataset dataset_config dataset_revision text_column prompt_column fill_eos train_split block_size wrap"
        data = {name: getattr(self.recipe, name) for name in [*names.split(), "insert_eos"]}
        trainer.card.describe_data({name: value for name, value in data.items() if value is not None})
        return trainer

    def check(self, training: Training) -> None:
        """Build the trainer of a training and drop it: what it cannot work with is said before any training.

        Raises:
            ValueError, ImportError: as `DriftTrainer`. The message names the training.
        """
        with tempfile.TemporaryDirectory() as scratch:  # a Trainer makes its folder, and a repository for a push
            config = copy.copy(training.config)
            config.output_dir, config.push_to_hub = scratch, False
            try:
                self.build_trainer(replace(training, config=config))
            except (ValueError, ImportError) as error:
                kind = ImportError if isinstance(error, ImportError) else ValueError
                raise kind(f"training {training.label!r}: {error}") from error
        gc.collect()  # a Trainer refers to itself: its model would stay in memory for a while

    def num_steps(self, training: Training) -> int:
        """Optimizer steps of a training. -1 where the text is a stream and `max_steps` is not given."""
        config, rows = training.config, self.splits["train"]
        if config.max_steps > 0 or not isinstance(rows, Dataset):
            return config.max_steps
        return math.ceil(len(rows) / training.global_batch * config.num_train_epochs)

    def describe(self, training: Training, trainer: DriftTrainer) -> str:
        """What a training is: its steps, parameters, rows and batch."""
        config, rows = training.config, self.splits["train"]
        length = self.recipe.block_size or self.base.longest
        trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        return (
            f"{training.label}: {self.num_steps(training)} steps, {trained:,} of {trainer.model.num_parameters():,} "
            "parameters" + (f", {len(rows):,} rows of {length} tokens" if isinstance(rows, Dataset) else "") + "\n"
            f"Global batch {training.global_batch} = {config.train_batch_size} rows a device x "
            f"{config.gradient_accumulation_steps} accumulated x {config.world_size} processes."
        )

    def train_or_resume(self, training: Training, resume: bool = False) -> dict:
        """Do one training, save its model and return its history. A finished training is left alone.

        Raises:
            ValueError: the training in its folder was made with other settings.
        """
        asked = self._settings(training)
        if resume and (training.folder / HISTORY).is_file() and not (training.folder / SETTINGS).is_file():
            raise ValueError(
                f"{training.folder / SETTINGS} is gone, so what the training beside it was asked to do is not known. "
                f"Remove {training.folder} to have that training made anew."
            )
        if resume and (training.folder / SETTINGS).is_file():
            try:
                there = read_json(training.folder / SETTINGS)
            except ValueError as error:
                raise ValueError(f"{error} Remove {training.folder} to have that training made anew.") from error
            if changed := changed_settings(there, asked):
                raise ValueError(
                    f"The training in {training.folder} was made with other settings (there, asked for now): "
                    f"{changed}. Name another --output_dir, or remove {training.folder} to have it made anew."
                )
            if (training.folder / HISTORY).is_file():
                lost = ", ".join(missing(training.folder))
                if not lost:
                    return read_history(training.folder)
                print(f"{training.folder} has lost {lost}: it goes on from its newest checkpoint, or anew.", flush=True)
        trainer = self.build_trainer(training)
        if PartialState().is_main_process:  # now that everything has been accepted, so that a refusal leaves nothing
            print(self.describe(training, trainer), flush=True)
            self.write_settings(training)
        reset_peak_memory(training.config.device)
        before = self._loss_before(training, trainer) if "validation" in self.splits else None
        trainer.train(resume_from_checkpoint=trainer.newest_checkpoint() if resume else None)
        history = {"eval_loss_before": before, "log_history": trainer.state.log_history}
        if "validation" in self.splits:
            history["eval_loss"] = trainer.evaluate()["eval_loss"]
        trainer.card.add_losses(before, history.get("eval_loss"))
        trainer.save_model()
        history["peak_memory_gib"] = round(peak_memory(training.config.device) / GIB, 2)
        history["card"] = vars(trainer.card)
        if PartialState().is_main_process:
            history["files"] = files_left(training.folder)
            write_json(training.folder / HISTORY, history)
            print(f"{training.label}: peak memory {history['peak_memory_gib']:.2f} GiB.", flush=True)
        PartialState().wait_for_everyone()  # all processes sample from what the first one wrote
        return history

    def _loss_before(self, training: Training, trainer: DriftTrainer) -> float:
        """eval_loss of the model that all trainings begin with, measured once for those that would measure the same."""
        noise = (training.config.seed, training.config.bf16, training.config.fp16)
        if noise not in self.losses_before or trainer.monitor is not None:  # a monitor has to see the start
            self.losses_before[noise] = trainer.evaluate()["eval_loss"]
        return self.losses_before[noise]

    def load_trained(self, training: Training) -> PreTrainedModel:
        """The model that a training left."""
        if training.peft_config is None:
            return _load(training.recipe, str(training.folder))
        # Adapters go into the recipe's base: once pushed, they no longer say where it lies.
        return merge_adapter(_load(training.recipe), str(training.folder))

    def write_settings(self, training: Training) -> None:
        """Write what a training is asked to do beside its model, for runs that resume it."""
        write_json(training.folder / SETTINGS, self._settings(training))

    def _settings(self, training: Training) -> dict:
        """What decides the weights that a training gives, however many devices share its batches."""
        config = training.config
        settings = recorded_settings(config, config.world_size)
        names = [f.name for f in fields(Recipe) if "decides_weights" in f.metadata]
        settings |= {name: getattr(training.recipe, name) for name in names}
        settings |= {"max_steps": config.max_steps, "num_train_epochs": config.num_train_epochs}
        settings["base_weights"] = self.base_weights
        if self.train_rows is not None:
            settings["train_rows"] = self.train_rows
        settings["global_batch"] = settings.pop("global_micro_batch") * settings.pop("gradient_accumulation_steps")
        for name in ("model", "dataset", "encoder"):  # published with the model, so where things lie here stays out
            if settings[name] not in (None, *RESERVED.get(name, ())) and Path(settings[name]).exists():
                path = Path(settings[name]).resolve()
                settings[name] = f"{path.name} ({hashlib.sha256(bytes(path)).hexdigest()[:8]})"
        return json.loads(json.dumps(settings, default=str))

    # Results

    def evaluate(self) -> Comparison:
        """Sample and score the base and every trained model."""
        models = {BASE: self.base} | {training.label: self.load_trained(training) for training in self.trainings}
        config, sampling = self.main.config, self.recipe.sampling
        if config.torch_compile:
            compile_blocks(*models.values(), backend=config.torch_compile_backend, mode=config.torch_compile_mode)
        harness = Harness(
            {label: model.to(config.device) for label, model in models.items()},
            self.tokenizer,
            self.judge,
            self.folder / "cells",
            replace(sampling, dtype=sampling.dtype or ("bfloat16" if config.bf16 else "float32")),
        )
        text = self.splits.get("reference")
        return evaluate_models(
            harness,
            text=None if text is None else spread_rows(text, sampling.num_samples),
            match_entropy=labels_to_match(self.recipe, self.trainings),
        )

    def evaluate_tasks(self) -> list[dict]:
        """A record for each model and number of steps: its metrics, and the tokens that it writes a network call."""
        from ..evaluation.lm_harness import DiffusionLM, evaluate_tasks

        recipe, config, records = self.recipe, self.main.config, []
        options = {"task_manager": self.task_index, "limit": recipe.task_limit, "num_fewshot": recipe.task_shots}
        models = {BASE: self.base} | {training.label: self.load_trained(training) for training in self.trainings}
        for label, model in models.items():
            sampler, steps = recipe.sampling.sampler, [{"num_steps": n} for n in recipe.sampling.num_steps]
            for asked in [{}] if sampler == STEPLESS else steps:
                settings = {"sampler": sampler, "seed": config.seed} | asked
                metrics = evaluate_tasks(
                    DiffusionLM(model.to(config.device), self.tokenizer, **settings), recipe.tasks, **options
                )
                records.append({"model": label, "num_steps": asked.get("num_steps"), "metrics": metrics})
                print(f"{label}, {asked.get('num_steps', 'no')} steps: {json.dumps(metrics)}", flush=True)
        return records

    def write_card(self, facts: dict, comparison: Comparison | None) -> None:
        """Write the card of the main model from the facts that its training left, with the table, which is printed."""
        card, sampling = Card(**facts), self.recipe.sampling
        if comparison is not None:
            table = write_report(comparison, self.folder)
            print(table)
            settings = (self.recipe.judge, sampling.num_samples, sampling.sampler)
            card.add_results(comparison.rows, self.main.label, *settings, table)
        card.save(self.main.folder)


def _with_bf16(recipe: Recipe, arguments: dict, folder: Path) -> tuple[Recipe, dict]:
    """Recipe and arguments with true or false wherever they have bf16: auto. A run keeps what it began with."""
    asked = [arguments, *(recipe.trainings or {}).values()]
    if not any(fields.get("bf16") == AUTO for fields in asked):
        return recipe, arguments
    device = DriftConfig(**arguments | {"bf16": False, "output_dir": str(folder)}).device  # joins the other processes
    began = folder / MAIN_FOLDER / SETTINGS
    chosen, reason = None, ""
    if PartialState().is_main_process:
        if began.is_file():
            chosen = read_json(began).get("bf16")
            reason = f"bf16: auto is {str(chosen).lower()}, as when the run began."
        if not isinstance(chosen, bool):
            chosen, reason = choose_bf16(device)
        print(reason, flush=True)
    (chosen,) = broadcast_object_list([chosen])
    settled = [fields | {"bf16": chosen} if fields.get("bf16") == AUTO else fields for fields in asked]
    if recipe.trainings is not None:
        recipe = replace(recipe, trainings=dict(zip(recipe.trainings, settled[1:], strict=True)))
    return recipe, settled[0]


def _load(recipe: Recipe, name: str | None = None) -> PreTrainedModel:
    """The model that the recipe names, or one of the run's own, with the recipe's attention and dropout."""
    options = {} if recipe.dropout is None else {"dropout": recipe.dropout}
    return load_model(
        name or recipe.model,
        tokenizer=recipe.tokenizer,
        max_length=recipe.block_size,
        trust_remote_code=recipe.trust_remote_code,
        dtype=recipe.model_dtype,
        attn_implementation=recipe.attn_implementation,
        revision=recipe.revision if name is None else None,
        **options,
    )


def _task_index(recipe: Recipe) -> Any:
    """The index of tasks that holds all of the recipe's."""
    from ..evaluation.lm_harness import find_tasks  # an extra

    return find_tasks(recipe.tasks, recipe.task_folder)


def _rows(recipe: Recipe, split: str, tokenizer: PreTrainedTokenizerBase, length: int, vocab_size: int) -> Dataset:
    """The rows of one split of the recipe's text."""
    documents = load_text(
        recipe.dataset,
        split=split,
        config=recipe.dataset_config,
        revision=recipe.dataset_revision,
        text_column=recipe.text_column,
        prompt_column=recipe.prompt_column,
        streaming=recipe.streaming,
    )
    if recipe.prompt_column is not None:
        return pack_prompts(documents, tokenizer, length, fill_eos=recipe.fill_eos)
    rows = pack_documents(
        documents, tokenizer, length, wrap=recipe.wrap, insert_eos=recipe.insert_eos, vocab_size=vocab_size
    )
    # The Trainer finds its place in a stream within an epoch only, so all passes over the text are one.
    return rows.repeat(None) if recipe.streaming else rows


def _described(rows: Dataset) -> str | None:
    """How many rows there are and a digest of 4,096 of them, so that a resumed run notices another text."""
    if not isinstance(rows, Dataset):
        return None
    digest = hashlib.sha256(json.dumps(spread_rows(rows, 4096)).encode()).hexdigest()
    return f"{len(rows):,} rows ({digest[:8]})"
