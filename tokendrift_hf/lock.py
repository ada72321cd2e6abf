"""One writer at a time in a folder, on this machine and on others that share the disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout

LOCK = "_tokendrift.lock"  # stays beside what was written, empty; what begins with _ is never pushed
WAIT = 10.0  # seconds; a process that was killed may take a moment to go, with all its children


@contextmanager
def locked(folder: Path, wait: float | None = None) -> Iterator[None]:
    """Inside, no other process writes into `folder`, as far as all of them ask. The folder is made.

    The lock belongs to the process: the kernel releases it whatever way the process ends. File systems shared by
    machines pass it on (NFS does, Lustre if mounted with flock).

    Args:
        folder: of a run, a training or an evaluation.
        wait: seconds to wait for another process to go, by default `WAIT`.

    Raises:
        ValueError: another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=WAIT if wait is None else wait)
    except Timeout as error:
        raise ValueError(
            f"Another process is writing into {folder} (it holds {LOCK} there), and two would spoil each other's "
            "files. Wait for it to end, or name another folder."
        ) from error
    try:
        yield
    except BaseException:
        if [path for path in folder.rglob("*") if path.is_file()] == [folder / LOCK]:
            (folder / LOCK).unlink()  # what was refused leaves nothing
        raise
    finally:
        lock.release()


@contextmanager
def locked_by_first(folder: Path) -> Iterator[None]:
    """The same for all processes of a launch: the first one has the lock for them. All of them have to call this.

    Raises:
        ValueError: on every process, if another launch has it.
    """
    with ExitStack() as stack:
        problem = None
        if PartialState().is_main_process:
            try:
                stack.enter_context(locked(folder))
            except ValueError as error:
                problem = error
        [problem] = broadcast_object_list([problem])
        if problem is not None:
            raise problem
        yield
