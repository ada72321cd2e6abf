"""What a training step costs beside its limit, forward and backward of the transformer blocks alone.

    python tests/benchmarks/training.py --threads 1 --json out.json          # 170 M parameters, B = 2, L = 1024
    python tests/benchmarks/training.py --size quickstart --threads 1

Prints a table with a row for each form of the loss: seconds of a step, their ratio to the blocks and to the base loss,
the peak of memory, and clean tokens a second. A step is `DriftTrainer.compute_loss` and backward, with the queues
full, and without the optimizer. All forms see the same rows and noise, in turn, and the median counts. On a CPU
the seconds are those of its cores, so that other programs disturb little. Threads that wait for each other count as
busy: with several, `--wall` on an idle machine. Peak memory is that of two whole steps with AdamW in a process of its
own, above the imported libraries.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import torch

from tokendrift_hf import DriftConfig, DriftTrainer, FrozenEncoder, MDLMConfig, MDLMForMaskedLM
from tokendrift_hf.objective.objectives import OBJECTIVES

SIZES = {
    "170m": ({}, {"batch": 2, "length": 1024}, [4]),
    "quickstart": (
        {"vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 5, "num_attention_heads": 4, "cond_dim": 16}
        | {"time_conditioning": False, "attn_implementation": "eager"},
        {"batch": 32, "length": 128},
        [2],
    ),
}
TOKENS = {"feature_pooling": "tokens", "feature_tokens": 16, "queue_size": 4096}
FORMS = {
    "blocks": None,
    "base": {"objective": "none", "base_loss_weight": 1.0},
    "drift, paper": {"objective": "feature"},
    "drift, tokens of a middle block": {"objective": "feature", "feature_layers": "middle"} | TOKENS,
    "drift and base": {"objective": "feature", "feature_layers": "middle", "base_loss_weight": 0.1} | TOKENS,
    "mirror KL": {"objective": "mirror_kl"},
    "mmd": {"objective": "mmd", "mmd_credit": 1, "feature_layers": "middle"},
}
GIB = 2**30


def peak() -> float:
    """GiB that this process has needed."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


class Step:
    """One form of the loss on a model that all forms share.

    Args:
        form: its name in `FORMS`.
        model: what is trained.
        encoder: a frozen copy of it, or None: the trainer makes its own.
        options: of the command.
    """

    def __init__(self, form: str, model: MDLMForMaskedLM, encoder: MDLMForMaskedLM | None, options, folder: str):
        self.form, self.model = form, model
        fields = dict(FORMS[form] or FORMS["base"])
        if fields.get("feature_layers") == "middle":
            fields["feature_layers"] = SIZES[options.size][2]
        args = DriftConfig(
            output_dir=folder, report_to="none", save_strategy="no", disable_tqdm=True, max_steps=2, bf16=options.bf16,
            per_device_train_batch_size=options.batch, dataloader_pin_memory=False,
            use_cpu=not torch.cuda.is_available(), **fields,
        )  # fmt: skip
        rows = torch.randint(model.config.vocab_size - 1, (2 * options.batch, options.length)).tolist()
        if encoder is not None and args.objective in OBJECTIVES:
            layers = args.feature_layers or OBJECTIVES[args.objective].default_layers
            encoder = FrozenEncoder(encoder, layers=layers)
        else:
            encoder = None
        dataset = [{"input_ids": ids} for ids in rows]
        self.trainer = DriftTrainer(model=model, args=args, train_dataset=dataset, encoder=encoder)
        self.trainer.model.train()
        self.inputs = {"input_ids": torch.tensor(rows[: options.batch], device=args.device)}

    def run(self, number: int) -> None:
        """Forward and backward with the noise of a step of this number."""
        if self.form == "blocks":
            embeds = self.model.get_input_embeddings()(self.inputs["input_ids"])
            with self.trainer.accelerator.autocast():
                self.model.hidden_states(embeds)[0][-1].float().mean().backward()
            return
        self.trainer.state.global_step, self.trainer._micro_step = number, (-1, 0)
        with self.trainer.accelerator.autocast():  # as the forward of a model that was prepared for training
            loss = self.trainer.compute_loss(self.trainer.model, dict(self.inputs))
        loss.backward()

    def fill_queues(self) -> None:
        """As many features as they hold, of random directions about a common one."""
        objective = self.trainer.train_objective
        for queue in (getattr(objective, "real_queue", None), getattr(objective, "generated_queue", None)):
            if queue is not None:
                size = len(self.trainer.encoder.layers) * self.model.config.hidden_size
                features = torch.nn.functional.normalize(1 + torch.randn(queue.size, size), dim=-1)
                queue.push(features.to(self.trainer.args.device))


