"""Wrapping functions of torch that never ask the class of their arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._dispatch.table import lookup
from ._tensor import TABLE, DTensor
from .errors import UnsupportedOperationError

_on = torch._C._is_torch_function_enabled


def refusal(what: str, instead: str) -> UnsupportedOperationError:
    """Error of a function that would work on storages."""
    return UnsupportedOperationError(
        f"{what} would see only this rank's part of a DTensor, as if it were the whole. {instead}"
    )


def holds_dtensor(value: Any) -> bool:
    """Whether nested lists hold a DTensor; looks at classes only, at the speed of C for flat lists."""
    kinds = set(map(type, value))
    return DTensor in kinds or (
        (list in kinds or tuple in kinds) and any(holds_dtensor(v) for v in value if isinstance(v, list | tuple))
    )


def guard_argument(name: str, instead: str) -> Callable[[Any], Any]:
    """Wrap a function that must not meet a DTensor in any position."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            for value in args:
                if value.__class__ is DTensor and _on():
                    raise refusal(name, instead)
            return original(*args, **kwargs)

        return wrapper

    return make


def replace_once(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put a wrapper in place of `owner.name`, once."""
    original = getattr(owner, name, None)
    if original is None or hasattr(original, "_vescale_wrapped"):
        return
    wrapper = make(original)
    wrapper._vescale_wrapped = original
    wrapper._torchdynamo_inline = original  # compiled code holds no DTensors: to Dynamo the wrapper is the original
    setattr(owner, name, wrapper)
    if owner is Tensor:  # methods in C++ look their own name up here when they dispatch
        TABLE[wrapper] = lambda _, args, kwargs: lookup(original)(original, args, kwargs)
