"""Tables of positions: the gradient of the table travels with those of other parameters, not that of its rows alone.

A model adds to its sharded data the rows of a table that every rank holds, at positions that are the same in every
call. The dynamic path casts the rows where they meet the data, so that their gradient is summed over ranks in a message
of its own, and then put where the rows came from. Where each row is taken once at most, the sum can be made after
that, element by element of the same numbers: then the table is cast, and its gradient goes in a bucket.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .._comm.move import move
from .._comm.plan import Plan
from .recorder import Op
from .values import Value, values_of

__all__ = ["cast_tables"]

MOST = 4
"""How many times as large as its rows a table may be, for nobody wants to send one that is hardly used."""


def cast_tables(
    ops: Sequence[Op],
    given: set[Value],
    results: Sequence[Value],
    constants: Mapping[Value, torch.Tensor],
    *,
    exact: bool,
) -> list[Op]:
    """Cast tables in place of their rows; returns the steps.

    Args:
        ops: the steps.
        given: parameters that the program is called with.
        results: what it returns.
        constants: results of steps that are the same in every call, by the value of their first object.
        exact: whether sums must have the bits of the dynamic path.
    """
    uses = Counter(v.first for op in ops for v in dict.fromkeys(values_of((op.args, op.kwargs))))
    uses.update(value.first for value in results)
    constants = dict(constants)
    for op in ops:
        if op.is_free and op.args[0].first in constants:
            constants[op.result.first] = constants[op.args[0].first]
    lookups = {
        op.result.first: op
        for op in ops
        if _is_lookup(op, given, constants) and uses[op.args[0].first] == uses[op.result.first] == 1
    }
    instead: dict[int, list[Op]] = {}
    for op in ops:
        lookup = lookups.get(op.args[0].first) if op.plan is not None else None
        types = None if lookup is None else _types(op, lookup, exact)
        if lookup is None or types is None:
            continue
        table = lookup.args[0].first
        token = Value()
        token.requires_grad = True  # and a leaf, unlike a cast of the dynamic path
        instead[id(lookup)] = [
            Op(move, (table, types), {"spec": table.given._spec}, token, True, False),
            Op(lookup.function, (token, *lookup.args[1:]), lookup.kwargs, op.result, True, False),
        ]
        instead[id(op)] = []
    return [new for op in ops for new in instead.get(id(op), [op])]


def _is_lookup(op: Op, given: set[Value], constants: Mapping[Value, torch.Tensor]) -> bool:
    """Whether a step takes each row of a parameter once at most."""
    if op.function is not torch.embedding or op.keeps or op.kwargs or not op.gradients:
        return False
    table, positions, _, *scaled_or_sparse = op.args
    if (
        not isinstance(table, Value)
        or table.first not in given
        or not isinstance(positions, Value)
        or any(scaled_or_sparse)
    ):
        return False
    found = constants.get(positions.first)
    return found is not None and _all_different(found)


def _all_different(positions: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        different: int = torch.unique(positions).numel()
        return different == positions.numel()


def _types(op: Op, lookup: Op, exact: bool) -> Any:
    """What to cast the table to in place of its rows; None: it would not be the same, or not be worth it."""
    steps: Plan | None = op.plan
    assert steps is not None
    table: Any = lookup.args[0].first.given
    if steps.kind != "cast" or not op.gradients or op.keeps or not op.result.requires_grad:
        return None
    spec, reducer = getattr(table, "_spec", None), steps.reducer
    assert reducer is not None
    if spec is None or spec.mesh is not steps.source.mesh or spec.irregular:
        return None
    with torch._C.DisableTorchFunction():
        num_bytes = math.prod(steps.source.local_shape) * table.element_size()
        if table.nbytes > MOST * num_bytes:
            return None
        ranked = reducer.is_ranked(num_bytes, table.device)
    if exact and not ranked:
        return None
    types = list(spec.types)
    for axis, (now, then) in enumerate(zip(steps.source.types, steps.target.types, strict=True)):
        if now == then:
            continue
        if types[axis] != now:
            return None
        types[axis] = then
    return tuple(types)
