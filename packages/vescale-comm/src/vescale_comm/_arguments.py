"""Checks of arguments that several calls have in common; errors name the argument, what was given and the rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ._plan import Block, Rows, Whole
from .errors import PlanError

__all__ = ["check_dtypes", "check_granularity", "check_megabytes", "check_module", "check_prefetch"]


def check_dtypes(**given: Any) -> None:
    """Check dtypes in which gradients or parameters are to be kept.

    Args:
        **given: by the names of the arguments; None is right.

    Raises:
        TypeError: it is no dtype.
        PlanError: it is one of whole numbers.
    """
    for name, dtype in given.items():
        if dtype is None:
            continue
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{name}: expected a torch.dtype such as torch.float32, or None, but got {_shown(dtype)}.")
        if not (dtype.is_floating_point or dtype.is_complex):
            raise PlanError(f"{name}: expected a floating-point dtype such as torch.float32, but got {dtype}.")


def check_megabytes(name: str, given: Any) -> None:
    """Check a size in MiB.

    Raises:
        TypeError: it is no number.
        PlanError: it is not positive and finite.
    """
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(f"{name}: expected a number of MiB, but got {_shown(given)}.")
    if not 0 < given < math.inf:
        raise PlanError(f"{name}: expected a positive number, in MiB, but got {given!r}.")


def check_prefetch(given: Any) -> None:
    """Check a number of units.

    Raises:
        TypeError: it is no whole number.
        PlanError: it is negative.
    """
    if isinstance(given, bool) or not isinstance(given, int):
        raise TypeError(f"prefetch: expected a number of units, 0 or more, but got {_shown(given)}.")
    if given < 0:
        raise PlanError(f"prefetch: expected a number of units, 0 or more, but got {given}.")


def check_granularity(given: Any) -> None:
    """Check what is to stay on one rank.

    Raises:
        TypeError: it is no rule, and no mapping from patterns to rules.
        PlanError: it is a number below 1.
    """
    for pattern, rule in given.items() if isinstance(given, Mapping) else [(None, given)]:
        where = "granularity" if pattern is None else f"granularity[{pattern!r}]"
        if isinstance(rule, (Rows, Block, Whole)) and isinstance(pattern, str | None):
            continue
        if isinstance(rule, bool) or not isinstance(rule, int) or not isinstance(pattern, str | None):
            raise TypeError(
                f"{where}: expected a number of elements, Rows(n), Block(m, n) or Whole(), or a mapping from patterns "
                f"of names to these, but got {_shown(rule)}."
            )
        if rule < 1:
            raise PlanError(f"{where}: {rule} is no block: it holds 1 element or more.")


def check_module(call: str, given: Any) -> None:
    """Check that a module is one.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(given, nn.Module):
        raise TypeError(f"{call}: module: expected a torch.nn.Module, but got a value of type {type(given).__name__}.")


def _shown(value: Any) -> str:
    """Return a value as text where that is short, and else its type."""
    text = repr(value)
    return text if len(text) <= 40 and "\n" not in text else f"a value of type {type(value).__name__}"
