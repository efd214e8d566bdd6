"""Integers that a caller gave: clear errors for what is none, and seeds as torch takes them."""

from __future__ import annotations

import operator
from typing import Any

from .errors import RandomError

__all__ = ["MASK64", "integer", "seed_of"]

MASK64 = (1 << 64) - 1


def integer(name: str, value: Any) -> int:
    """Return an argument as an int.

    Args:
        name: of the argument, for the message.
        value: what was given.

    Raises:
        TypeError: if it is no integer.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {value!r} ({type(value).__name__})") from None


def seed_of(value: Any) -> int:
    """Return a seed within 0 and 2**64 - 1; negative ones wrap as in `torch.manual_seed`.

    Raises:
        RandomError: if it does not fit 64 bits.
        TypeError: if it is no integer.

    >>> seed_of(-1) == 2**64 - 1
    True
    """
    number = integer("seed", value)
    if not -(1 << 63) <= number <= MASK64:
        raise RandomError(f"seed has to be within -2**63 and 2**64 - 1, got {value}")
    return number & MASK64
