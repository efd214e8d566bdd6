"""`meshgrid`: each input may be sharded, and then its dim of every result is."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch.call import Call, Rule, Strategy
from .._dispatch.engine import keyed_handler
from .._dispatch.fallback import gather_fallback
from .._tensor import TABLE
from ..placements import R


def meshgrid_rule(call: Call) -> Rule | None:
    """`meshgrid([tensors], indexing)` of vectors and scalars; "xy" swaps the first two dims of the results."""
    num = len(call.specs)
    if any(s.ndim > 1 for s in call.specs):
        return None
    lengths = [s.numel for s in call.specs]
    places = list(range(num))
    if call.kwargs.get("indexing") == "xy" and num >= 2:
        places[:2] = [1, 0]
    shape = [0] * num
    for place, length in zip(places, lengths, strict=True):
        shape[place] = length
    strategies = [
        Strategy(tuple(0 if j == i else R for j in range(num)), (place,) * num)
        for i, place in enumerate(places)
        if call.specs[i].ndim
    ]
    return Rule([tuple(shape)] * num, strategies)


_meshgrid: Any = torch._C._VariableFunctions.meshgrid  # type: ignore[attr-defined]
_by_rule = keyed_handler(meshgrid_rule, gather_fallback)


def meshgrid(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.meshgrid(*tensors, indexing=...)`, with the tensors one by one or in one list."""
    tensors = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
    kwargs = {k: v for k, v in kwargs.items() if v is not None}
    return _by_rule(_meshgrid, (tuple(tensors),), kwargs)


TABLE[torch.functional.meshgrid] = TABLE[torch.meshgrid] = meshgrid
TABLE[_meshgrid] = _by_rule
