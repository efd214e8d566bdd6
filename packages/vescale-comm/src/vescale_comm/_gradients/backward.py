"""Tells when a backward begins and when it is over, also where backwards run inside backwards.

Reentrant checkpoints start a backward inside the one that called them. What is final is known only when the outermost
one is over, so that is what this module watches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["NO_TASK", "BackwardWatch", "current_task"]

NO_TASK = -1
"""What `current_task` returns outside of a backward."""

current_task: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward that runs on this thread; no two have the same."""

_FUNCTION: Any = torch.autograd.function.BackwardCFunction
_CALLS = {
    getattr(_FUNCTION, name).__code__ for name in ("apply", "apply_boxed") if hasattr(_FUNCTION, name)
}  # what the engine calls to run the backward of a function written in Python: the only place to start another one


class BackwardWatch:
    """Follows backwards by the hooks that fire in them.

    Args:
        begin: called when the outermost backward is first seen.
        end: called when it is over, still inside it: what `end` raises comes out of the user's `backward()`.
        broken: called, before `begin`, when the one before never came to its end: an exception left it.
    """

    __slots__ = ("_begin", "_broken", "_end", "nested", "outer", "task")

    def __init__(self, begin: Callable[[], None], end: Callable[[], None], broken: Callable[[], None]) -> None:
        self._begin, self._end, self._broken = begin, end, broken
        self.task = NO_TASK
        """The backward that was entered last."""
        self.nested = False
        """Whether it runs inside another one."""
        self.outer = NO_TASK
        """The outermost backward, if it was seen and is not over."""

    @property
    def left(self) -> bool:
        """Whether a backward was entered that did not end, though none runs now."""
        return self.outer != NO_TASK and current_task() == NO_TASK

    def enter(self, task: int) -> None:
        """Take note of a backward; to be called in hooks whenever `task` is not `self.task`.

        Args:
            task: what `current_task` says.
        """
        self.task = task
        if task == NO_TASK:
            self.nested = False
            return
        self.nested = task != self.outer and _inside_backward()
        if self.nested:
            if self.outer == NO_TASK:
                torch.autograd.Variable._execution_engine.queue_callback(self._inner_over)
        elif task != self.outer:
            if self.outer != NO_TASK:
                self._broken()
            self.outer = task
            torch.autograd.Variable._execution_engine.queue_callback(self._over)
            self._begin()

    def forget(self) -> None:
        """Forget a backward that did not end."""
        self.task = self.outer = NO_TASK

    def _over(self) -> None:
        self.forget()
        self._end()

    def _inner_over(self) -> None:
        """Have the backward around the one that is over seen, too: no hook may have fired in it yet, or ever will."""
        self.task = NO_TASK
        node: Any = torch._C._current_autograd_node()
        if self.outer != NO_TASK or node is None:
            return
        handles: list[Any] = []

        def follow(_: Any) -> None:
            for handle in handles:
                handle.remove()
            handles.clear()
            if current_task() != self.task:
                self.enter(current_task())

        for following, _ in node.next_functions:
            if following is not None:
                handles.append(following.register_prehook(follow))


def _inside_backward() -> bool:
    """Tell whether a Python function's backward is among the callers."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _CALLS:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
