"""Trainings that are killed anywhere, and resumed until they are done: they have to end like the one nobody killed.

By hand, for hundreds of kills; the short form is tests/training/test_crashes.py:

    python tests/crash_matrix.py --kills 200

Every training is a fork of this process, which has imported everything. It dies at the n-th of its events: file
operations in its folder, files half-written or whole, micro-batches. Afterwards the newest complete checkpoint must not
be older than before. At last weights, averages, queues and losses must be those of the uninterrupted run, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
import transformers.modeling_utils
from conftest import tiny_model
from datasets import Dataset
from peft import LoraConfig
from processes import two_ranks
from toys import REAL_STEPS, logged, make_trainer, queues_of, toy_rows, weights_of
from transformers import TrainerCallback

from tokendrift_hf.models.digest import weights_digest
from tokendrift_hf.training import checkpoint as checkpoint_module
from tokendrift_hf.training.manifest import last_complete_checkpoint, step_of
from tokendrift_hf.training.stopping import STOPPED, TrainingStopped

FIELDS = REAL_STEPS | dict(max_steps=6, queue_size=10, save_strategy="steps", save_steps=2, save_total_limit=1)
CASES = ("all weights", "adapters", "stream", "two processes")
TIME_LIMIT = 300  # seconds for one training
WRITING = os.O_WRONLY | os.O_RDWR


class Bomb(TrainerCallback):
    """Ends this process at the `at`-th event of its training, by a signal.

    Args:
        folder: where file operations count.
        at: the number of the event, from 1; None: never.
        number: SIGKILL, or SIGTERM, which asks for a stop.
    """

    def __init__(self, folder: Path, at: int | None, number: int = signal.SIGKILL):
        self.folder, self.at, self.number, self.count = str(folder), at, number, 0
        sys.addaudithook(self.audit)
        torch.save = self.writer(torch.save, 1)
        plain = safetensors.torch.save_file
        transformers.modeling_utils.safe_save_file = checkpoint_module.save_file = self.writer(plain, 1)

    def tick(self, half: Callable[[], None] | None = None) -> None:
        self.count += 1
        if self.count == self.at:
            if half is not None and self.number == signal.SIGKILL:
                half()
            os.kill(os.getpid(), self.number)

    def audit(self, event: str, args: tuple) -> None:
        if event == "open" and isinstance(args[0], str) and args[0].startswith(self.folder):
            if args[2] & WRITING:
                self.tick()
        elif event in ("os.rename", "os.mkdir") and str(args[0]).startswith(self.folder):
            self.tick()
        elif event in ("os.remove", "os.rmdir"):  # by shutil.rmtree relative to a descriptor
            self.tick()

    def writer(self, write: Callable, position: int) -> Callable:
        """`write`, with an event before it, one that leaves half of the file, and one after it."""

        def wrapped(*args, **kwargs):
            self.tick()
            result = write(*args, **kwargs)
            path = args[position]
            self.tick(half=lambda: os.truncate(path, os.path.getsize(path) // 2))
            self.tick()
            return result

        return wrapped

    def on_substep_end(self, args, state, control, **kwargs):
        self.tick()

    def on_step_end(self, args, state, control, **kwargs):
        self.tick()


def make(case: str, folder: Path, bomb: Bomb):
    """The trainer of a case: dropout, AdamW, a schedule, accumulation, clipping, queues, averages."""
    dropout = 0.0 if case == "adapters" else 0.1
    arguments = {"callbacks": [bomb]}
    if case == "adapters":
        arguments |= {"peft_config": LoraConfig(r=2, target_modules=["attn_qkv"]), "encoder": "base"}
    rows = toy_rows(24)
    if case == "stream":
        rows = Dataset.from_list(rows).to_iterable_dataset().repeat(None)
    fields = {"ddp_backend": "gloo", "per_device_train_batch_size": 1} if case == "two processes" else {}
    model = tiny_model("mdlm", dropout=dropout)
    return make_trainer(folder, model=model, rows=rows, arguments=arguments, ema_decay=0.9, **FIELDS | fields)


def train(case: str, folder: Path, at: int | None, number: int) -> None:
    """Go on with the run in `folder` to its end, and leave what it has become beside it."""
    torch.set_num_threads(1)
    bomb = Bomb(folder, at, number)
    trainer = make(case, folder, bomb)
    trainer.train(resume_from_checkpoint=trainer.newest_checkpoint())
    bomb.at = None
    if trainer.is_world_process_zero():
        state = weights_of(trainer.model) | trainer.ema.state_dict() | queues_of(trainer)
        end = {"state": weights_digest(state), "losses": logged(trainer), "step": trainer.state.global_step}
        folder.with_suffix(".json").write_text(json.dumps(end | {"events": bomb.count}))


def spawn(case: str, folder: Path, at: int | None, number: int, environment: dict[str, str]) -> int:
    """Fork a process that trains; its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        log = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1), os.dup2(log, 2)
        os.environ.update(environment)
        train(case, folder, at, number)
        code = 0
    except TrainingStopped as stop:
        code = stop.code
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def attempt(case: str, folder: Path, at: int | None = None, number: int = signal.SIGKILL, victim: int = 0) -> int:
    """One training, in one or two processes, one of which may be killed. Its status, or minus the signal.

    Raises:
        TimeoutError: it neither ends nor dies.
    """
    environments = two_ranks() if case == "two processes" else [{}]
    ranks = len(environments)
    hit = [at if rank == victim % ranks else None for rank in range(ranks)]
    children = [spawn(case, folder, hit[rank], number, environments[rank]) for rank in range(ranks)]
    statuses, end = {}, time.monotonic() + TIME_LIMIT
    while len(statuses) < ranks:
        for child in set(children) - statuses.keys():
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                statuses[child] = os.waitstatus_to_exitcode(status)
        if min(statuses.values(), default=0) < 0 or time.monotonic() > end:
            for child in set(children) - statuses.keys():  # what the other waits for will not come
                os.kill(child, signal.SIGKILL)
        if time.monotonic() > end:
            raise TimeoutError(
                f"{case}: a training did not end within {TIME_LIMIT} s; see {folder.with_suffix('.log')}"
            )
        time.sleep(0.02)
    return min(statuses.values()) if min(statuses.values()) < 0 else max(statuses.values())


