"""What `tokendrift train` does: refine, train the matched continuation, sample and score, write the results."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
import time
from pathlib import Path

import torch
from accelerate import PartialState
from datasets import Dataset

from ..data import load_text, pack_documents
from ..data.prompts import pack_prompts
from ..evaluation.comparison import evaluate_models
from ..evaluation.grid import Harness
from ..evaluation.report import write_report
from ..files import write_json
from ..models.loading import load_judge, load_model, load_tokenizer
from ..models.lora import merge_adapter
from ..publishing.cards import Card
from ..publishing.upload import files_to_publish, publish
from ..training.checkpoint import changed_settings, recorded_settings
from ..training.drift_trainer import DriftTrainer
from .budget import budget, describe, matmul_rate
from .plan import BASE, CONTINUATION, LORA, REFINED, Training, trainings
from .recipe import Recipe

SETTINGS = "settings.json"  # in the folder of a training: what it was asked to do


def refine(recipe: Recipe, arguments: dict, resume: bool = False, dry_run: bool = False) -> dict:
    """Run a recipe. Returns the results, which are also in `output_dir`/results.json.

    Under `accelerate launch` or `torchrun` all processes train, sample and score; the first one alone writes.

    Args:
        recipe: what to refine, on what, and how to evaluate it.
        arguments: fields of `DriftConfig`.
        resume: go on with the run in `output_dir`: finished parts are kept, training goes on from its newest complete
            checkpoint.
        dry_run: load everything, say what the run would cost and which files a push would upload, and leave nothing.

    Raises:
        ValueError: bad fields, a model or text that cannot be used, an output directory that holds something else.
    """
    arguments = {"report_to": "none", "use_cpu": not torch.accelerator.is_available()} | arguments
    folder = Path(arguments.get("output_dir") or "out")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir={folder} is a file. Name a directory.")
    if any(path.is_file() for path in folder.rglob("*")) and not resume:
        raise ValueError(
            f"output_dir={folder} already holds something, and nothing is overwritten. Name another --output_dir, or "
            "add --resume to go on with the run in it."
        )
    start = time.perf_counter()
    planned = trainings(recipe, arguments, folder)
    main = planned[0].config
    PartialState().wait_for_everyone()  # no process writes into the folder before all have seen it empty
    base = _model(recipe)
    tokenizer = load_tokenizer(recipe.tokenizer or recipe.model)
    length = recipe.block_size or base.config.max_position_embeddings
    if length > base.config.max_position_embeddings:
        raise ValueError(
            f"block_size={length} is longer than the model, which takes {base.config.max_position_embeddings} tokens."
        )
    judge = None if recipe.judge is None else load_judge(recipe.judge, main.device)
    if judge is not None:  # a wrong sampler is noticed now, not after the training
        base.generate(num_samples=1, num_steps=1, seed=0, sampler=recipe.sampler)
    with main.main_process_first():  # the others find the packed rows in the cache
        splits = {
            name: _blocks(recipe, split, tokenizer, length, base.config.vocab_size)
            for name, split in (
                ("train", recipe.train_split),
                ("validation", recipe.validation_split),
                ("reference", recipe.reference_split),
            )
            if split is not None
        }
    if dry_run:
        return _rehearse(recipe, arguments, splits, tokenizer)

    models, results = {BASE: base}, {"recipe": vars(recipe), "arguments": arguments, "training": {}}
    for training in planned:
        label = training.label
        models[label], results["training"][label] = _train(recipe, training, splits, tokenizer, resume)
    results["seconds_training"] = time.perf_counter() - start
    if judge is not None:
        order = {name: models[name].to(main.device) for name in (BASE, CONTINUATION, REFINED, LORA) if name in models}
        dtype = "bfloat16" if main.bf16 else "float32"
        harness = Harness(order, tokenizer, judge, folder / "cells", recipe.sampling_batch_size, dtype, recipe.sampler)
        label, text = planned[0].label, splits.get("reference")
        results |= evaluate_models(
            harness,
            recipe.num_steps,
            recipe.sampling_temperatures,
            recipe.num_seeds,
            recipe.num_samples,
            text=None if text is None else text[: recipe.num_samples]["input_ids"],
            match=(BASE, label) if recipe.match_entropy else None,
        )
    if not PartialState().is_main_process:
        return results
    card = Card(**results["training"][planned[0].label]["card"])
    if judge is not None:
        table = write_report(results, folder)
        print(table)
        card.add_results(results["rows"], label, recipe.judge, recipe.num_samples, recipe.sampler, table)
    card.save(Path(main.output_dir))
    results["seconds"] = time.perf_counter() - start
    write_json(folder / "results.json", results)
    print(f"Done in {results['seconds']:.0f} s. Refined model: {main.output_dir}; everything else beside it.")
    if main.push_to_hub:
        print(f"Pushed to {publish(Path(main.output_dir), main)}")
    return results


def _model(recipe: Recipe, name: str | None = None):
    """The model to refine, or one of this run's own."""
    options = {"attn_implementation": recipe.attn_implementation, "revision": recipe.revision if name is None else None}
    options |= {} if recipe.dropout is None else {"dropout": recipe.dropout}
    return load_model(name or recipe.model, **options)


