"""One of two gloo processes of test_distributed.py: every check that needs them, in one launch."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from conftest import TINY, tiny_model
from gloo import make_averages_averages
from safetensors.torch import save_file
from stand_ins import adapted, text_rows
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from toys import CHECKPOINTING, logged, make_trainer, queues_of, toy_rows, uneven_rows, weights_of
from transformers import TrainerCallback

from tokendrift_hf.objective import predictions
from tokendrift_hf.training.gather import gather_rows, own_rows, row_counts, sum_over_processes
from tokendrift_hf.training.stopping import TrainingStopped

# Seven rows in batches of four: the second batch of every epoch has three, two for one process and one for the other.
SHARED = dict(
    per_device_train_batch_size=4,
    max_steps=3,
    accelerator_config={"split_batches": True, "even_batches": False},
)
CASES = {
    "feature": dict(),
    "feature_checkpointing": {CHECKPOINTING: True},
    "mirror": dict(objective="mirror_kl", base_loss_weight=0.5, learning_rate=0.1),
    "mirror_checkpointing": {"objective": "mirror_kl", "learning_rate": 0.1, CHECKPOINTING: True},
    "tokens": dict(feature_pooling="tokens", feature_tokens=6, base_loss_weight=0.1, learning_rate=0.1),
    "mmd": dict(objective="mmd", base_loss_weight=0.1),
    "mmd_sequence": dict(objective="mmd", mmd_credit="sequence"),
    "alpha": dict(objective="alpha"),
    "continuation": dict(objective="none", base_loss_weight=1.0),
    "accumulation": dict(objective="none", base_loss_weight=1.0, gradient_accumulation_steps=2),
    "bert": dict(base_loss_weight=0.5, learning_rate=0.1),
    "qwen3": dict(base_loss_weight=0.5, learning_rate=0.1),
}
ADAPTED = ("bert", "qwen3")
UNEVEN = ("tokens", "alpha", "continuation", "accumulation")  # have rows of unequal length

COMPARED = {
    "mmd": "mmd_attraction",
    "mmd_sequence": "mmd_attraction",
    "alpha": "token_entropy",
}  # which number of the log is compared as well


def case(name: str, folder: Path, **fields):
    """A trainer of one of the cases; also run by a single process."""
    if name in ADAPTED:
        fields = {"model": adapted(name)} | fields
    rows = text_rows(7) if name in ADAPTED else uneven_rows(7) if name in UNEVEN else toy_rows(7)
    return make_trainer(folder / name, rows=rows, **SHARED | CASES[name] | fields)


def rank() -> int:
    return int(os.environ["RANK"])


def sharded_errors(folder: Path) -> dict[str, float]:
    """A model under fully_shard against the plain one: largest relative error of the gradient, other tokens sampled."""
    errors = {}
    make_averages_averages()
    # Several chunks, of which backward runs the head again.
    predictions.LOGITS_AT_A_TIME["cpu"] = 5 * TINY["vocab_size"]
    for objective in ("feature", "mirror_kl"):
        trainer = make_trainer(folder / "fsdp", objective=objective, base_loss_weight=0.5, ddp_backend="gloo")
        plain, sharded = tiny_model("mdlm"), tiny_model("mdlm")
        mesh = init_device_mesh("cpu", (2,))
        for block in sharded.backbone.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(sharded, mesh=mesh, reshard_after_forward=True)
        ids = torch.tensor([row["input_ids"] for row in toy_rows(8)])[4 * rank() : 4 * rank() + 4]
        for model in (plain, sharded):
            trainer._micro_step = (-1, 0)
            for queue in (trainer.train_objective.real_queue, trainer.train_objective.generated_queue):
                queue.load_state_dict({"features": torch.empty(0, 0)})
            trainer.compute_loss(model, {"input_ids": ids}).backward()
        worst = 0.0
        for (name, expected), p in zip(plain.named_parameters(), sharded.parameters(), strict=True):
            dist.all_reduce(expected.grad)
            expected = expected.grad / 2
            found = p.grad.full_tensor()
            assert found.shape == expected.shape and expected.abs().max() > 0, name
            worst = max(worst, float((found - expected).norm() / expected.norm()))
        errors[objective] = worst
        samples = [model.generate(num_samples=2, num_steps=3, seed=0) for model in (plain, sharded)]
        errors[f"{objective} samples"] = float((samples[0] != samples[1]).float().mean())
        assert not any(p.grad is not None for p in trainer.encoder.model.parameters())
    return errors


RESUMED = {"gathered": {}, "own queues": {"gather_features": False, "queue_size": 5}}


class Stop(TrainerCallback):
    """The second process alone gets a signal, in the third step."""

    def on_step_begin(self, args, state, control, **kwargs):
        if rank() == 1 and state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def resumed_differs(name: str, folder: Path, **fields) -> list[str]:
    """A run in one go, and one that a signal stopped and that was resumed: what of their state and log differs."""
    fields = SHARED | dict(max_steps=5, gradient_accumulation_steps=2, optim="adamw_torch", ddp_backend="gloo") | fields
    fields |= dict(learning_rate=1e-3, ema_decay=0.9, save_strategy="no")
    states = []
    for case in ("whole", "stopped", "resumed"):
        callbacks = [Stop()] if case == "stopped" else []
        trainer = make_trainer(
            folder / f"{name} {'whole' if case == 'whole' else 'cut'}",
            rows=toy_rows(16),
            model=tiny_model("mdlm", dropout=0.1),
            arguments={"callbacks": callbacks},
            **fields,
        )
        try:
            trainer.train(resume_from_checkpoint=case == "resumed")
        except TrainingStopped:
            assert case == "stopped" and trainer.state.global_step == 3
            continue
        assert case != "stopped"
        averages = {f"average {name}": value for name, value in trainer.ema.shadow.items()}
        losses = {"loss": torch.tensor(logged(trainer)), "distance": torch.tensor(logged(trainer, "feature_distance"))}
        moments = trainer.optimizer.state_dict()["state"]
        moments = {f"{i} {name}": value for i, state in moments.items() for name, value in state.items()}
        states.append(weights_of(trainer.model) | averages | queues_of(trainer) | losses | moments)
    whole, resumed = states
    return [name for name in whole if not torch.equal(whole[name], resumed[name])]


def evaluated(folder: Path) -> list[dict]:
    """The loss of 1 to 9 rows under every way to share them out. A process that waits for the other for ever ends."""
    found = []
    signal.alarm(120)
    for split_batches in (False, True):
        for even_batches in (False, True):
            sharing = {"split_batches": split_batches, "even_batches": even_batches}
            trainer = make_trainer(
                folder / "eval",
                per_device_eval_batch_size=4 if split_batches else 2,
                accelerator_config=sharing,
                dataloader_drop_last=not even_batches,
                ddp_backend="gloo",
            )
            for count in range(1, 10):
                found.append(sharing | {"rows": count, "loss": trainer.evaluate(uneven_rows(count))["eval_loss"]})
    signal.alarm(0)
    return found


def main(folder: Path) -> None:
    report = {}
    for name in CASES:
        trainer = case(name, folder, ddp_backend="gloo")
        trainer.train()
        report[name] = {"loss": logged(trainer), "distance": logged(trainer, COMPARED.get(name, "feature_distance"))}
        queues = queues_of(trainer)
        save_file(weights_of(trainer.model) | queues, folder / f"{name}_{rank()}.safetensors")
        if name in ADAPTED:
            trainer.save_model(str(folder / name / "final"))

    report["resumed_differs"] = {name: resumed_differs(name, folder, **fields) for name, fields in RESUMED.items()}

    x = torch.arange(5.0)[:3] if rank() == 0 else torch.arange(5.0)[3:]
    x = torch.stack([x, -x], dim=1).requires_grad_()
    counts = row_counts(trainer.accelerator, x)
    gathered, own = gather_rows(trainer.accelerator, x, counts), own_rows(trainer.accelerator, counts)
    total = sum_over_processes(trainer.accelerator, torch.tensor(float(len(x))))
    report["gather"] = {"counts": counts, "rows": gathered.tolist(), "sum": float(total)}
    report["gather"] |= {"own": [own.start, own.stop], "has_gradient": gathered.requires_grad}

    # a loss that is not finite on one process stops both
    trainer = make_trainer(folder / "nan", ddp_backend="gloo")
    if rank() == 1:
        with torch.no_grad():
            trainer.model.backbone.output_layer.linear.bias.fill_(float("nan"))
    trainer.args.gather_features = False
    inputs = {"input_ids": torch.tensor([row["input_ids"] for row in toy_rows(2)])}
    try:
        trainer.compute_loss(trainer.model, inputs)
    except ValueError as error:
        report["error"] = str(error)

    (folder / f"report_{rank()}.json").write_text(json.dumps(report))
    (folder / f"evaluated_{rank()}.json").write_text(json.dumps(evaluated(folder)))
    (folder / f"fsdp_{rank()}.json").write_text(json.dumps(sharded_errors(folder)))
    dist.barrier()
    dist.destroy_process_group()
