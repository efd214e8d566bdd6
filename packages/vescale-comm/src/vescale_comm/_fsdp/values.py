"""Tensors inside of what modules take and return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["cast", "hidden_tensors", "tensors_in"]

DEPTH = 6
"""Of nested values; objects of other classes than containers count twice."""
_LEAVES = (str, bytes, int, float, bool, type, type(None), nn.Module)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists, mappings, dataclasses and other objects, each object once.

    Example:
        >>> [t.item() for t in tensors_in({"a": (torch.tensor(1), [torch.tensor(2)]), "b": 3})]
        [1, 2]
    """
    return _search(value, DEPTH, set())


def _search(value: Any, depth: int, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    if depth <= 0 or isinstance(value, _LEAVES) or id(value) in seen:
        return
    seen.add(id(value))
    for inner, levels in _inside(value):
        yield from _search(inner, depth - levels, seen)


def _inside(value: Any) -> Iterator[tuple[Any, int]]:
    """Yield what an object holds, and by how many levels that is deeper."""
    if isinstance(value, Mapping):
        yield from ((inner, 1) for inner in value.values())
    elif isinstance(value, tuple | list | set | frozenset):
        yield from ((inner, 1) for inner in value)
    elif dataclasses.is_dataclass(value):
        yield from ((getattr(value, field.name, None), 1) for field in dataclasses.fields(value))
    elif hasattr(value, "__dict__") and not callable(value):
        yield from ((inner, 2) for inner in vars(value).values())


def hidden_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield results that a module left in its attributes, such as an auxiliary loss, each tensor once for good."""
    for value in list(module.__dict__.values()):
        if isinstance(value, Tensor) and value.grad_fn is not None and not hasattr(value, "_vescale_found"):
            value._vescale_found = True  # type: ignore[attr-defined]
            yield value


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return nested tuples, lists and dicts with their floating-point tensors converted."""

    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return _map(value, convert)


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(inner, function) for inner in value))
    if type(value) in (tuple, list):
        return type(value)(_map(inner, function) for inner in value)
    if type(value) is dict:
        return {key: _map(inner, function) for key, inner in value.items()}
    return value
