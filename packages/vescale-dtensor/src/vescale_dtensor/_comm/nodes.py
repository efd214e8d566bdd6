"""Autograd nodes of this package, entered without what `torch.autograd.Function.apply` does for functions of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["applied"]

_transformed = torch._C._are_functorch_transforms_active


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `function.apply` for plain tensors.

    `Function.apply` looks at each argument in Python, for those of functorch and for DTensors, and that takes as long
    as the rest of a node with many small tensors.

    Args:
        function: with a `forward` that takes plain local tensors.
    """
    slow = function.apply
    quick = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def apply(*args: Any) -> Any:
        return slow(*args) if _transformed() else quick(*args)  # type: ignore[no-untyped-call]

    return apply
