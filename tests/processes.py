"""Fresh interpreters for tests, forked from one that has imported torch and nothing that depends on the environment.

Torch and the numerical libraries take 4 of the 6 seconds in which a process imports this package. What reads its
settings from the environment when it is imported (huggingface_hub, transformers, datasets, evaluate) is not among them.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import types
from pathlib import Path

HEAVY = ("torch", "torch._dynamo", "torch.distributed.tensor", "scipy.optimize", "sympy", "pandas", "pyarrow.dataset")
LATE = ("transformers", "huggingface_hub", "datasets", "evaluate", "tokendrift_hf")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(HEAVY))


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
    stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    assert not set(LATE) & set(sys.modules)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:], sys.argv[:] = path, ["-c"]
    sys.modules["torch"].set_num_threads(1)
    gc.freeze()  # what is imported here is never garbage
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<code of a test>", "exec"), sys.modules["__main__"].__dict__)
