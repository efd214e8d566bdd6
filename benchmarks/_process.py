"""What a process has used: CPU time, resident memory, and the time of a call that ranks make together."""

from __future__ import annotations

import ctypes
import gc
import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = ["cpu_seconds", "forget_peak", "resident", "timed_together"]


def cpu_seconds() -> float:
    """Seconds of CPU time that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def resident(key: str, *, trim: bool = False) -> int:
    """Return bytes that the kernel keeps on this process: "VmRSS" now, "VmHWM" at most.

    Args:
        key: of /proc/self/status.
        trim: give free memory back first.
    """
    if trim:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def forget_peak() -> None:
    """Let the peak of resident memory start anew."""
    Path("/proc/self/clear_refs").write_text("5")


def timed_together(call: Callable[[], object]) -> tuple[float, float]:
    """Begin a call on all ranks at once; return the seconds of the slowest, and the CPU seconds of all."""
    dist.barrier()
    busy, start = cpu_seconds(), time.perf_counter()
    call()
    wall = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    cpu = torch.tensor(cpu_seconds() - busy, dtype=torch.float64)
    dist.all_reduce(wall, op=dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    return wall.item(), cpu.item()
