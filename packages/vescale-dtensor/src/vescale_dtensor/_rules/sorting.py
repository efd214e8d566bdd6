"""Sorting, selection and scans: functions that need a whole dim, whose other dims may be sharded.

Also their neighbours: `searchsorted` and `bucketize` (values may be sharded), `histc` (counts of
parts add up), and `cumsum`, which is linear, so that over a sharded dim each rank only needs the
totals of the ranks before it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._comm.move import move_local, strip
from .._dispatch.call import Call, Localized, Rewrite, Rule, Shape, Strategy, normalize_dim
from .._dispatch.entry import NoRule, RuleFunction
from .._dispatch.table import keyed
from .._spec import Spec, spec_of
from ..placements import P, R
from ._across import filled, on_empty_shard
from ._canonical import Reduced, rewrite, unary


def whole_dim(ndim: int, dim: int | None, num_outs: int = 1) -> list[Strategy]:
    """Strategies of a function that keeps the dims of its operand and needs `dim` whole (None: all of them)."""
    if dim is None:
        return []
    return [Strategy((d,), (d,) * num_outs) for d in range(ndim) if d != dim]


def _selected(call: Call, dim: Any, keepdim: bool, num_outs: int) -> Rule:
    """Rule of a function that selects one element along `dim`, which it needs whole."""
    red = Reduced(call.shape, dim, keepdim=keepdim)
    strategies = [Strategy((d,), (red.place(d),) * num_outs) for d in red.kept]
    return Rule([red.out] * num_outs, strategies, None)


# ------------------------------------------------------------------ sort, topk, selection


def _sort(input: Tensor, dim: int = -1, descending: bool = False, *, stable: Any = None) -> tuple[Any, ...]:
    if dim.__class__ is not int:
        raise TypeError
    return input, dim, descending, stable


def _same_shape_rule(function: Any, num_outs: int) -> RuleFunction:
    """Rule of `sort`, `argsort`."""

    def rule(call: Call) -> Rule:
        _, dim, descending, stable = call.args
        strategies = whole_dim(call.ndim, normalize_dim(dim, call.ndim), num_outs)
        run = rewrite(function, dim=dim, descending=descending, stable=stable)
        return Rule([tuple(call.shape)] * num_outs, strategies, lambda ins, outs: run)

    return rule


def msort_rule(call: Call) -> Rule:
    """`msort`: sorts dim 0."""
    return Rule([tuple(call.shape)], whole_dim(call.ndim, 0), lambda ins, outs: Rewrite(torch.msort, ()))


def _topk(
    input: Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
) -> tuple[Any, ...]:
    return input, k, dim, largest, sorted


def topk_rule(call: Call) -> Rule:
    """`topk`."""
    _, k, dim, *flags = call.args
    if not isinstance(k, int):
        raise NoRule
    position = normalize_dim(dim, call.ndim)
    shape = list(call.shape)
    if shape:
        if not 0 <= k <= shape[position]:
            raise NoRule  # torch's own error
        shape[position] = k
    run = Rewrite(torch.topk, (k, dim, *flags))
    return Rule([tuple(shape)] * 2, whole_dim(call.ndim, position, 2), lambda ins, outs: run)


def _selection(input: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Any, ...]:
    return input, dim, keepdim


def _kth(input: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Any, ...]:
    return input, k, dim, keepdim


def kthvalue_rule(call: Call) -> Rule:
    """`kthvalue`."""
    _, k, dim, keepdim = call.args
    rule = _selected(call, dim, keepdim, 2)
    rule.localize = lambda ins, outs: Rewrite(torch.kthvalue, (k, dim, keepdim))
    return rule


def _median(input: Tensor, dim: Any = None, keepdim: bool = False) -> tuple[Any, ...]:
    return input, dim, keepdim


def _median_rule(function: Any) -> RuleFunction:
    """Rule of `median`, `nanmedian`: over all elements, or over a dim with indices."""

    def rule(call: Call) -> Rule:
        _, dim, keepdim = call.args
        if dim is None:
            return Rule([()], [], lambda ins, outs: Rewrite(function, ()))
        answer = _selected(call, dim, keepdim, 2)
        answer.localize = lambda ins, outs: Rewrite(function, (dim, keepdim))
        return answer

    return rule


def mode_rule(call: Call) -> Rule:
    """`mode`."""
    _, dim, keepdim = call.args
    rule = _selected(call, dim, keepdim, 2)
    rule.localize = lambda ins, outs: Rewrite(torch.mode, (dim, keepdim))
    return rule


def quantile_rule(call: Call) -> Rule | None:
    """`quantile`, `nanquantile`: the quantiles come first in the result."""
    bound = call.bind("input q dim keepdim interpolation", keepdim=False)
    q, dim = bound["q"], bound["dim"]
    if not call.args or call.operands[0] is not bound["input"] or bound["keepdim"].__class__ is not bool:
        return None
    red = Reduced(call.shape, dim, keepdim=bound["keepdim"])
    q_ndim, many = 0, []
    if isinstance(q, Tensor):
        q_ndim, many = call.specs[1].ndim, [R]
    lead: Shape = tuple(call.specs[1].shape) if many else ()
    strategies = [Strategy((d, *many), (red.place(d) + q_ndim,)) for d in red.kept]

    def localize(ins: list[Spec], outs: list[Spec]) -> Localized:
        return lambda func, args, kwargs: on_empty_shard(func, ins[0], outs)(*args, **kwargs)

    return Rule([(*lead, *red.out)], strategies, localize)


# ------------------------------------------------------------------ lookup and counting


def searchsorted_rule(call: Call) -> Rule | None:
    """`searchsorted(sorted, values)`: one sequence for all values, or one per row."""
    bound = call.bind("sorted_sequence input")
    values = bound["input"] if isinstance(bound["input"], Tensor) else bound.get("self")
    if len(call.specs) != 2 or values is not call.operands[1]:
        return None
    sequence, looked_up = call.specs
    last = looked_up.ndim - 1
    if sequence.ndim == 1:
        strategies = [Strategy((R, d), (d,)) for d in range(looked_up.ndim)]
    else:
        strategies = [Strategy((d, d), (d,)) for d in range(last)] + [Strategy((R, last), (last,))]
    return Rule([tuple(looked_up.shape)], strategies)


def bucketize_rule(call: Call) -> Rule | None:
    """`bucketize(input, boundaries)`."""
    if len(call.specs) != 2:
        return None
    strategies = [Strategy((d, R), (d,)) for d in range(call.ndim)]
    return Rule([tuple(call.shape)], strategies)


def _histc(input: Tensor, bins: int = 100, min: Any = 0, max: Any = 0) -> tuple[Any, ...]:
    return input, bins, min, max


def histc_rule(call: Call) -> Rule:
    """`histc`: counts of parts add up, once the range is given and does not come from the data."""
    _, bins, low, high = call.args
    if not isinstance(bins, int):
        raise NoRule
    strategies = [Strategy((d,), (P,)) for d in range(call.ndim)] if low < high else []
    return Rule([(bins,)], strategies, lambda ins, outs: Rewrite(torch.histc, (bins, low, high)))


# ------------------------------------------------------------------ scans


def _scan(input: Tensor, dim: int, *, dtype: Any = None) -> tuple[Any, ...]:
    if dim.__class__ is not int:
        raise TypeError
    return input, dim, dtype


def cumsum_rule(call: Call) -> Rule:
    """`cumsum`: linear; a rank needs the totals of the ranks before it along a sharded dim."""
    _, dim, dtype = call.args
    position = normalize_dim(dim, call.ndim)
    run = rewrite(torch.cumsum, dim, dtype=dtype)

    def localize(ins: list[Spec], outs: list[Spec]) -> Localized:
        spec = ins[0]
        axes = tuple(a for a, t in enumerate(spec.types) if t == position and call.mesh.sizes[a] > 1)
        if not axes:
            return run
        members = call.mesh.members(axes)
        before, lifted = (
            members.index(call.mesh.coordinate),
            tuple(0 if a in axes else t + 1 if t >= 0 else t for a, t in enumerate(spec.types)),
        )
        shape = list(spec.shape)
        shape[position] = 1
        totals = spec_of(call.mesh, (len(members), *shape), lifted)
        gathered = tuple(R if a in axes else t for a, t in enumerate(lifted))

        def local(x: Any) -> Tensor:
            sums = run.function(strip(x), dim)
            total = filled(sums, (position,), 0).narrow(position, max(sums.shape[position] - 1, 0), 1)
            parts = move_local(total.unsqueeze(0), totals, gathered)
            return sums + parts[:before].sum(0)  # type: ignore[no-any-return]

        return Rewrite(local, ())

    strategies = [Strategy((d,), (d,)) for d in range(call.ndim)] + [Strategy((P,), (P,), exact=True)]
    return Rule([tuple(call.shape)], strategies, localize)


def _scan_rule(function: Any, num_outs: int = 1) -> RuleFunction:
    """Rule of `cumprod`, `cummax`, `cummin`, `logcumsumexp`."""

    def rule(call: Call) -> Rule:
        _, dim, dtype = call.args
        run = rewrite(function, dim, dtype=dtype)
        strategies = whole_dim(call.ndim, normalize_dim(dim, call.ndim), num_outs)

        def localize(ins: list[Spec], outs: list[Spec]) -> Localized:
            return Rewrite(on_empty_shard(run.function, ins[0], outs), run.tail)

        return Rule([tuple(call.shape)] * num_outs, strategies, localize)

    return rule


def diff_rule(call: Call) -> Rule | None:
    """`diff`: linear; what is put before and after is sharded alike."""
    bound = call.bind("input n dim prepend append", n=1, dim=-1)
    position = normalize_dim(bound["dim"], call.ndim)
    n = bound["n"]
    if call.ndim == 0 or not isinstance(n, int) or call.operands[0] is not bound["input"]:
        return None
    shape = list(call.shape)
    others = [d for d in range(call.ndim) if d != position]
    for extra in call.specs[1:]:
        if extra.ndim != call.ndim or any(extra.shape[d] != shape[d] for d in others):
            return None
    length = sum(s.shape[position] for s in call.specs)
    shape[position] = max(length - n, 0) if n else call.shape[position]
    if n == 0:
        return None
    operands = len(call.specs)
    strategies = [Strategy((d,) * operands, (d,)) for d in others]
    strategies.append(Strategy((P,) * operands, (P,), exact=True))
    return Rule([tuple(shape)], strategies)


unary("sort", _sort, _same_shape_rule(torch.sort, 2))
unary("argsort", _sort, _same_shape_rule(torch.argsort, 1))
unary("msort", lambda input: (input,), msort_rule)
unary("topk", _topk, topk_rule)
unary("kthvalue", _kth, kthvalue_rule)
unary("median", _median, _median_rule(torch.median))
unary("nanmedian", _median, _median_rule(torch.nanmedian))
unary("mode", _selection, mode_rule)
keyed("quantile nanquantile", quantile_rule, inplace=False)
keyed("searchsorted", searchsorted_rule, inplace=False)
keyed("bucketize", bucketize_rule, inplace=False)
unary("histc", _histc, histc_rule)
unary("cumsum", _scan, cumsum_rule)
unary("cumprod", _scan, _scan_rule(torch.cumprod))
unary("cummax", _scan, _scan_rule(torch.cummax, 2))
unary("cummin", _scan, _scan_rule(torch.cummin, 2))
unary("logcumsumexp", _scan, _scan_rule(torch.logcumsumexp))
keyed("diff", diff_rule, inplace=False)

__all__ = ["whole_dim"]
