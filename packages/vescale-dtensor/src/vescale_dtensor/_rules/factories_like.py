"""Tensors made after the pattern of another: `zeros_like` keeps its shards, `new_zeros` is replicated.

A fresh tensor is nobody's pending sum: where the pattern is R or P the result is the same on every
rank, with a gradient that is the same too.
"""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch.call import Call, Rule, Strategy, function_name
from .._dispatch.engine import label_one
from .._dispatch.table import pointwise, register
from .._spec import replicated
from .._tensor import DTensor
from ..errors import UnsupportedOperationError
from ..placements import I, P, R

_run = torch._C._disabled_torch_function_impl


def like_rule(call: Call) -> Rule | None:
    """`zeros_like` and its kind."""
    if len(call.specs) != 1:
        return None
    strategies = [Strategy((d,), (d,)) for d in range(call.ndim)]
    strategies += [Strategy((t,), (I,)) for t in (I, R, P)]
    return Rule([tuple(call.shape)], strategies, replicated_ok=False, uniform=True)


def new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.new_zeros(size)` and its kind: the same on every rank."""
    x = args[0]
    if not isinstance(x, DTensor) or any(isinstance(v, DTensor) for v in (*args[1:], *kwargs.values())):
        raise UnsupportedOperationError(
            f"{function_name(func)} got a DTensor as data; use clone().detach(), or pass its full_tensor()"
        )
    r = _run(func, (), args, kwargs)
    return label_one(r, replicated(x._spec.mesh, r.shape))


pointwise("zeros_like ones_like full_like empty_like", like_rule, inplace=False)
register("new new_zeros new_ones new_full new_empty new_empty_strided new_tensor", new)
