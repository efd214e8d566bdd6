"""The slot of a recorder: functions that no torch-function mode sees tell it what they do.

Collectives, custom autograd functions and draws do not dispatch. Each asks here first, at the price of one attribute
(`slot.active`) as long as no thread records.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Recorder", "alias", "slot", "unrecorded"]

_run = torch._C._disabled_torch_function_impl


class Recorder(Protocol):
    """What records a call (see `_static.recorder`)."""

    def atomic(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], writes: bool = False
    ) -> Any:
        """Run a function on local tensors as one step of the record."""

    def move(self, x: Any, types: tuple[int, ...]) -> Any:
        """Move a DTensor as one step of the record."""

    def alias(self, alias: Any, of: Any) -> Any:
        """Take note of a second object for the same value."""

    def pause(self) -> object:
        """Record nothing until `go_on`; returns what that takes."""

    def go_on(self, before: Any) -> None:
        """Record again."""

    def refuse(self, reason: str) -> None:
        """Give up recording: what happens cannot be repeated blindly."""


class Slot:
    """Who records now, in each thread."""

    __slots__ = ("_lock", "_threads", "active")

    def __init__(self) -> None:
        self.active = 0
        """How many threads record; where none does, nobody need look for the own one."""
        self._lock, self._threads = threading.Lock(), threading.local()

    @property
    def recorder(self) -> Recorder | None:
        """Who records in this thread; None: nobody, or not now."""
        return getattr(self._threads, "recorder", None)

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._threads.recorder = recorder

    def begin(self, recorder: Recorder) -> None:
        """Let what happens in this thread be recorded."""
        with self._lock:
            self.active += 1
        self.recorder = recorder

    def end(self) -> None:
        """Record no longer in this thread."""
        self.recorder = None
        with self._lock:
            self.active -= 1


slot = Slot()


def alias(x: Tensor) -> Tensor:
    """Return a second, plain object for the local part of a tensor, connected to its graph."""
    y: Tensor = _run(Tensor.as_subclass, (), (x, Tensor), {})
    if slot.active and slot.recorder is not None:
        slot.recorder.alias(y, x)
    return y


@contextmanager
def unrecorded() -> Iterator[None]:
    """Do what is no part of a program, such as checks of its inputs, within a ``with`` block."""
    recorder = slot.recorder
    if recorder is None:
        yield
        return
    before = recorder.pause()
    try:
        yield
    finally:
        recorder.go_on(before)
