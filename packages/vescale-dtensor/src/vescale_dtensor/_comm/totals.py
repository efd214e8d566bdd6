"""Sums over ranks of small tensors without gradients, such as the number of tokens: begun early, waited for late."""

from __future__ import annotations

from torch import Tensor

from .._mesh import Axes, MeshInfo
from .._tap import slot
from . import record
from .steps import AllReduce, Started

__all__ = ["Total", "begin_sum", "end_sum", "reducer_over", "sum_over"]


class Total:
    """A sum over ranks under way.

    Args:
        x: what this rank adds.
        reducer: over the ranks; None: the sum is `x`.
    """

    __slots__ = ("_running", "_span", "_sum")

    def __init__(self, x: Tensor, reducer: AllReduce | None) -> None:
        self._running: Started | None = None
        self._span: object | None = None
        self._sum = x
        if reducer is None:
            return
        if slot.active and slot.recorder is not None:  # one step, which a pass may take apart
            self._sum = slot.recorder.atomic(sum_over, (x, reducer), {})
            return
        self._span = record.begin("AllReduce")
        self._running = reducer.start(x)

    def wait(self) -> Tensor:
        """Return the sum."""
        if self._running is not None:
            (work, finish), self._running = self._running, None
            if work is not None:
                work.wait()
            self._sum = finish()
            record.end(self._span)
        return self._sum


def reducer_over(mesh: MeshInfo, axes: Axes) -> AllReduce | None:
    """Return what sums over axes of a mesh; None where that is one rank."""
    return AllReduce(mesh, axes) if axes and mesh.size_of(axes) > 1 else None


def sum_over(x: Tensor, reducer: AllReduce | None) -> Tensor:
    """Return the sum of a tensor over ranks; without gradients."""
    return Total(x, reducer).wait()


def begin_sum(x: Tensor, reducer: AllReduce) -> Total:
    """Begin a sum, as a program does."""
    return Total(x, reducer)


def end_sum(total: Total) -> Tensor:
    """Return a sum that was begun."""
    return total.wait()
