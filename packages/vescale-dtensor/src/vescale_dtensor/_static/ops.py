"""What a compiler must not look into, as one custom operator: communications, and draws of random numbers.

`vescale_dtensor::step` has an ordered effect: a compiler keeps all calls of it, forward and backward, in the order of
the program. Else ranks whose code differs would wait for each other in different collectives, and random numbers would
be drawn in another order than on one device.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import DTensorError

__all__ = ["Outline", "Steps", "here", "like", "opaque", "trace"]

Function = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True, slots=True)
class Outline:
    """What a tensor is without its data."""

    shape: tuple[int, ...]
    """Elements per dim."""
    stride: tuple[int, ...] | None
    """In memory; None for the usual order."""
    dtype: torch.dtype
    """Of the elements."""
    device: torch.device
    """Where it lies."""

    def empty(self) -> Tensor:
        """Return a tensor of this kind with undefined contents."""
        if self.stride is None:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def holds(self, made: Tensor) -> Tensor:
        """Return a result as compiled code expects it, copied where it lies in memory in another order."""
        expected = self.empty() if self.stride is not None else None
        if expected is None:
            return made.contiguous()
        return made if made.stride() == self.stride else expected.copy_(made)

    def __str__(self) -> str:
        order = "" if self.stride is None else f" by {list(self.stride)}"
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{order} {self.device}"


def like(x: Tensor, shape: Sequence[int] | None = None) -> Outline:
    """Return the outline of a tensor of another shape and in the usual order; of `x` itself without a shape."""
    if shape is None:
        return Outline(tuple(x.shape), tuple(x.stride()), x.dtype, x.device)
    return Outline(tuple(shape), None, x.dtype, x.device)


class Steps:
    """The opaque steps of one compiled program by name; to be kept as long as the program may run."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.known: dict[str, tuple[Function, Sequence[Outline]]] = {}
        self._count = 0
        _alive[self.number] = self

    def restart(self) -> None:
        """Begin anew: a program is traced several times, and its steps have the same names each time."""
        self._count = 0

    def add(self, name: str, run: Function, results: Sequence[Outline]) -> str:
        """Return the name of a new step."""
        # Processes share caches of compiled code: all that decides about the code is part of the name.
        what = f"{name} {self._count} to {', '.join(map(str, results))}"
        self._count += 1
        self.known[what] = run, results
        return what


_numbers = itertools.count()
_alive: weakref.WeakValueDictionary[int, Steps] = weakref.WeakValueDictionary()


class _Here(threading.local):
    """What this thread does: ranks may be threads."""

    steps: Steps | None = None
    """Of the program that it traces."""


here = _Here()


@contextmanager
def trace(steps: Steps | None) -> Iterator[None]:
    """Let opaque steps be part of a graph within a ``with`` block, or none with None."""
    before, here.steps = here.steps, steps
    try:
        yield
    finally:
        here.steps = before


def opaque(name: str, run: Function, tensors: Sequence[Tensor], results: Sequence[Outline]) -> list[Tensor]:
    """Add a function as one step that no compiler looks into to the program that is traced; not differentiable.

    Args:
        name: for who reads the graph.
        run: takes the tensors; returns new ones, none of which shares memory with another.
        tensors: its arguments.
        results: what it returns.

    Raises:
        DTensorError: a tensor needs a gradient.
    """
    assert here.steps is not None
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise DTensorError(f"{name} has no gradient in compiled code; leave out compile")
    what = here.steps.add(name, run, results)
    made: list[Tensor] = _operator()(list(tensors), here.steps.number, what)
    return made


def _run(tensors: list[Tensor], program: int, what: str) -> list[Tensor]:
    function, results = _alive[program].known[what]
    with trace(None):
        return [outline.holds(t) for outline, t in zip(results, function(tensors), strict=True)]


def _outline(tensors: list[Tensor], program: int, what: str) -> list[Tensor]:
    return [outline.empty() for outline in _alive[program].known[what][1]]


_lock = threading.Lock()
_library: list[torch.library.Library] = []


def _operator() -> Any:
    """Return the operator, made when something is compiled first: its effect takes modules that are slow to import."""
    with _lock:
        if not _library:
            from torch._library.effects import EffectType

            # Not `torch.library.custom_op`, whose wrappers take three times as long as this in each call.
            library = torch.library.Library("vescale_dtensor", "DEF")  # type: ignore[no-untyped-call]
            library.define("step(Tensor[] tensors, int program, str what) -> Tensor[]")  # type: ignore[no-untyped-call]
            library.impl("step", _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
            torch.library.register_fake("vescale_dtensor::step", _outline, lib=library)
            library._register_effectful_op("vescale_dtensor::step", EffectType.ORDERED)
            _library.append(library)
    return torch.ops.vescale_dtensor.step.default
