"""Entries: how to execute one kind of call on this rank, as a rule and the solver decide it once, at its first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._order import loses_order
from .._spec import Spec, spec_of
from ..placements import AxisTypes, I, P, R
from .call import Call, LocalFunction, Rewrite, Rule, Strategy
from .irregular import derived
from .solve import solve, unwanted

__all__ = ["Entry", "NoRule", "RuleFunction", "miss"]

RuleFunction = Callable[[Call], "Rule | None"]


class Entry:
    """How to execute one kind of call on this rank."""

    __slots__ = (
        "casts",
        "direct",
        "fast",
        "implicit",
        "inplace",
        "local",
        "moves",
        "name",
        "out",
        "outs",
        "plain",
        "reorder",
        "rewrite",
        "thin",
        "varying",
        "view",
    )

    name: str
    fast: bool
    "Call the function as it is and label its one result."
    out: Spec | None
    "Spec of the result where there is exactly one."
    outs: list[Spec]
    moves: list[tuple[tuple[Any, ...], AxisTypes, bool]]
    "(path, types, free without gradients) of the operands to move."
    local: LocalFunction | None
    rewrite: Rewrite | None
    direct: Rewrite | None
    "The rewrite where nothing else is to be done: run it, and label its one result."
    casts: tuple[tuple[int, AxisTypes], ...] | None
    "Positions and types of the operands to move, where that is all, and all are moved from I; most are cast already."
    inplace: bool
    plain: bool
    "Whether a plain tensor other than a scalar takes part."
    reorder: bool
    "Whether the result must be told the order in memory that this rank's part of an operand is too small to show."
    thin: bool
    "The same as `fast`, apart from `reorder`."
    varying: bool
    "Whether a result has type R, which without gradients must become I."
    implicit: list[tuple[Spec, AxisTypes]] | None
    view: bool
    "Whether the result should share memory with the first argument but cannot, because that moves."


class NoRule(Exception):
    """The rule has no answer for this call."""


def miss(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rule: RuleFunction,
    *,
    inplace: bool = False,
    elementwise: bool = False,
) -> Entry:
    """Make the entry for one kind of call."""
    call = Call(func, args, kwargs)
    if any(p and t.layout != torch.strided for p, t in zip(call.plain, call.operands, strict=True)):
        raise NoRule
    answer = rule(call)
    if answer is None:
        raise NoRule
    strategies = list(answer.strategies)
    num_in, num_out = len(call.specs), len(answer.shapes)
    if any(len(s.ins) != num_in for s in strategies):  # a number given as a tensor, say
        raise NoRule
    if answer.uniform and any(s.irregular for s in call.specs):
        strategies += derived(call, strategies, answer.shapes)
    if answer.replicated_ok:
        strategies += [Strategy((t,) * num_in, (t,) * num_out) for t in (I, R)]
    solution = solve(call, strategies, answer.shapes, keep_first=inplace)
    if solution is None:
        raise NoRule
    ins, outs = solution
    return _entry(call, answer, ins, outs, inplace, elementwise)


def _entry(
    call: Call, answer: Rule, ins: list[AxisTypes], outs: list[AxisTypes], inplace: bool, elementwise: bool
) -> Entry:
    mesh, e = call.mesh, Entry()
    e.name, e.inplace = call.name, inplace
    e.plain = any(p and t.numel() != 1 for p, t in zip(call.plain, call.operands, strict=True))
    in_specs = [s.with_types(t) for s, t in zip(call.specs, ins, strict=True)]
    e.outs = (
        [call.specs[0]] if inplace else [spec_of(mesh, shape, t) for shape, t in zip(answer.shapes, outs, strict=True)]
    )
    e.out = e.outs[0] if len(e.outs) == 1 else None
    e.varying = not inplace and any(R in t for t in outs)
    e.moves = [
        (path, t, all(a == b or (a == I and b == R) for a, b in zip(s.types, t, strict=True)))
        for path, s, t in zip(call.paths, call.specs, ins, strict=True)
        if s.types != t
    ]
    e.implicit = [(s, t) for s, t in zip(call.specs, ins, strict=True) if unwanted(mesh, s.types, t)] or None
    localized = answer.localize(in_specs, e.outs) if answer.localize is not None else None
    e.rewrite = localized if isinstance(localized, Rewrite) else None
    e.local = None if isinstance(localized, Rewrite) else localized
    e.view = answer.view and any(
        a != b and mesh.sizes[k] > 1 and not {a, b} <= {I, R}
        for k, (a, b) in enumerate(zip(call.specs[0].types, ins[0], strict=True))
    )
    e.reorder = elementwise and not inplace and e.out is not None and loses_order(e.out)
    nothing_else = not (e.moves or e.plain or inplace or e.varying) and e.out is not None
    alone = not (e.plain or inplace or e.implicit or e.view or e.reorder) and e.out is not None
    alone = alone and e.local is None and e.rewrite is None
    e.casts = _casts_in(call, ins) if alone and e.moves else None
    e.direct = e.rewrite if nothing_else and not e.reorder else None
    as_it_is = nothing_else and e.local is None and e.rewrite is None
    e.fast, e.thin = as_it_is and not e.reorder, as_it_is and e.reorder and e.name != "contiguous"
    return e


def _casts_in(call: Call, ins: list[AxisTypes]) -> tuple[tuple[int, AxisTypes], ...] | None:
    """The operands to move, if all stand by themselves among the arguments and nothing but I changes, to R or P."""
    found = []
    for path, spec, types in zip(call.paths, call.specs, ins, strict=True):
        if spec.types == types:
            continue
        changes = [(a, b) for a, b in zip(spec.types, types, strict=True) if a != b]
        if len(path) != 1 or path[0].__class__ is not int or any(a != I or b not in (R, P) for a, b in changes):
            return None
        found.append((path[0], types))
    return tuple(found)