def newest(folder: Path) -> int:
    """The step of the newest complete checkpoint; 0: there is none."""
    try:
        return step_of(last_complete_checkpoint(folder))
    except ValueError:
        return 0


def end_of(folder: Path) -> dict:
    return json.loads(folder.with_suffix(".json").read_text())


def whole(case: str, folder: Path) -> dict:
    """What the run becomes that nobody kills, and how many events it has."""
    folder.mkdir(parents=True)
    status = attempt(case, folder)
    assert status == 0, folder.with_suffix(".log").read_text()[-3000:]
    return end_of(folder)


def survive(case: str, folder: Path, kills: list[tuple[int, int, int]], expected: dict) -> Counter:
    """Kill a run again and again, then let it end.

    Args:
        case: of `CASES`.
        folder: of the run, not there yet.
        kills: event, signal and process of each, one for an attempt.
        expected: what `whole` gave.

    Returns:
        How many attempts were killed, stopped or done before the event.

    Raises:
        AssertionError: a complete checkpoint was lost, an attempt failed, or the run ended otherwise.
    """
    folder.mkdir(parents=True)
    log, figures = folder.with_suffix(".log"), Counter()
    for at, number, victim in kills:
        before = newest(folder)
        status = attempt(case, folder, at, number, victim)
        # Before training has begun nobody listens to SIGTERM.
        kinds = {-signal.SIGKILL: "killed", -signal.SIGTERM: "killed", STOPPED: "stopped", 0: "done before"}
        assert status in kinds, f"{case}, event {at}: status {status}\n{log.read_text()[-3000:]}"
        figures[kinds[status]] += 1
        assert newest(folder) >= before, f"{case}, event {at}: the checkpoint of step {before} is lost"
    status = attempt(case, folder)
    assert status == 0, f"{case}, {kills}: status {status}\n{log.read_text()[-3000:]}"
    end = end_of(folder)
    for name in ("step", "state", "losses"):
        assert end[name] == expected[name], f"{case}, {kills}: {name} differs"
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="attempts to cut off, over all cases")
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--seed", type=int, default=0, help="of where they die")
    options = parser.parse_args()
    draw, total = random.Random(options.seed), Counter()
    with tempfile.TemporaryDirectory() as scratch:
        expected = {case: whole(case, Path(scratch, "whole", case)) for case in options.cases}
        print({case: end["events"] for case, end in expected.items()}, "events", flush=True)
        number = 0
        while total["cut off"] < options.kills:
            case = options.cases[number % len(options.cases)]
            signals = [
                signal.SIGTERM if draw.random() < 0.25 else signal.SIGKILL for _ in range(draw.choice([1, 1, 2]))
            ]
            # In order from the first event on, and then anywhere: the second attempt of a run dies early.
            events = expected[case]["events"]
            first = number // len(options.cases) % events + 1
            kills = [(first, signals[0], draw.randrange(2))]
            kills += [(draw.randint(1, events // 2), which, draw.randrange(2)) for which in signals[1:]]
            figures = survive(case, Path(scratch, "cut", str(number)), kills, expected[case])
            total += figures + Counter({f"{case}: runs": 1})
            total["cut off"] = total["killed"] + total["stopped"]
            number += 1
            if number % 10 == 0:
                print(dict(total), flush=True)
    print("All runs ended like the uninterrupted one, and no complete checkpoint was lost:", dict(total))


if __name__ == "__main__":
    main()
