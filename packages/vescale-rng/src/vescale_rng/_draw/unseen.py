"""The draws of this package, hidden from the modes of `local_parts`, which would take them for the user's own.

Sharded tensors are filled by torch's kernels on plain tensors; within `local_parts` those must not be drawn once more.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

__all__ = ["is_unseen", "looking", "parts_are_seen", "unseen"]

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


class _Here(threading.local):
    hidden = False


_here = _Here()
_lookers: list[None] = []
"""One entry per mode in force, on any thread: autograd takes a mode along to its own threads."""


def unseen(function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """Hide the random operators that a function of this package calls; costs next to nothing outside of a block."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not _lookers or _here.hidden:
            return function(*args, **kwargs)
        _here.hidden = True
        try:
            return function(*args, **kwargs)
        finally:
            _here.hidden = False

    return wrapped


@contextlib.contextmanager
def looking() -> Iterator[None]:
    """Say that a mode is in force that takes random operators for the user's."""
    _lookers.append(None)
    try:
        yield
    finally:
        _lookers.pop()


def parts_are_seen() -> bool:
    """Tell whether a mode of `local_parts` is around the modes that are at work on this thread."""
    if not _lookers or _here.hidden:
        return False
    return any(getattr(mode, "sees_parts", False) for mode in _get_current_dispatch_mode_stack())


def is_unseen() -> bool:
    """Tell whether an operator comes from this package, on this thread."""
    return _here.hidden
