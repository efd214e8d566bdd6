"""Sums, means, products, truth values and counts.

Over a sharded dim a sum, a mean or a count is left as a pending sum. The others reduce locally and
then reduce the ranks' partial results: data never move, and results are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._dispatch.call import Call, Localized, Rewrite, Rule, Strategy
from .._dispatch.engine import out_variant
from .._dispatch.entry import NoRule, RuleFunction
from .._dispatch.table import register
from .._spec import Spec
from ..placements import I, P
from ._across import Across
from ._canonical import Reduced, hashable, renamed, rewrite, unary

Localize = Callable[[list[Spec], list[Spec]], Localized]


def reduction(
    red: Reduced, over: int, localize: Localize, *, pending: bool = False, num_outs: int = 1, placed: bool = False
) -> Rule:
    """Rule of a reduction.

    Args:
        red: shape and dims.
        over: type of the results along an axis that shards a reduced dim (P, or I after a collective).
        localize: see `Rule`.
        pending: the function is linear and keeps a pending sum pending.
        num_outs: number of results, all of the same shape.
        placed: the place of a block along a reduced dim matters, as for indices.
    """
    strategies = [
        Strategy((d,), (over if d in red.dims else red.place(d),) * num_outs, block=placed and d in red.dims)
        for d in range(red.ndim)
    ]
    if pending:
        strategies.append(Strategy((P,), (P,) * num_outs, exact=True))
    return Rule([red.out] * num_outs, strategies, localize, uniform=True)


def dim_keepdim(input: Tensor, dim: Any = None, keepdim: bool = False) -> tuple[Any, ...]:
    """Signature of `amax`, `any`, `logsumexp` and the like."""
    return input, hashable(dim), keepdim


def dim_keepdim_dtype(input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> tuple[Any, ...]:
    """Signature of `sum` and the like."""
    return input, hashable(dim), keepdim, dtype


# ------------------------------------------------------------------ linear: sum, mean, counts


def _sum_rule(function: Any, *, linear: bool) -> RuleFunction:
    def rule(call: Call) -> Rule:
        _, dim, keepdim, dtype = call.args
        red = Reduced(call.shape, dim, keepdim=keepdim)
        return reduction(red, P, lambda ins, outs: rewrite(function, *red.tail(), dtype=dtype), pending=linear)

    return rule


def mean_rule(call: Call) -> Rule:
    """`mean`: the local mean, weighted by this rank's part of the global count."""
    _, dim, keepdim, dtype = call.args
    red = Reduced(call.shape, dim, keepdim=keepdim)

    def localize(ins: list[Spec], outs: list[Spec]) -> Localized:
        function = rewrite(torch.mean, *red.tail(), dtype=dtype)
        if not red.axes(ins[0]):
            return function
        mine = Reduced(ins[0].local_shape, dim, keepdim=keepdim).count
        tail, weight = function.tail, mine / max(red.count, 1)
        if mine:
            mean = function.function
            return Rewrite(lambda x: mean(x, *tail).mul_(weight), ())
        if red.count == 0:
            return function
        total = rewrite(torch.sum, dtype=dtype).function
        return Rewrite(lambda x: total(x, *tail), ())

    return reduction(red, P, localize, pending=True)


def count_nonzero_rule(call: Call) -> Rule:
    """`count_nonzero`."""
    _, dim = call.args
    red = Reduced(call.shape, dim, keepdim=False)
    return reduction(red, P, lambda ins, outs: rewrite(torch.count_nonzero, *red.tail()[:1]))


def _count_nonzero(input: Tensor, dim: Any = None) -> tuple[Any, ...]:
    return input, hashable(dim)


def trace_rule(call: Call) -> Rule | None:
    """`trace`: each rank adds the part of the diagonal that runs through its block."""
    if call.ndim != 2:
        return None

    def localize(ins: list[Spec], outs: list[Spec]) -> Localized:
        if not ins[0].sharded:
            return Rewrite(torch.trace, ())
        offset = ins[0].local_offset[0] - ins[0].local_offset[1]
        rows, columns = ins[0].local_shape
        if not -rows < offset < columns:
            offset = columns  # the diagonal misses this block: an empty one stands for it
        return Rewrite(lambda x: x.diagonal(offset).sum(), ())

    return Rule([()], [Strategy((0,), (P,)), Strategy((1,), (P,)), Strategy((P,), (P,), exact=True)], localize)


