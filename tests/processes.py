"""Processes for tests that import little or nothing: imports take longer than most of what is tested.

`Interpreter` is a fresh one, forked from one that has imported torch and nothing that depends on the environment. Torch
and the numerical libraries take 4 of the 6 seconds in which a process imports this package. What reads its settings
from the environment when it is imported (huggingface_hub, transformers, datasets, evaluate) is not among them.

`run_forks` forks the process of the tests itself, for processes of one launch.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

HEAVY = """
torch torch._dynamo torch.distributed.tensor torch.distributed.checkpoint torch.distributed.elastic.agent.server sympy
scipy.optimize scipy.stats pandas pyarrow.dataset requests httpx2 jinja2.sandbox chardet PIL.Image
""".split()
LATE = ("transformers", "huggingface_hub", "datasets", "evaluate", "tokendrift_hf")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(HEAVY)  # those that there are


class Interpreter:
    """Runs `code` as `python -c` would, with stdout and stderr in one file; the interface is that of Popen."""

    def __init__(self, code: str, cwd: Path, environment: dict[str, str], path: list[str], output: Path):
        self.output = output
        self._process = _context.Process(target=_run, args=(code, cwd, environment, path, output))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def terminate(self) -> None:
        self._process.terminate()

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self._process.join(timeout)
        if self.returncode is None:
            self._process.kill()
            raise subprocess.TimeoutExpired("python", timeout, self.output.read_text(errors="replace"))
        return self.output.read_text(errors="replace"), None


def _run(code: str, cwd: Path, environment: dict[str, str], path: list[str], output: Path) -> None:
    _print_into(output)
    assert not set(LATE) & set(sys.modules)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:], sys.argv[:] = path, ["-c"]
    sys.modules["torch"].set_num_threads(1)
    gc.freeze()  # what is imported here is never garbage
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<code of a test>", "exec"), sys.modules["__main__"].__dict__)


def run_forks(
    call: Callable[[], int | None], folder: Path, *environments: dict[str, str], timeout: float = 400
) -> tuple[list[int | None], list[str]]:
    """Forks of this process, which has imported everything, one for each environment.

    Args:
        call: what each does. It returns the status, as for `sys.exit`.
        folder: gets what they print, as log_0, log_1, ...
        environments: variables beside those of this process.
        timeout: seconds until all are killed.

    Returns:
        Their statuses (None: killed after `timeout`), and what they printed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    outputs = [folder / f"log_{i}" for i in range(len(environments))]
    fork, end = multiprocessing.get_context("fork"), time.monotonic() + timeout
    running = [
        fork.Process(target=_run_fork, args=(call, environment, output))
        for environment, output in zip(environments, outputs, strict=True)
    ]
    for process in running:
        process.start()
    for process in running:
        process.join(max(0.0, end - time.monotonic()))
    statuses = [process.exitcode for process in running]
    for process in running:
        process.kill()
    return statuses, [output.read_text(errors="replace") for output in outputs]


def _run_fork(call: Callable[[], int | None], environment: dict[str, str], output: Path) -> None:
    from accelerate.state import AcceleratorState, GradientState

    _print_into(output)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # not what pytest reads
    os.environ.update(environment)
    AcceleratorState._reset_state(reset_partial_state=True)  # that of the tests is one process
    GradientState._reset_state()
    sys.exit(call())


def two_ranks() -> list[dict[str, str]]:
    """The variables that torchrun sets for two processes of one launch."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]


def _print_into(output: Path) -> None:
    stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stream, 1)
    os.dup2(stream, 2)


def free_port() -> int:
    """A port of the loopback interface at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
