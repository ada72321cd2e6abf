"""Rebuild everything in this folder from the documentation corpus: tokenizer, judge, the two models to refine.

    python recipes/quickstart/build.py tokenizer
    python recipes/quickstart/build.py judge
    python recipes/quickstart/build.py base
    python recipes/quickstart/build.py duo
    python recipes/quickstart/build.py all

Each stage writes one folder, with a `training.json` that holds its settings, validation figures and checksums. The base
model takes over an hour of one CPU core (bfloat16 matrix units and a C++ compiler assumed), the judge and DUO, which
begins with the weights of the base, half an hour each. Checkpoints are kept in `.build` until a stage is done, so a
stage that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import platform
import shutil
from importlib.metadata import version
from pathlib import Path

import datasets
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

from tokendrift_hf.data import DiffusionCollator, pack_documents
from tokendrift_hf.data.documentation import load_documentation

HERE = Path(__file__).resolve().parent
EOS = "<|endoftext|>"
VOCAB_SIZE = 4096  # the tokenizer's 4095 ids and the mask
LENGTH = 128
SIZES = dict(
    hidden_size=256,
    num_hidden_layers=5,
    num_attention_heads=4,
    max_position_embeddings=LENGTH,
    attn_implementation="eager",  # the fused backward is slower than this at length 128 on a CPU
)
# The judge reads text that was decoded and encoded again, which can be longer than the block it came from.
JUDGE_LENGTH = 256


def judge_documents() -> tuple[datasets.Dataset, datasets.Dataset]:
    """The judge's own part of the corpus: its training documents, and every twentieth held out for its validation."""
    documents = load_documentation()["judge"]
    held_out = range(0, len(documents), 20)
    training = [i for i in range(len(documents)) if i % 20]
    return documents.select(training), documents.select(held_out)


def build_tokenizer(folder: Path) -> None:
    """A byte-level BPE of 4095 ids, trained on the train and judge parts; one special token is bos and eos."""
    documents = load_documentation()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 1,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for part in ("train", "judge") for text in documents[part]["text"]), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=EOS, eos_token=EOS, clean_up_tokenization_spaces=False
    )
    fast.save_pretrained(folder)
    texts = list(documents["validation"]["text"])
    tokens = sum(len(ids) for ids in fast(texts, verbose=False)["input_ids"])
    figures = {"vocabulary": len(fast), "validation_bytes_per_token": sum(len(t.encode()) for t in texts) / tokens}
    write_record(folder, {"parts": ["train", "judge"]}, figures)


def build_judge(folder: Path, options: argparse.Namespace) -> None:
    """An autoregressive model (GPT-2 architecture, 3.4 M parameters) that scores samples: Gen.-PPL."""
    tokenizer = AutoTokenizer.from_pretrained(HERE / "tokenizer")
    training, validation = (pack_documents(part, tokenizer, JUDGE_LENGTH) for part in judge_documents())
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=JUDGE_LENGTH,
        n_embd=256,
        n_layer=4,
        n_head=4,
        n_inner=576,  # so that the weights of both models stay under 20 MB
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        activation_function="gelu_pytorch_tanh",  # GPT-2's own, as one fused operation
        resid_pdrop=options.dropout,
        embd_pdrop=options.dropout,
        attn_pdrop=0.0,  # its random bits would take a fifth of a CPU's time
    )
    set_seed(options.seed)
    train(GPT2LMHeadModel(config), tokenizer, causal_rows, training, validation, folder, options)


def build_base(folder: Path, options: argparse.Namespace) -> None:
    """A masked diffusion model (MDLM)."""
    from tokendrift_hf import MDLMConfig, MDLMForMaskedLM

    config = MDLMConfig(
        vocab_size=VOCAB_SIZE,
        mask_token_id=VOCAB_SIZE - 1,
        cond_dim=16,  # small: without time conditioning it carries a constant
        **SIZES,
        dropout=options.dropout,
    )
    train_diffusion(MDLMForMaskedLM, config, folder, options)


def build_duo(folder: Path, options: argparse.Namespace) -> None:
    """A uniform-state diffusion model (DUO) that begins with the weights of the masked one, to save hours.

    It knows no mask, so its vocabulary is the tokenizer's, and it has to learn the time.
    """
    from tokendrift_hf import DUOConfig, DUOForMaskedLM, MDLMForMaskedLM

    masked = MDLMForMaskedLM.from_pretrained(HERE / "base", dtype=torch.float32)
    without_mask = {
        name: weights[:-1] if len(weights) == VOCAB_SIZE else weights for name, weights in masked.state_dict().items()
    }
    config = DUOConfig(vocab_size=VOCAB_SIZE - 1, cond_dim=16, **SIZES, dropout=options.dropout)
    train_diffusion(DUOForMaskedLM, config, folder, options, without_mask)


