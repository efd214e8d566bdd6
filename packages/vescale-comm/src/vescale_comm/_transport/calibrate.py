"""Measures what collectives cost on a group, and fits `alpha + beta * bytes` to each."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .agree import exchange
from .interface import Transport

__all__ = ["OPERATIONS", "Cost", "measure"]

SMALL, LARGE = 16 << 10, 2 << 20
"""Bytes of the two buffers: one whose time is all latency, one that is bound by bandwidth."""
OPERATIONS = ("reduce_scatter", "all_gather", "all_reduce")


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


def _time(
    transport: Transport, call: Callable[[Tensor], object], nbytes: int, device: torch.device, budget: float
) -> float:
    numel = nbytes // 4 // transport.size * transport.size or transport.size
    buffer = transport.allocate(numel, torch.float32, device)
    once = min(_agreed(transport, device, _run(call, buffer)) for _ in range(2))
    best = once
    for _ in range(max(1, min(20, int(budget / max(once, 1e-5))))):
        best = min(best, _run(call, buffer))
    return _agreed(transport, device, best)


def _run(call: Callable[[Tensor], object], buffer: Tensor) -> float:
    if buffer.device.type != "cpu":
        torch.accelerator.synchronize(buffer.device)
    start = time.perf_counter()
    call(buffer).wait()  # type: ignore[attr-defined]
    if buffer.device.type != "cpu":
        torch.accelerator.synchronize(buffer.device)
    return time.perf_counter() - start


def _agreed(transport: Transport, device: torch.device, value: float) -> float:
    return max(float(json.loads(word)) for word in exchange(transport, json.dumps(value).encode(), device))


def _fit(small: float, large: float) -> Cost:
    beta = max(0.0, large - small) / (LARGE - SMALL)
    return Cost(max(0.0, small - beta * SMALL), beta)
