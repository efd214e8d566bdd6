"""Measures what collectives cost on a group, alone and beside a computation; fits `alpha + beta * bytes` to each."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .agree import exchange
from .interface import Transport, Work

__all__ = ["OPERATIONS", "Cost", "measure", "measure_beside"]

SMALL, LARGE = 16 << 10, 2 << 20
"""Bytes of the two buffers: one whose time is all latency, one that is bound by bandwidth."""
OPERATIONS = ("reduce_scatter", "all_gather", "all_reduce")
ROWS, WIDTH, LAYERS = 64, 512, 8
"""Of the computation: products with matrices of 1 MiB in single precision, of which caches near the processor hold few,
as the layers of a model with short batches."""
FEW, OFTEN = 5, 20
"""Times that a computation is measured, at least and at most."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Time of a collective by the bytes of its buffer.

    Example:
        >>> Cost(alpha=1e-4, beta=1e-9).seconds(1_000_000)
        0.0011
    """

    alpha: float
    """Seconds that it takes however small the buffer is."""
    beta: float
    """Seconds per byte of the buffer."""

    def seconds(self, nbytes: float) -> float:
        """Return how long it takes."""
        return self.alpha + self.beta * nbytes


def measure(transport: Transport, device: torch.device, *, seconds: float = 0.3) -> Mapping[str, Cost]:
    """Measure the collectives of a transport; every rank of it must call this, and all get the same result.

    Args:
        transport: what to measure.
        device: of the buffers.
        seconds: about how long it may take.

    Returns:
        By operation, the cost as the slowest rank saw it.
    """
    budget = seconds / (2 * len(OPERATIONS))
    times: dict[str, tuple[float, float]] = {}
    for operation in OPERATIONS:
        call = getattr(transport, operation)
        times[operation] = (
            _time(transport, call, SMALL, device, budget),
            _time(transport, call, LARGE, device, budget),
        )
    return {operation: _fit(*pair) for operation, pair in times.items()}


def measure_beside(
    transport: Transport, device: torch.device, alone: Mapping[str, Cost], *, seconds: float = 0.3
) -> Mapping[str, Cost]:
    """Measure by how much collectives make a computation longer that goes on beside them; every rank must call this.

    Where no processor is free that is more than they take alone: caches have other data, and threads take turns.

    Args:
        transport: what to measure.
        device: of the buffers.
        alone: what `measure` found.
        seconds: about how long it may take.

    Returns:
        By operation, the cost as the slowest rank saw it: the median of steps with it, less the median of steps
        without it, in which the rank computes for twice as long as the collective takes alone.
    """
    budget = seconds / (2 * len(OPERATIONS))
    layers = [torch.ones(WIDTH, WIDTH, device=device) for _ in range(LAYERS)]
    rows = torch.ones(ROWS, WIDTH, device=device)

    def compute(times: int) -> None:
        for number in range(times):
            torch.mm(rows, layers[number % LAYERS])

    compute(LAYERS)
    once = min(_clocked(lambda: compute(LAYERS), device) for _ in range(FEW)) / LAYERS
    once = _agreed(transport, device, once)
    found: dict[str, Cost] = {}
    for operation in OPERATIONS:
        added = []
        for nbytes in (SMALL, LARGE):
            times = max(1, math.ceil(2 * alone[operation].seconds(nbytes) / max(once, 1e-6)))
            rounds = max(FEW, min(OFTEN, int(budget / (2 * times * max(once, 1e-6)))))
            start = partial(getattr(transport, operation), _buffer(transport, nbytes, device))
            added.append(_added(transport, device, start, partial(compute, times), rounds))
        found[operation] = _fit(*added)
    return found


def _added(
    transport: Transport,
    device: torch.device,
    start: Callable[[], Work],
    compute: Callable[[], None],
    rounds: int,
) -> float:
    meet = transport.allocate(transport.size, torch.float32, device)

    def both() -> None:
        work = start()
        compute()
        work.wait()

    without: list[float] = []
    together: list[float] = []
    for _ in range(rounds):
        for job, seconds in ((compute, without), (both, together)):
            transport.all_gather(meet).wait()  # ranks begin at the same time
            seconds.append(_clocked(job, device))
    difference = statistics.median(together) - statistics.median(without)
    return _agreed(transport, device, max(0.0, difference))


def _buffer(transport: Transport, nbytes: int, device: torch.device) -> Tensor:
    numel = nbytes // 4 // transport.size * transport.size or transport.size
    return transport.allocate(numel, torch.float32, device)


def _time(
    transport: Transport, call: Callable[[Tensor], Work], nbytes: int, device: torch.device, budget: float
) -> float:
    buffer = _buffer(transport, nbytes, device)
    once = min(_agreed(transport, device, _run(call, buffer)) for _ in range(2))
    best = once
    for _ in range(max(1, min(20, int(budget / max(once, 1e-5))))):
        best = min(best, _run(call, buffer))
    return _agreed(transport, device, best)


def _run(call: Callable[[Tensor], Work], buffer: Tensor) -> float:
    return _clocked(lambda: call(buffer).wait(), buffer.device)


def _clocked(job: Callable[[], object], device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    start = time.perf_counter()
    job()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start


def _agreed(transport: Transport, device: torch.device, value: float) -> float:
    return max(float(json.loads(word)) for word in exchange(transport, json.dumps(value).encode(), device))


def _fit(small: float, large: float) -> Cost:
    beta = max(0.0, large - small) / (LARGE - SMALL)
    return Cost(max(0.0, small - beta * SMALL), beta)
