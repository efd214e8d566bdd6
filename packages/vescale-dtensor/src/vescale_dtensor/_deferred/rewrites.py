"""Calls that torch would complete below the operators that are recorded, and so with values that get lost.

A number beside a tensor of the meta device becomes a tensor there, without a value. Each function gives the call
another form before that happens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .tape import is_deferred

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def _assignment(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """`x[index] = number`."""
    target, index, value = args
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=target.dtype, device=target.device)
    return func, (target, _index(index), value), kwargs


def _selection(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """`x[index]`."""
    return func, (args[0], _index(args[1])), kwargs


def _index(index: Any) -> Any:
    """An index with tensors in place of lists."""
    if isinstance(index, tuple):
        return tuple(torch.tensor(i) if isinstance(i, list) else i for i in index)
    return torch.tensor(index) if isinstance(index, list) else index


def _choice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """`where(condition, a, b)` with a number for either; a number does not decide the dtype beside a tensor."""
    names = ("input", "condition", "other") if hasattr(func, "__objclass__") else ("condition", "input", "other")
    bound = dict(zip(names, args, strict=False))
    bound.update({("input" if k == "self" else k): v for k, v in kwargs.items()})
    if len(bound) != 3:
        return func, args, kwargs
    condition, a, b = bound["condition"], bound["input"], bound["other"]
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return func, args, kwargs
    dtype = torch.result_type(a, b)
    numbers = [v if isinstance(v, Tensor) else torch.full((), v, dtype=dtype, device=condition.device) for v in (a, b)]
    return torch.where, (condition, *numbers), {}


def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """`x.new(sizes)` and `x.new(data)`."""
    x, *rest = args
    options = {"dtype": x.dtype, "device": x.device}
    if rest and isinstance(rest[0], list | tuple) and not isinstance(rest[0], torch.Size):
        return torch.tensor, (rest[0],), options
    return torch.empty, tuple(rest) or (0,), options


def _data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """`x.data = y` with a real tensor."""
    target, value = args
    if not is_deferred(value):
        value = value.detach().to("meta")  # which writes a copy down
    return func, (target, value), kwargs


_REWRITES: dict[str, Callable[[Any, tuple[Any, ...], dict[str, Any]], Call]] = {
    "__setitem__": _assignment,
    "__getitem__": _selection,
    "where": _choice,
    "new": _new,
    "data.__set__": _data,
}


def rewritten(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Give a call another form where it would lose a value; `name` is that of the function."""
    if name == "__set__":
        name = f"{getattr(getattr(func, '__self__', None), '__name__', '')}.__set__"
    rewrite = _REWRITES.get(name)
    return (func, args, kwargs) if rewrite is None else rewrite(func, args, kwargs)