def train_diffusion(
    model_class: type,
    config: PreTrainedConfig,
    folder: Path,
    options: argparse.Namespace,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """A diffusion model, trained on its NELBO with the stock `Trainer`: what TokenDrift refines.

    `weights`: those to begin with; default: random ones.
    """
    tokenizer = AutoTokenizer.from_pretrained(HERE / "tokenizer")
    parts = load_documentation()
    training, validation = (
        pack_documents(parts[name], tokenizer, LENGTH, vocab_size=config.vocab_size) for name in ("train", "validation")
    )
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    set_seed(options.seed)
    model = model_class(config)
    if weights is not None:
        model.load_state_dict(weights)
    collator = DiffusionCollator(model.process, seed=options.seed)
    train(model, tokenizer, collator, training, validation, folder, options)


def causal_rows(rows: list[dict]) -> dict[str, torch.Tensor]:
    """A batch whose labels are its inputs, eos included (the collators of transformers would hide eos as padding)."""
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids}


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    collator,
    training: datasets.Dataset,
    validation: datasets.Dataset,
    folder: Path,
    options: argparse.Namespace,
) -> None:
    """Train with AdamW under bf16 autocast; write bf16 weights and the record."""
    torch.set_num_threads(options.threads)
    scratch = HERE / ".build" / folder.name
    arguments = TrainingArguments(
        output_dir=str(scratch),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        weight_decay=options.weight_decay,
        adam_beta2=0.98,
        max_grad_norm=1.0,
        warmup_steps=options.warmup_steps,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": options.decay_steps},
        torch_compile=options.compile,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        seed=options.seed,
        data_seed=options.seed,
        eval_strategy="steps",
        eval_steps=400,
        logging_steps=100,
        save_steps=400,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model, args=arguments, data_collator=collator, train_dataset=training, eval_dataset=validation
    )
    trainer.train(resume_from_checkpoint=any(scratch.glob("checkpoint-*")))
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False).to(torch.bfloat16)
    figures = {
        "parameters": model.num_parameters(),
        "training_tokens": training.num_rows * len(training[0]["input_ids"]),
        "epochs": trainer.state.epoch,
        "validation_loss_by_step": {
            entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry
        },
        "validation_loss": trainer.evaluate()["eval_loss"],  # of the bf16 weights, in nats per token
    }
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for code in folder.glob("*.py"):
        code.unlink()  # the repository has it once, in tokendrift_hf/hub, which registers the model
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop("auto_map", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    recipe = {k: v for k, v in vars(options).items() if k not in ("stage", "threads")}
    write_record(folder, recipe, figures)
    shutil.rmtree(scratch)


def write_record(folder: Path, recipe: dict, figures: dict) -> None:
    """`training.json`: how the files beside it came about, and their sha256."""
    packages = ("torch", "transformers", "tokenizers", "datasets")
    record = {
        "command": f"python recipes/quickstart/build.py {folder.name}",
        "recipe": recipe,
        "figures": figures,
        "corpus": "documentation",
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
        "sha256": {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.iterdir())
            if path.suffix in (".json", ".safetensors") and path.name != "training.json"
        },
    }
    (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


STAGES = {
    "judge": dict(
        steps=4000,
        batch_size=8,
        learning_rate=1.5e-3,
        warmup_steps=200,
        decay_steps=3800,
        weight_decay=0.1,
        dropout=0.1,
        compile=False,
    ),
    "base": dict(
        steps=5600,
        batch_size=32,
        learning_rate=1e-3,
        warmup_steps=400,
        decay_steps=1200,
        weight_decay=0.05,
        dropout=0.0,
        compile=True,
    ),
    "duo": dict(
        steps=1600,
        batch_size=32,
        learning_rate=7e-4,
        warmup_steps=100,
        decay_steps=800,
        weight_decay=0.05,
        dropout=0.0,
        compile=True,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["tokenizer", *STAGES, "all"])
    parser.add_argument("--steps", type=int, help="optimizer steps (each model has its default)")
    parser.add_argument("--batch-size", type=int, help="rows per step")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--warmup-steps", type=int, help="steps of linear warmup")
    parser.add_argument(
        "--decay-steps", type=int, help="last steps, over which the learning rate falls to 0 as a cosine"
    )
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None, help="torch.compile")
    parser.add_argument("--weight-decay", type=float)
    parser.add_argument("--dropout", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    for stage in ["tokenizer", *STAGES] if given.stage == "all" else [given.stage]:
        if stage == "tokenizer":
            build_tokenizer(HERE / stage)
            continue
        options = argparse.Namespace(
            **vars(given) | {k: v for k, v in STAGES[stage].items() if getattr(given, k) is None}
        )
        {"judge": build_judge, "base": build_base, "duo": build_duo}[stage](HERE / stage, options)


if __name__ == "__main__":
    main()
