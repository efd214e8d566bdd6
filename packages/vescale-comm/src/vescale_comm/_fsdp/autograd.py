"""What autograd is asked for a backward of a sharded module: its run, its end, and where it will begin."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .unit import Unit
from .values import hidden_tensors, tensors_in

__all__ = ["AtEnd", "Backward", "Call", "current_task", "may_come", "results_of", "watch"]


class Call:
    """One forward of a unit that autograd recorded."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        """Which unit."""
        self.versions = unit.versions()
        """Tells whether shards were changed since."""
        self.inputs = 0
        """How many inputs need a gradient."""
        self.left = 0
        """Those of them whose gradient has not come in."""
        self.task = -1
        """Run of autograd in which its backward began."""


class Backward:
    """A backward that goes on."""

    def __init__(self, reduces: bool) -> None:
        self.reduces = reduces
        """Whether gradients are reduced at its end."""
        self.keeps_graph = False
        """Whether there may be a backward through it."""
        self.tasks: dict[int, weakref.ref[AtEnd]] = {}
        """Callback of each of its runs; autograd owns them, so a dead one tells that its run ended with an error."""

    @property
    def is_alive(self) -> bool:
        """Whether any of its runs goes on."""
        return any(callback() is not None for callback in self.tasks.values())


class AtEnd:
    """Callback at the end of one run of autograd."""

    def __init__(self, end: Callable[[int], None], task: int) -> None:
        self._end, self._task = end, task

    def __call__(self) -> None:
        self._end(self._task)


def current_task() -> int:
    """Return a number for the run of autograd that goes on in this thread; -1 if there is none."""
    number: int = torch._C._current_graph_task_id()
    return number


def watch(full: nn.Parameter, hook: Any) -> None:
    """Have a hook called when the gradient of a parameter is there, also if it is frozen now."""
    wanted = full.requires_grad
    full.requires_grad_(True)
    full.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    full.requires_grad_(wanted)


def results_of(unit: Unit, output: Any) -> Iterator[Tensor]:
    """Yield the tensors that a forward of a unit returned or left in attributes."""
    yield from tensors_in(output)
    for module in unit.modules:
        yield from hidden_tensors(module)


def may_come(unit: Unit) -> bool:
    """Tell whether a backward of a unit may still come."""
    return bool(unit.calls) or unit.recomputed > 0
