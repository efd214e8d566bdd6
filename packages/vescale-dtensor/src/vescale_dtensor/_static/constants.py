"""Whether two records mean the same where their texts are: the objects that the texts name."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

__all__ = ["differs"]


def differs(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    """Name what stands for different objects in the variables of two programs; None: nothing.

    Args:
        one: variables of the first program.
        other: of the second, whose text is the same.
    """
    for name, value in one.items():
        if name != "__builtins__" and not _same(value, other[name]):
            return name
    return None


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, types.MethodType):
        return a.__func__ is b.__func__ and _same(a.__self__, b.__self__)
    if isinstance(a, float | complex):
        return repr(a) == repr(b)  # nan
    if type(a).__module__.partition(".")[0] == "vescale_dtensor":  # ours have all that counts in the text
        return True
    by_value = getattr(type(a), "__hash__", None) not in (None, object.__hash__)
    return by_value and repr(a) == repr(b) and bool(a == b)
