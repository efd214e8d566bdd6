"""The table from torch functions to handlers, and the many spellings of one function.

`torch.add`, `Tensor.add`, `Tensor.__add__`, `Tensor.add_` and `torch.ops.aten.add.Tensor` are one
operator; a family names it once and every spelling gets the handler.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._tensor import TABLE
from .engine import Handler, keyed_handler, pointwise_handler
from .entry import RuleFunction
from .fallback import enter, gather_fallback, inplace_fallback

_NAMESPACES: tuple[Any, ...] = (torch, torch._C._VariableFunctions, Tensor, F, torch._C._nn, torch.functional)


_SPACES: dict[str, Any] = {
    "nn.functional": F, "Tensor": Tensor, "torch": torch, "_nn": torch._C._nn, "aten": torch.ops.aten,
}  # fmt: skip
"""Names of namespaces in tables; others are modules of torch."""


def spellings(name: str) -> list[Any]:
    """All distinct torch callables called `name`; `linalg.x` names one namespace, `get:x` an attribute."""
    if name.startswith("get:"):  # an attribute of tensors, read
        attribute = getattr(Tensor, name[4:], None)
        return [attribute.__get__] if attribute is not None and hasattr(attribute, "__get__") else []
    if "." in name:
        space, _, name = name.rpartition(".")
        owner = _SPACES.get(space) or getattr(torch, space)
        return [getattr(owner, name)] if hasattr(owner, name) else []
    found: list[Any] = []
    for namespace in _NAMESPACES:
        candidate = getattr(namespace, name, None)
        if callable(candidate) and not any(candidate is f for f in found):
            found.append(candidate)
    return found


def register(names: str, handler: Handler) -> None:
    """Give every spelling of the space-separated `names` a handler."""
    for name in names.split():
        for func in spellings(name):
            TABLE[func] = handler


def pointwise(names: str, rule: RuleFunction, *, inplace: bool = True) -> None:
    """Register functions whose strategy depends on specs alone, with their `name_` forms."""
    _family(names, rule, pointwise_handler, inplace)


def keyed(names: str, rule: RuleFunction, *, inplace: bool = True) -> None:
    """Register functions whose strategy depends on all arguments, with their `name_` forms."""
    _family(names, rule, keyed_handler, inplace)


def _family(names: str, rule: RuleFunction, make: Any, inplace: bool) -> None:
    """Every function gets a handler, and so a cache, of its own: its keys need not name it."""
    for name in names.split():
        if name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__"):
            _each(name, make, rule, inplace=True)
            continue
        _each(name, make, rule, inplace=False)
        if inplace and "." not in name and not name.startswith(("__", "get:")):
            _each(f"{name}_", make, rule, inplace=True)


def _each(name: str, make: Any, rule: RuleFunction, *, inplace: bool) -> None:
    for func in spellings(name):
        handler = make(rule, inplace_fallback if inplace else gather_fallback, inplace=inplace)
        TABLE[func] = _told_inplace(func, handler) if isinstance(func, FunctionType) else handler


def _told_inplace(func: FunctionType, handler: Any) -> Handler:
    """Let `F.relu(x, inplace=True)` and the like, which are Python functions, do what they stand for: `relu_(x)`."""
    names = func.__code__.co_varnames[: func.__code__.co_argcount]
    if "inplace" not in names:
        return handler  # type: ignore[no-any-return]
    position, in_place = names.index("inplace"), enter(func)

    def told(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args[position] if len(args) > position else kwargs.get("inplace"):
            return in_place(*args, **kwargs)
        return handler(func, args, kwargs)

    told.cache = handler.cache  # type: ignore[attr-defined]
    return told


def lookup(func: Any) -> Handler:
    """Return the handler of a function, resolving it on first use."""
    handler = TABLE.get(func)
    if handler is None:
        from .resolve import resolve

        handler = TABLE[func] = resolve(func)
    return handler
