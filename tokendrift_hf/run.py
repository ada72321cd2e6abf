"""What `tokendrift train` does: refine, train the matched continuation, sample and score, write the results."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from .data import load_text, pack_documents
from .drift_config import DriftConfig
from .drift_trainer import DriftTrainer
from .harness import Harness, matching_temperature, summarise
from .loading import load_model, load_tokenizer
from .recipe import Recipe
from .report import markdown_table, plot

BASE, CONTINUATION, REFINED = "base", "continuation", "TokenDrift"
# Temperatures at which the base model's entropy is measured to find the one that equals the refined model's.
ENTROPY_CURVE = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def refine(recipe: Recipe, arguments: dict, resume: bool = False) -> dict:
    """Run a recipe. Returns the results, which are also in `output_dir`/results.json.

    Args:
        recipe: what to refine, on what, and how to evaluate it.
        arguments: fields of `DriftConfig`.
        resume: go on with the run in `output_dir`: finished parts are kept, training goes on from its newest complete
            checkpoint.

    Raises:
        ValueError: bad fields, a model or text that cannot be used, an output directory that holds something else.
    """
    arguments = {"report_to": "none", "use_cpu": not torch.accelerator.is_available()} | arguments
    folder = Path(arguments.get("output_dir") or "out")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir={folder} is a file. Name a directory.")
    if folder.is_dir() and any(folder.iterdir()) and not resume:
        raise ValueError(
            f"output_dir={folder} already holds something, and nothing is overwritten. Name another --output_dir, or "
            "add --resume to go on with the run in it."
        )
    start = time.perf_counter()
    configs = {REFINED: DriftConfig(**arguments | {"output_dir": str(folder / "refined")})}
    if recipe.continuation:
        baseline = {"objective": "none", "base_loss_weight": 1.0, "output_dir": str(folder / CONTINUATION)}
        configs[CONTINUATION] = DriftConfig(**arguments | baseline)
    base = load_model(recipe.model, revision=recipe.revision, attn_implementation=recipe.attn_implementation)
    tokenizer = load_tokenizer(recipe.tokenizer or recipe.model)
    length = recipe.block_size or base.config.max_position_embeddings
    if length > base.config.max_position_embeddings:
        raise ValueError(
            f"block_size={length} is longer than the model, which takes {base.config.max_position_embeddings} tokens."
        )
    judge = None if recipe.judge is None else _judge(recipe.judge)
    splits = {
        name: _blocks(recipe, split, tokenizer, length, base.config.vocab_size)
        for name, split in (
            ("train", recipe.train_split),
            ("validation", recipe.validation_split),
            ("reference", recipe.reference_split),
        )
        if split is not None
    }
    _announce(configs[REFINED], base, len(splits["train"]), length)

    models, results = {BASE: base}, {"recipe": vars(recipe), "arguments": arguments, "training": {}}
    for label, config in configs.items():
        print(f"Training {label}: {config.max_steps} steps", flush=True)
        models[label], results["training"][label] = _train(recipe, config, splits, tokenizer, resume)
    results["seconds_training"] = time.perf_counter() - start
    if judge is not None:
        order = {name: models[name] for name in (BASE, CONTINUATION, REFINED) if name in models}
        dtype = "bfloat16" if configs[REFINED].bf16 else "float32"
        harness = Harness(order, tokenizer, judge, folder / "cells", recipe.sampling_batch_size, dtype, recipe.sampler)
        results |= evaluate_models(harness, recipe, splits.get("reference"))
        table = markdown_table(results["rows"], results.get("real_text"))
        (folder / "table.md").write_text(table, encoding="utf-8")
        plot(results["rows"], folder / "plot.png", results.get("real_text"))
        print(table)
    results["seconds"] = time.perf_counter() - start
    (folder / "results.json").write_text(json.dumps(results, indent=2, default=str), encoding="utf-8")
    print(f"Done in {results['seconds']:.0f} s. Refined model: {folder / 'refined'}; everything else beside it.")
    return results


def evaluate_models(harness: Harness, recipe: Recipe, reference=None) -> dict:
    """Score every model at every number of steps, and the base model at the refined model's entropy."""
    seeds = range(recipe.num_seeds)

    def cells(model: str, steps: int, temperature: float, seeds=seeds):
        return [harness.cell(model, steps, temperature, seed, recipe.num_samples) for seed in seeds]

    records = harness.run(
        cell
        for model in harness.models
        for temperature in recipe.sampling_temperatures
        for steps in recipe.num_steps
        for cell in cells(model, steps, temperature)
    )
    rows = summarise(records)
    if recipe.match_entropy and REFINED in harness.models:
        refined = {row["num_steps"]: row for row in rows if row["model"] == REFINED and row["temperature"] == 1}
        curve = harness.run(
            (
                cell
                for steps in recipe.num_steps
                for temperature in ENTROPY_CURVE
                for cell in cells(BASE, steps, temperature, range(1))
            ),
            "Entropy of the base model",
        )
        matched = []
        for steps in recipe.num_steps:
            entropies = {record["temperature"]: record["entropy"] for record in curve if record["num_steps"] == steps}
            temperature = round(matching_temperature(entropies, refined[steps]["entropy"]), 3)
            matched += harness.run(cells(BASE, steps, temperature), f"Base model at equal entropy, NFE {steps}")
        # One line of the table, although each number of steps has its own temperature.
        rows += [row | {"model": f"{BASE} at equal entropy", "matched": True} for row in summarise(matched)]
    results = {"rows": rows, "records": records}
    if reference is not None:
        sample = reference.select(range(min(len(reference), recipe.num_samples)))
        results["real_text"] = harness.score_text([list(ids) for ids in sample["input_ids"]])
    return results


