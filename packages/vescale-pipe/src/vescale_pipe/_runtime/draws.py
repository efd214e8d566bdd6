"""What forwards draw, such as dropout: one stream per micro-batch, which goes with it from stage to stage.

So the numbers are those of one process that seeds torch before each micro-batch, wherever the model is cut.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

__all__ = ["Stream", "microbatch_seed"]

MASK = 0xFFFFFFFF


def microbatch_seed(seed: int, step: int, microbatch: int) -> int:
    """Return the seed of the stream that a micro-batch draws from under `PipePlan(seed=...)`.

    torch's generator on CPUs uses the low 32 bits of a seed: they differ for all micro-batches of a seed, up to 4,096
    a step and a million steps.

    Args:
        seed: of the plan.
        step: `PipeEngine.steps` when the step begins: 0, 1, ...
        microbatch: number of the micro-batch in the step.

    Returns:
        A number for `torch.manual_seed`.

    Example:
        >>> len({microbatch_seed(0, step, m) for step in range(100) for m in range(8)})
        800
    """
    place = (step << 12) + microbatch
    low = _mixed((place + _mixed(seed & MASK) + _mixed((seed >> 32) & MASK ^ 0x5BD1E995)) & MASK)
    # The highest bit stays 0, for torch takes seeds as signed numbers.
    return (_mixed(low ^ (seed & MASK)) >> 1) << 32 | low


def _mixed(number: int) -> int:
    """Mix 32 bits, one to one; source: finalizer of MurmurHash3 (Appleby)."""
    number = (number ^ number >> 16) * 0x85EBCA6B & MASK
    number = (number ^ number >> 13) * 0xC2B2AE35 & MASK
    return number ^ number >> 16


class Stream:
    """Lets what runs inside draw from a stream of its own, and leaves the generators as they were.

    Args:
        start: a seed, or where another stream ended.
    """

    __slots__ = ("_before", "_start", "end")

    def __init__(self, start: Any) -> None:
        self._start = start
        self._before: Any = None
        self.end: Any = None
        """Where it ended; can be sent."""

    def __enter__(self) -> Stream:
        self._before = _state()
        if isinstance(self._start, int):
            torch.default_generator.manual_seed(self._start)
            if _cuda_in_use():
                torch.cuda.manual_seed(self._start)
        else:
            _set(self._start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end = _state()
        _set(self._before)


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _state() -> Any:
    cpu = torch.default_generator.get_state()
    return (cpu, torch.cuda.get_rng_state()) if _cuda_in_use() else cpu


def _set(state: Any) -> None:
    cpu, cuda = state if isinstance(state, tuple) else (state, None)
    torch.default_generator.set_state(cpu.cpu().clone())  # it reads from where the storage begins
    if cuda is not None and _cuda_in_use():
        torch.cuda.set_rng_state(cuda.cpu().clone())
