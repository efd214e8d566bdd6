"""Largest and smallest elements: `amax`, `max`, `argmax`, `aminmax` and their opposites.

Over a sharded dim each rank finds its own extreme value, a small all-reduce finds the global one,
and the gradient goes to the ranks that hold it: in equal parts to all ties where torch does so
(`amax`, full `max`), else to the first. Indices are global; the first of equal elements wins.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._comm.move import strip
from .._dispatch.call import Call, Localized, Rewrite, Rule
from .._dispatch.engine import Handler
from .._dispatch.entry import NoRule, RuleFunction
from .._dispatch.table import register
from .._spec import Spec
from .._tensor import TABLE
from ..placements import I
from ._across import Across, filled, identity_of
from ._canonical import Reduced, hashable, rewrite, unary
from .reductions import dim_keepdim, reduction

_FAR = torch.iinfo(torch.int64).max


def global_extreme(x: Tensor, red: Reduced, across: Across, empty: tuple[int, ...], *, largest: bool) -> Tensor:
    """Global extreme value; its gradient is shared equally among all elements that have it."""
    x = filled(strip(x), empty, identity_of(x.dtype, largest=largest))  # type: ignore[arg-type]
    own = (torch.amax if largest else torch.amin)(x, red.dims, red.keepdim)
    value = across.extreme(own, largest=largest)
    if not (own.requires_grad and torch.is_grad_enabled()):
        return value
    with torch.no_grad():
        shown = own
        if not red.keepdim:
            for d in sorted(red.dims):
                shown = shown.unsqueeze(d) if red.ndim else shown
        ties = (x == shown).sum(red.dims, keepdim=red.keepdim)
        mine = torch.where(own == value, ties, 0)
        weight = mine.to(own.dtype) / across.total(mine).to(own.dtype)
    return across.winner(own, value, weight)


def _first(x: Tensor, dim: int, keepdim: bool, across: Across, spec: Spec, *, largest: bool) -> tuple[Tensor, Tensor]:
    """Global extreme value along one dim and the index of its first occurrence."""
    empty = (dim,) if spec.local_shape[dim] == 0 else ()
    x = filled(strip(x), empty, identity_of(x.dtype, largest=largest))  # type: ignore[arg-type]
    own, index = (torch.max if largest else torch.min)(x, dim, keepdim)
    value = across.extreme(own, largest=largest)
    with torch.no_grad():
        candidate = torch.where((own == value) | (own != own), index + spec.local_offset[dim], _FAR)
        first = across.extreme(candidate, largest=False)
        wins = candidate == first
    if own.requires_grad and torch.is_grad_enabled():
        value = across.winner(own, value, wins)
    return value, first


def _flat_index(x: Tensor, spec: Spec, *, largest: bool, across: Across) -> Tensor:
    """Index of the first extreme element in the flattened global tensor."""
    empty = tuple(d for d, n in enumerate(spec.local_shape) if n == 0)
    x = filled(strip(x).detach(), empty, identity_of(x.dtype, largest=largest))  # type: ignore[arg-type]
    own, local = (torch.max if largest else torch.min)(x.reshape(-1), 0)
    value = across.extreme(own, largest=largest)
    index, step, rest = torch.zeros_like(local), 1, local
    for d in reversed(range(spec.ndim)):
        index = index + (rest % x.shape[d] + spec.local_offset[d]) * step
        rest = rest // x.shape[d]
        step *= spec.shape[d]
    return across.extreme(torch.where((own == value) | (own != own), index, _FAR), largest=False)


def _nonempty(red: Reduced) -> Reduced:
    if red.count == 0:
        raise NoRule  # torch's own error
    return red


def _empty_dims(red: Reduced, spec: Spec) -> tuple[int, ...]:
    return tuple(d for d in red.dims if red.ndim and spec.local_shape[d] == 0)


def _value_rule(function: Any, *, largest: bool) -> RuleFunction:
    """Rule of `amax`, `amin`."""

    def rule(call: Call) -> Rule:
        _, dim, keepdim = call.args
        red = _nonempty(Reduced(call.shape, dim, keepdim=keepdim))

        def localize(ins: list[Spec], outs: list[Spec]) -> Localized:
            axes = red.axes(ins[0])
            if not axes:
                return Rewrite(function, (red.dims, keepdim))
            across, empty = Across(call.mesh, axes), _empty_dims(red, ins[0])
            return Rewrite(lambda x: global_extreme(x, red, across, empty, largest=largest), ())

        return reduction(red, I, localize)

    return rule


def _full_rule(function: Any, *, largest: bool) -> RuleFunction:
    """Rule of `max(x)`, `min(x)`."""

    def rule(call: Call) -> Rule:
        red = _nonempty(Reduced(call.shape, None, keepdim=False))

        def localize(ins: list[Spec], outs: list[Spec]) -> Localized:
            axes = red.axes(ins[0])
            if not axes:
                return Rewrite(function, ())
            across, empty = Across(call.mesh, axes), _empty_dims(red, ins[0])
            return Rewrite(lambda x: global_extreme(x, red, across, empty, largest=largest), ())

        return reduction(red, I, localize)

    return rule


def _dim_rule(function: Any, kind: Any, *, largest: bool) -> RuleFunction:
    """Rule of `max(x, dim)`, `min(x, dim)`."""

    def rule(call: Call) -> Rule:
        _, dim, keepdim = call.args
        if not isinstance(dim, int):
            raise NoRule
        red = _nonempty(Reduced(call.shape, dim, keepdim=keepdim))
        (position,) = red.dims

        def localize(ins: list[Spec], outs: list[Spec]) -> Localized:
            axes = red.axes(ins[0])
            if not axes:
                return Rewrite(function, (dim, keepdim))
            across, spec = Across(call.mesh, axes), ins[0]
            return Rewrite(lambda x: kind(_first(x, position, keepdim, across, spec, largest=largest)), ())

        return reduction(red, I, localize, num_outs=2, placed=True)

    return rule


def _index_rule(function: Any, *, largest: bool) -> RuleFunction:
    """Rule of `argmax`, `argmin`."""

    def rule(call: Call) -> Rule:
        _, dim, keepdim = call.args
        if dim is not None and not isinstance(dim, int):
            raise NoRule
        red = _nonempty(Reduced(call.shape, dim, keepdim=keepdim))

        def localize(ins: list[Spec], outs: list[Spec]) -> Localized:
            axes = red.axes(ins[0])
            if not axes:
                return Rewrite(function, (dim, keepdim))
            across, spec = Across(call.mesh, axes), ins[0]
            if dim is None:
                shape = red.out
                return Rewrite(lambda x: _flat_index(x, spec, largest=largest, across=across).reshape(shape), ())
            return Rewrite(lambda x: _first(x.detach(), red.dims[0], keepdim, across, spec, largest=largest)[1], ())

        return reduction(red, I, localize, placed=True)

    return rule


def aminmax_rule(call: Call) -> Rule:
    """`aminmax`."""
    _, dim, keepdim = call.args
    red = _nonempty(Reduced(call.shape, dim, keepdim=keepdim))

    def localize(ins: list[Spec], outs: list[Spec]) -> Localized:
        axes = red.axes(ins[0])
        if not axes:
            return rewrite(torch.aminmax, dim=dim, keepdim=keepdim)
        across, empty = Across(call.mesh, axes), _empty_dims(red, ins[0])

        def both(x: Tensor) -> Any:
            low, high = (global_extreme(x, red, across, empty, largest=largest) for largest in (False, True))
            return torch.return_types.aminmax((low, high))

        return Rewrite(both, ())

    return reduction(red, I, localize, num_outs=2)


def _either(full: Handler, along: Handler, pair: Handler) -> Handler:
    """Handler of `max` and `min`, which are three functions in one."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) + len(kwargs) - ("out" in kwargs) == 1:
            return full(func, args, kwargs)
        if "other" in kwargs or (len(args) > 1 and isinstance(args[1], Tensor)):
            return pair(func, args, kwargs)
        return along(func, args, kwargs)

    return handler


def _register(name: str, arg: str, amount: str, pair: Any, kind: Any, *, largest: bool) -> None:
    function = getattr(torch, name)
    unary(amount, dim_keepdim, _value_rule(getattr(torch, amount), largest=largest))
    unary(arg, dim_keepdim, _index_rule(getattr(torch, arg), largest=largest))
    full = unary("", lambda input: (input,), _full_rule(function, largest=largest))
    along = unary("", _along, _dim_rule(function, kind, largest=largest))
    register(name, _either(full, along, TABLE[pair]))


def _along(input: Tensor, dim: Any, keepdim: bool = False) -> tuple[Any, ...]:
    return input, hashable(dim), keepdim


def _aminmax(input: Tensor, *, dim: Any = None, keepdim: bool = False) -> tuple[Any, ...]:
    return input, dim, keepdim


_register("max", "argmax", "amax", torch.maximum, torch.return_types.max, largest=True)
_register("min", "argmin", "amin", torch.minimum, torch.return_types.min, largest=False)
unary("aminmax", _aminmax, aminmax_rule)
