"""What this machine does, measured: memory at its peak, and whether bfloat16 is the faster number format."""

from __future__ import annotations

import re
import resource
import sys
import time
from pathlib import Path

import torch

GIB = 2**30
WORTHWHILE = 1.2  # a product in bfloat16 has to be this much faster, since casting to it takes time as well


def peak_memory(device: torch.device) -> int:
    """The most bytes that tensors on an accelerator have taken since its last reset.

    On a CPU, and on a device whose backend does not count (mps), those of the whole process.
    """
    backend = torch.get_device_module(device)  # torch.accelerator counts memory from torch 2.9 on alone
    if hasattr(backend, "max_memory_allocated"):
        return backend.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.is_file():  # Linux, where getrusage counts the memory of the process that started this one as well
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_memory(device: torch.device) -> None:
    """Begin to measure the peak anew. That of a process only ever grows."""
    backend = torch.get_device_module(device)
    if hasattr(backend, "reset_peak_memory_stats"):
        backend.reset_peak_memory_stats(device)


def choose_bf16(device: torch.device) -> tuple[bool, str]:
    """Whether bfloat16 products are clearly faster on a device than float32 ones, and a sentence that says so."""
    half, single = (product_seconds(device, dtype) for dtype in (torch.bfloat16, torch.float32))
    chosen = half * WORTHWHILE < single
    return chosen, (
        f"bf16: auto is {str(chosen).lower()}. A matrix product takes {1e3 * half:.2f} ms in bfloat16 here and "
        f"{1e3 * single:.2f} ms in float32."
    )


def product_seconds(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """The shortest time that a matrix product took, of as many as fit into `seconds`."""
    size = 1024 if device.type == "cpu" else 4096
    a = torch.randn(size, size, device=device, dtype=dtype)
    shortest, end = float("inf"), time.perf_counter() + seconds
    (a @ a)[0, 0].item()  # the first one loads what it needs
    while time.perf_counter() < end or shortest == float("inf"):
        start = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for the device
        shortest = min(shortest, time.perf_counter() - start)
    return shortest


def duration(seconds: float) -> str:
    """A time for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