def nanmean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`nanmean`: the sum over the global count, both over all ranks."""
    if kwargs.get("out") is not None:
        return out_variant(nanmean, func, args, kwargs)
    x, dim, keepdim, dtype = dim_keepdim_dtype(*args, **renamed(kwargs))
    total = torch.nansum(x, dim, keepdim, dtype=dtype)
    return total / torch.sum(torch.logical_not(torch.isnan(x)), dim, keepdim)


def sum_to_size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Tensor.sum_to_size(*size)`: the sum over all dims that are broadcast."""
    x, *size = args
    size = list(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    size = list(kwargs.get("size", size))
    shape = list(x.shape)
    lead = len(shape) - len(size)
    if lead < 0 or any(n not in (1, m) for n, m in zip(size, shape[lead:], strict=True)):
        raise RuntimeError(f"size {size} is not expandable to size {shape}")
    dims = [*range(lead), *(lead + d for d, n in enumerate(size) if n == 1 and shape[lead + d] != 1)]
    if not dims:
        return x.view(shape)
    kept = x.sum(dims, keepdim=True)
    return kept.squeeze(tuple(range(lead))) if lead else kept


# ------------------------------------------------------------------ truth values


def _truth_rule(function: Any, *, largest: bool) -> RuleFunction:
    def rule(call: Call) -> Rule:
        _, dim, keepdim = call.args
        red = Reduced(call.shape, dim, keepdim=keepdim, empty_is_all=False)

        def localize(ins: list[Spec], outs: list[Spec]) -> Localized:
            axes = red.axes(ins[0])
            if not axes:
                return rewrite(function, *red.tail())
            across, tail = Across(call.mesh, axes), red.tail()
            return Rewrite(lambda x: across.extreme(function(x, *tail), largest=largest), ())

        return reduction(red, I, localize)

    return rule


# ------------------------------------------------------------------ reductions of partial results


def twice(red: Reduced, first: Callable[[Any], Tensor], second: Callable[[Tensor], Tensor], whole: Rewrite) -> Localize:
    """Localize a function f with f(all) = second(first(part 0), first(part 1), ...).

    Args:
        red: shape and dims.
        first: reduction of the local part.
        second: reduction of the stacked partial results over dim 0.
        whole: what to run where the dims are whole.
    """

    def localize(ins: list[Spec], outs: list[Spec]) -> Localized:
        axes = red.axes(ins[0])
        if not axes:
            return whole
        across, out = Across(ins[0].mesh, axes), outs[0]
        return Rewrite(lambda x: second(across.gather(first(x), out)), ())

    return localize


def prod_rule(call: Call) -> Rule:
    """`prod`, of all or over one dim."""
    _, dim, keepdim, dtype = call.args
    if dim is not None and not isinstance(dim, int):
        raise NoRule
    red = Reduced(call.shape, dim, keepdim=keepdim)
    whole = rewrite(torch.prod, *(() if dim is None else (dim, keepdim)), dtype=dtype)
    function, tail = whole.function, whole.tail
    return reduction(red, I, twice(red, lambda x: function(x, *tail), lambda parts: parts.prod(0), whole))


def logsumexp_rule(call: Call) -> Rule:
    """`logsumexp`."""
    _, dim, keepdim = call.args
    if dim is None:
        raise NoRule
    red = Reduced(call.shape, dim, keepdim=keepdim, empty_is_all=False)
    whole = Rewrite(torch.logsumexp, (red.dims, keepdim))
    return reduction(
        red, I, twice(red, lambda x: torch.logsumexp(x, red.dims, keepdim), lambda parts: parts.logsumexp(0), whole)
    )


unary("sum", dim_keepdim_dtype, _sum_rule(torch.sum, linear=True))
unary("nansum", dim_keepdim_dtype, _sum_rule(torch.nansum, linear=False))
unary("mean", dim_keepdim_dtype, mean_rule)
unary("prod", dim_keepdim_dtype, prod_rule)
unary("any", dim_keepdim, _truth_rule(torch.any, largest=True))
unary("all", dim_keepdim, _truth_rule(torch.all, largest=False))
unary("logsumexp special.logsumexp", dim_keepdim, logsumexp_rule)
unary("count_nonzero", _count_nonzero, count_nonzero_rule)
unary("trace", lambda input: (input,), trace_rule)
register("nanmean", nanmean)
register("sum_to_size", sum_to_size)
