"""Toy rows, trainers, records and tokenizers."""

from __future__ import annotations

from dataclasses import asdict

import torch
from conftest import TINY, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tokendrift_hf import DriftConfig, DriftTrainer
from tokendrift_hf.evaluation.comparison import Comparison, summarise

LENGTH = 8
# transformers renamed the field in 5.24.
CHECKPOINTING = next(
    name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(DriftConfig, name)
)

# Fields of a config whose steps are those of a real training: AdamW with a schedule, micro-batches, clipped gradients.
REAL_STEPS = dict(
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    optim="adamw_torch",
    learning_rate=1e-3,
    lr_scheduler_type="linear",
    max_grad_norm=1.0,
)


def toy_rows(count: int, length: int = LENGTH, **columns) -> list[dict]:
    """Rows that count upwards from a random token: text with a structure that a tiny model can learn."""
    starts = torch.randint(TINY["vocab_size"] - 1, (count,), generator=torch.Generator().manual_seed(0))
    ids = (starts[:, None] + torch.arange(length)) % (TINY["vocab_size"] - 1)
    return [{"input_ids": row.tolist()} | {name: make(row.tolist()) for name, make in columns.items()} for row in ids]


def uneven_rows(count: int) -> list[dict]:
    """Rows of 5 to 8 tokens."""
    return [{"input_ids": row["input_ids"][: LENGTH - i % 4]} for i, row in enumerate(toy_rows(count))]


def config(folder, **fields) -> DriftConfig:
    """Three steps of plain SGD with learning rate 1 on batches of 4, on the CPU."""
    defaults = dict(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        max_steps=3,
        per_device_train_batch_size=4,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        queue_size=6,
        dataloader_pin_memory=False,
    )
    return DriftConfig(**defaults | fields)


def make_trainer(folder, *, model=None, rows=None, trainer_class=DriftTrainer, arguments=None, **fields):
    """A trainer of a tiny MDLM on 12 toy rows; `arguments` are the trainer's own, `fields` those of its config."""
    model = tiny_model("mdlm") if model is None else model
    rows = toy_rows(12) if rows is None else rows
    return trainer_class(model=model, args=config(folder, **fields), train_dataset=rows, **(arguments or {}))


def logged(trainer, name: str = "loss") -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def queues_of(trainer) -> dict[str, torch.Tensor]:
    """What the trainer's objective remembers: its two queues, or nothing without an objective."""
    return {} if trainer.train_objective is None else trainer.train_objective.state_dict()


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], **tolerance) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def record(model, seed, gen_ppl, entropy, num_steps=4, temperature=1.0, **more):
    """A record of the harness, for the tables."""
    settings = dict(model=model, seed=seed, num_steps=num_steps, temperature=temperature)
    return settings | dict(gen_ppl=gen_ppl, entropy=entropy, degenerate=False, num_forward_calls=num_steps + 1) | more


def results(records: list[dict], real_text: dict | None = None) -> dict:
    """What a results.json holds of these records."""
    scored = [{"judge_id": "judge", "judge_revision": "sha256:a"} | record for record in records]
    return asdict(Comparison(summarise(scored), records=scored, real_text=real_text))


def word_tokenizer(adds: str = "$A", **special: str) -> PreTrainedTokenizerFast:
    """Words "w0" to "w19" behind the special tokens, which are ids 0, 1, ...; `adds`: what stands around a text."""
    names = list(dict.fromkeys(special.values()))
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(names + [f"w{i}" for i in range(20)])}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=adds, special_tokens=[(n, names.index(n)) for n in names]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