def _trainer(recipe: Recipe, training: Training, splits: dict, tokenizer) -> DriftTrainer:
    shared = recipe.encoder == "base"
    trainer = DriftTrainer(
        _model(recipe),
        training.config,
        encoder=None if shared and training.peft_config is None else recipe.encoder,
        peft_config=training.peft_config,
        train_dataset=splits["train"],
        eval_dataset=splits.get("validation"),
        processing_class=tokenizer,
    )
    fields = "dataset dataset_config dataset_revision text_column prompt_column train_split block_size wrap insert_eos"
    data = {name: getattr(recipe, name) for name in fields.split() if getattr(recipe, name) is not None}
    trainer.card.describe_data(data)
    if PartialState().is_main_process:
        config, rows = training.config, splits["train"]
        length = recipe.block_size or trainer.model.config.max_position_embeddings
        cost = budget(trainer.model, config, length, encoder_copy=not (shared and training.peft_config))
        batch = config.train_batch_size * config.gradient_accumulation_steps * config.world_size
        num_steps = config.max_steps
        if num_steps <= 0 and isinstance(rows, Dataset):
            num_steps = math.ceil(len(rows) / batch * config.num_train_epochs)
        trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        print(
            f"{training.label}: {num_steps} steps, {trained:,} of {trainer.model.num_parameters():,} parameters"
            + (f", {len(rows):,} rows of {length} tokens" if isinstance(rows, Dataset) else ""),
            describe(cost, config, num_steps, matmul_rate(config.device, _dtype(config))),
            sep="\n",
            flush=True,
        )
    return trainer


def _train(recipe: Recipe, training: Training, splits: dict, tokenizer, resume: bool):
    folder = Path(training.config.output_dir)
    asked = _settings(recipe, training)
    if resume and (folder / SETTINGS).is_file():
        changed = changed_settings(json.loads((folder / SETTINGS).read_text(encoding="utf-8")), asked)
        if changed:
            raise ValueError(
                f"The training in {folder} was made with other settings (there, asked for now): {changed}. "
                f"Name another --output_dir, or remove {folder} to have it made anew."
            )
        if (folder / "training.json").is_file():
            return _trained(recipe, training), json.loads((folder / "training.json").read_text(encoding="utf-8"))
    trainer = _trainer(recipe, training, splits, tokenizer)
    if PartialState().is_main_process:  # now that everything has been accepted, so that a refusal leaves nothing
        write_json(folder / SETTINGS, asked)
    before = trainer.evaluate()["eval_loss"] if "validation" in splits else None
    trainer.train(resume_from_checkpoint=resume and any(folder.glob("checkpoint-*")))
    history = {"eval_loss_before": before, "log_history": trainer.state.log_history}
    if "validation" in splits:
        history["eval_loss"] = trainer.evaluate()["eval_loss"]
    trainer.card.add_losses(before, history.get("eval_loss"))
    trainer.save_model()
    history["card"] = vars(trainer.card)
    if PartialState().is_main_process:
        write_json(folder / "training.json", history)
    PartialState().wait_for_everyone()  # all processes sample from what the first one wrote
    return _trained(recipe, training).to(training.config.device), history


def _settings(recipe: Recipe, training: Training) -> dict:
    """What decides the weights that a training gives, however many devices share its batches."""
    config = training.config
    names = "model revision dropout encoder lora dataset dataset_config dataset_revision text_column prompt_column"
    names = [*names.split(), "train_split", "block_size", "wrap", "insert_eos", "streaming"]
    settings = recorded_settings(config, config.world_size) | {name: getattr(recipe, name) for name in names}
    settings |= {"max_steps": config.max_steps, "num_train_epochs": config.num_train_epochs}
    settings["global_batch"] = settings.pop("global_micro_batch") * settings.pop("gradient_accumulation_steps")
    for name in ("model", "dataset", "encoder"):  # published with the model, so where things lie here stays out
        if settings[name] is not None and Path(settings[name]).exists():
            path = Path(settings[name]).resolve()
            settings[name] = f"{path.name} ({hashlib.sha256(bytes(path)).hexdigest()[:8]})"
    return json.loads(json.dumps(settings, default=str))


def _trained(recipe: Recipe, training: Training):
    """What a training left. Adapters go into the recipe's base: once pushed, they no longer say where it lies."""
    folder = training.config.output_dir
    return _model(recipe, folder) if training.peft_config is None else merge_adapter(_model(recipe), folder)


def _rehearse(recipe: Recipe, arguments: dict, splits: dict, tokenizer) -> dict:
    with tempfile.TemporaryDirectory() as scratch:
        training = trainings(recipe, arguments | {"push_to_hub": False}, Path(scratch))[0]
        trainer = _trainer(recipe, training, splits, tokenizer)
        trainer.save_model()
        write_json(Path(training.config.output_dir) / SETTINGS, _settings(recipe, training))
        files = files_to_publish(Path(training.config.output_dir))
    if PartialState().is_main_process:
        print(f"A push would upload to {arguments.get('hub_model_id') or 'hub_model_id, which is not set,'}:")
        print("\n".join(f"  {size:>13,} bytes  {name}" for name, size in files.items()))
    return {"files": files}


def _blocks(recipe: Recipe, split: str, tokenizer, length: int, vocab_size: int):
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
        return pack_prompts(documents, tokenizer, length)
    blocks = pack_documents(
        documents, tokenizer, length, wrap=recipe.wrap, insert_eos=recipe.insert_eos, vocab_size=vocab_size
    )
    # The Trainer finds its place in a stream within an epoch only, so all passes over the text are one.
    return blocks.repeat(None) if recipe.streaming else blocks


def _dtype(config) -> torch.dtype:
    return torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else torch.float32