def build(options) -> MDLMForMaskedLM:
    torch.manual_seed(0)
    fields = {"dropout": 0.0, "max_position_embeddings": options.length} | SIZES[options.size][0]
    attention = fields.pop("attn_implementation", None)
    model = MDLMForMaskedLM(MDLMConfig(**fields))
    if attention:
        model.set_attn_implementation(attention)
    with torch.no_grad():  # layers that begin at zero would leave the others without work
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
    return model


def seconds(steps: dict[str, Step], options) -> dict[str, float]:
    """The median over the rounds of every form."""
    clock = time.perf_counter if torch.cuda.is_available() or options.wall else time.process_time
    taken = {form: [] for form in steps}
    for step in steps.values():
        step.fill_queues()
    for number in range(options.rounds):
        for form, step in steps.items():
            step.model.zero_grad()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            start = clock()
            step.run(number)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            taken[form].append(clock() - start)
    return {form: statistics.median(values) for form, values in taken.items()}


def memory(form: str, options) -> float:
    """GiB that two whole steps, with AdamW, take in this process."""
    libraries = 0 if torch.cuda.is_available() else peak()
    with tempfile.TemporaryDirectory() as folder:
        step = Step(form, build(options), None, options, folder)
        if form == "blocks":
            for number in range(2):
                step.run(number)
        else:
            step.trainer.train()
    return peak() - libraries


def memory_apart(form: str) -> float:
    """`memory` in a process of its own, where freed tensors are given back at once."""
    command = [sys.executable, __file__, *sys.argv[1:], "--memory-of", form]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    return float(subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE).stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="170m")
    parser.add_argument("--batch", type=int, help="rows, by default 2 (170m) or 32 (quickstart)")
    parser.add_argument("--length", type=int, help="tokens a row, by default 1024 (170m) or 128 (quickstart)")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--wall", action="store_true", help="time by the clock on the wall, on a CPU as well")
    parser.add_argument("--no-memory", action="store_true", help="leave the peak of memory out")
    parser.add_argument("--no-time", action="store_true", help="leave the seconds out")
    parser.add_argument("--json", help="a file for the table")
    parser.add_argument("--memory-of", choices=FORMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name, value in SIZES[options.size][1].items():
        setattr(options, name, getattr(options, name) or value)
    torch.set_num_threads(options.threads)
    if options.memory_of:
        print(memory(options.memory_of, options))
        return
    times = {}
    if not options.no_time:
        with tempfile.TemporaryDirectory() as folder:
            model, encoder = build(options), build(options)
            steps = {form: Step(form, model, encoder, options, folder) for form in options.forms}
            times = seconds(steps, options)
            del model, encoder, steps
    clock = "wall" if torch.cuda.is_available() or options.wall else "CPU"
    print(f"torch {torch.__version__}, {options.size}, {options.batch} rows of {options.length}, "
          f"{'bfloat16' if options.bf16 else 'float32'}, {options.threads} threads")  # fmt: skip
    print(f"{'form':32} {clock + ' s':>8} {'/ blocks':>8} {'/ base':>7} {'GiB':>6} {'tokens/s':>9}")
    rows = []
    for form in options.forms:
        row = {"form": form, "seconds": times.get(form)}
        for name in ("blocks", "base"):
            row[f"ratio_to_{name}"] = times[form] / times[name] if name in times else None
        row["peak_gib"] = None if options.no_memory else memory_apart(form)
        row["tokens_per_second"] = options.batch * options.length / times[form] if times else None
        rows.append(row)
        shown = [row["seconds"], row["ratio_to_blocks"], row["ratio_to_base"], row["peak_gib"]]
        cells = ["-" if x is None else f"{x:.3g}" if x < 0.1 else f"{x:.2f}" for x in shown]
        speed = "-" if not times else f"{row['tokens_per_second']:.0f}"
        print(f"{form:32} {cells[0]:>8} {cells[1]:>8} {cells[2]:>7} {cells[3]:>6} {speed:>9}", flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"torch": torch.__version__, "options": vars(options), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