def _train(recipe: Recipe, config: DriftConfig, splits: dict, tokenizer, resume: bool):
    folder = Path(config.output_dir)
    if resume and (folder / "config.json").is_file():
        history = json.loads((folder / "training.json").read_text(encoding="utf-8"))
        return load_model(str(folder), attn_implementation=recipe.attn_implementation), history
    trainer = DriftTrainer(
        load_model(recipe.model, revision=recipe.revision, attn_implementation=recipe.attn_implementation),
        config,
        encoder=recipe.encoder,
        train_dataset=splits["train"],
        eval_dataset=splits.get("validation"),
        processing_class=tokenizer,
    )
    before = trainer.evaluate()["eval_loss"] if "validation" in splits else None
    trainer.train(resume_from_checkpoint=resume and any(folder.glob("checkpoint-*")))
    history = {"eval_loss_before": before, "log_history": trainer.state.log_history}
    if "validation" in splits:
        history["eval_loss"] = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    (folder / "training.json").write_text(json.dumps(history, indent=2), encoding="utf-8")
    model = trainer.accelerator.unwrap_model(trainer.model)
    return load_model(str(folder), attn_implementation=recipe.attn_implementation).to(model.device), history


def _blocks(recipe: Recipe, split: str, tokenizer, length: int, vocab_size: int):
    documents = load_text(
        recipe.dataset,
        split=split,
        config=recipe.dataset_config,
        revision=recipe.dataset_revision,
        text_column=recipe.text_column,
    )
    return pack_documents(documents, tokenizer, length, vocab_size=vocab_size)


def _judge(name: str) -> dict:
    """Load the judge now, so that a wrong one is noticed before hours of training and not after."""
    import torch

    tokenizer = load_tokenizer(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    return {"model": model.eval(), "model_tokenizer": tokenizer}


def _announce(config: DriftConfig, model, num_rows: int, length: int) -> None:
    batch = config.train_batch_size * config.gradient_accumulation_steps * config.world_size
    print(
        f"{model.num_parameters():,} parameters, {num_rows:,} rows of {length} tokens. Global batch {batch} = "
        f"{config.train_batch_size} a device x {config.gradient_accumulation_steps} accumulated x {config.world_size} "
        "processes.",
        flush=True,
    )
