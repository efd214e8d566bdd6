"""Blocks that are used by ``with`` or as decorators: nested and again, by one object, on any thread."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

__all__ = ["Block"]

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


class Block:
    """A context manager that makes a fresh one each time it is entered, and decorates functions.

    Args:
        name: as users call it.
        make: returns a context manager for one use.
    """

    def __init__(self, name: str, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._name, self._make = name, make
        self._here = threading.local()

    def __enter__(self) -> None:
        one = self._make()
        one.__enter__()
        entered: list[AbstractContextManager[Any]] = vars(self._here).setdefault("entered", [])
        entered.append(one)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._here.entered.pop().__exit__(kind, error, trace)

    def __call__(self, function: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
        """Run every call of a function within the block.

        Raises:
            TypeError: for what is no function, and for functions that go on after their call has returned.
        """
        if not callable(function):
            raise TypeError(f"{self._name}: decorates functions, but got {function!r}")
        if (
            inspect.iscoroutinefunction(function)
            or inspect.isgeneratorfunction(function)
            or inspect.isasyncgenfunction(function)
        ):
            raise TypeError(
                f"{self._name}: {function.__qualname__} is a generator or an async function, whose body runs after the "
                f"call has returned; write `with {self._name}(...):` in its body"
            )

        @functools.wraps(function)
        def wrapped(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
            with self._make():
                return function(*args, **kwargs)

        return wrapped
