"""Tensors that an object does not have yet: an optimizer has no state before its first step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .names import Path

__all__ = ["EXTRA", "group_sizes", "is_extra", "is_strict", "misses", "missing_like"]

EXTRA = "extra state"
"""Owner of what `get_extra_state` of a module returns: `set_extra_state` takes whatever was saved."""


def missing_like(obj: Any, path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """Allocate a tensor that the checkpoint has and the state_dict of an object lacks.

    Args:
        obj: the `Stateful` object.
        path: keys within its state_dict.
        shape: shape of the whole tensor in the checkpoint.
        dtype: dtype in the checkpoint.

    Returns:
        What `allocate_state(path, shape, dtype)` of the object makes, if it has that. For a state of a torch optimizer
        that has the shape of its parameter: a tensor like the parameter, with its device and placements. Else None: a
        plain tensor on the CPU will do.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2, 3))
        >>> optimizer = torch.optim.AdamW([weight])
        >>> missing_like(optimizer, ("state", 0, "exp_avg"), (2, 3), torch.float32).shape
        torch.Size([2, 3])
        >>> missing_like(optimizer, ("state", 0, "step"), (), torch.float32) is None
        True
    """
    allocate = getattr(obj, "allocate_state", None)
    if callable(allocate):
        made: Tensor | None = allocate(path, shape, dtype)
        return made
    if not isinstance(obj, torch.optim.Optimizer) or len(path) < 3 or path[0] != "state":
        return None
    for number, param in enumerate(_parameters(obj)):
        if number == path[1] and type(path[1]) is int:
            if tuple(param.shape) != tuple(shape):
                return None
            with torch.no_grad():
                return torch.empty_like(param, dtype=dtype, requires_grad=False).detach()
    return None


def is_strict(obj: Any) -> bool:
    """Tell whether an object takes exactly the keys that it has: a module; others take what they once gave."""
    return isinstance(obj, torch.nn.Module)


def is_extra(obj: Any, key: Any) -> bool:
    """Tell whether a key of the state_dict of an object holds what `get_extra_state` of a module returned.

    Example:
        >>> is_extra(torch.nn.Linear(1, 1), "layers.0._extra_state")
        True
    """
    return is_strict(obj) and isinstance(key, str) and key.rpartition(".")[2] == "_extra_state"


def group_sizes(obj: Any) -> list[int] | None:
    """Return how many parameters each group of an optimizer has; None for other objects.

    Example:
        >>> group_sizes(torch.optim.SGD(torch.nn.Linear(1, 1).parameters()))
        [2]
    """
    return [len(group["params"]) for group in obj.param_groups] if isinstance(obj, torch.optim.Optimizer) else None


def misses(obj: Any, is_tensor: bool) -> bool:
    """Tell whether it matters that the checkpoint lacks a leaf that the state_dict of an object has.

    The state of an optimizer is what the checkpoint says, no more, and so is the extra state of a module. Of other
    objects tensors are missed, since values come and go between versions and `load_state_dict` has its own mind about
    them.
    """
    if obj is EXTRA or isinstance(obj, torch.optim.Optimizer):
        return False
    return is_tensor or is_strict(obj)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the parameters in the order in which a state_dict counts them."""
    seen: set[int] = set()
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in seen:
                seen.add(id(param))
                yield param
