"""Measures what data parallelism costs on this rank besides collectives, with the code that runs in training.

Python is timed on modules with next to no arithmetic, over a transport that sends nothing, beside the same modules
without data parallelism.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing

import torch
from torch import nn
from torch.distributed import ProcessGroup

from .._report.host import HostCosts
from .._transport import FakeTransport

__all__ = ["measure_host"]

BLOCK, BLOCKS = 1 << 20, 16
"""Bytes and number of blocks that are copied, far more together than caches near the processor hold."""
ROUNDS = 10
UNITS = 6
FEW, MANY = 1, 5
"""Layers of a unit, of two parameters each."""


def measure_host(group: ProcessGroup, device: torch.device) -> HostCosts:
    """Measure this rank; nothing is sent, but ranks that share processors in training should do it together.

    Args:
        group: of which this rank is a part.
        device: of parameters.
    """
    plain = {layers: _step_seconds(_module(layers, device), device) for layers in (FEW, MANY)}
    sharded = {layers: _step_seconds(_sharded(layers, group, device), device) for layers in (FEW, MANY)}
    few, many = (max(0.0, sharded[layers] - plain[layers]) / UNITS for layers in (FEW, MANY))
    shard = max(0.0, many - few) / (2 * (MANY - FEW))
    hooked = _hooked_seconds(_module(MANY, device), device) - plain[MANY]
    return HostCosts(
        copy=_copy_seconds(device),
        fresh=_fresh_seconds(device),
        hook=max(0.0, hooked) / (2 * MANY * UNITS),
        unit=max(0.0, few - 2 * FEW * shard),
        shard=shard,
    )


def _best(job: Callable[[], object], device: torch.device) -> float:
    # On the CPU other processes may have the processor for a while: that is no cost of the job.
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    found = []
    job()
    for _ in range(ROUNDS):
        _finish(device)
        start = clock()
        job()
        _finish(device)
        found.append(clock() - start)
    return min(found)


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _copy_seconds(device: torch.device) -> float:
    sources, goals = ([torch.ones(BLOCK, dtype=torch.uint8, device=device) for _ in range(BLOCKS)] for _ in range(2))

    def copy() -> None:
        for source, goal in zip(sources, goals, strict=True):
            goal.copy_(source)

    return _best(copy, device) / (BLOCK * BLOCKS)


def _fresh_seconds(device: torch.device) -> float:
    """Return what memory that comes and goes costs more per byte; here four blocks of a few MiB do, as units do."""
    buffers = [torch.empty(4 * BLOCK, dtype=torch.uint8, device=device) for _ in range(4)]

    def fill() -> None:
        for buffer in buffers:
            buffer.untyped_storage().resize_(4 * BLOCK)
            buffer.fill_(1)

    def fill_anew() -> None:
        for buffer in buffers:
            buffer.untyped_storage().resize_(0)
        fill()

    return max(0.0, _best(fill_anew, device) - _best(fill, device)) / (16 * BLOCK)


def _module(layers: int, device: torch.device) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))) for _ in range(UNITS))).to(device)


def _sharded(layers: int, group: ProcessGroup, device: torch.device) -> nn.Module:
    from .._fsdp import fully_shard

    return fully_shard(_module(layers, device), group, transport=FakeTransport(group.size(), group.rank()))


def _step_seconds(module: nn.Module, device: torch.device) -> float:
    x = torch.ones(1, 4, device=device)

    def step() -> None:
        module.zero_grad()
        module(x).sum().backward()

    return _best(step, device)


def _hooked_seconds(module: nn.Module, device: torch.device) -> float:
    from .._gradients import GradientReducer

    with closing(GradientReducer(list(module.named_parameters()), transport=FakeTransport(1), wait=True)):
        return _step_seconds(module, device)
