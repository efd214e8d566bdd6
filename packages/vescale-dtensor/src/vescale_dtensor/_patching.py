"""Wrapping functions of torch that never ask the class of their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ._dispatch.table import lookup
from ._tensor import TABLE, DTensor
from .errors import UnsupportedOperationError


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


def replace_once(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put a wrapper in place of `owner.name`, once."""
    original = getattr(owner, name, None)
    if original is None or hasattr(original, "_vescale_wrapped"):
        return
    wrapper = make(original)
    wrapper._vescale_wrapped = original
    setattr(owner, name, wrapper)
    if owner is Tensor:  # methods in C++ look their own name up here when they dispatch
        TABLE[wrapper] = lambda _, args, kwargs: lookup(original)(original, args, kwargs)
