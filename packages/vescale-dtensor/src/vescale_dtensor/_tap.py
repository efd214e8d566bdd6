"""The slot of a recorder: functions that no torch-function mode sees tell it what they do.

Collectives, custom autograd functions and draws do not dispatch. Each asks here first, at the price of one attribute.
"""

from __future__ import annotations

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
    """Who records now."""

    __slots__ = ("recorder",)

    def __init__(self) -> None:
        self.recorder: Recorder | None = None


slot = Slot()


def alias(x: Tensor) -> Tensor:
    """Return a second, plain object for the local part of a tensor, connected to its graph."""
    y: Tensor = _run(Tensor.as_subclass, (), (x, Tensor), {})
    if slot.recorder is not None:
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
