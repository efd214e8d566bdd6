"""Losses that treat every element, or every row, by itself: sharded as their inputs are.

A sum over sharded elements is a pending sum. A mean is the mean of the local part, scaled to its
share of all elements, so that narrow floating types do not overflow where one device would not.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dispatch.call import Call, LocalFunction, Rule, Shape, Strategy, normalize_dim
from .._dispatch.engine import Handler, keyed_handler
from .._dispatch.entry import RuleFunction
from .._dispatch.fallback import enter, gather_fallback
from .._dispatch.table import keyed
from .._spec import Spec
from .._tensor import TABLE
from ..placements import P, R
from .pointwise import broadcast, elementwise_strategies

_LEGACY = "size_average reduce reduction"
_ELEMENTWISE: dict[Any, str] = {
    F.mse_loss: f"input target {_LEGACY} weight",
    F.l1_loss: f"input target {_LEGACY} weight",
    F.smooth_l1_loss: f"input target {_LEGACY} beta",
    F.huber_loss: "input target reduction delta weight",
    F.soft_margin_loss: f"input target {_LEGACY}",
    F.binary_cross_entropy: f"input target weight {_LEGACY}",
    F.binary_cross_entropy_with_logits: f"input target weight {_LEGACY} pos_weight",
    F.kl_div: f"input target {_LEGACY} log_target",
    F.poisson_nll_loss: "input target log_input full size_average eps reduce reduction",
    F.margin_ranking_loss: f"input1 input2 target margin {_LEGACY}",
    F.hinge_embedding_loss: f"input target margin {_LEGACY}",
    torch._C._nn.mse_loss: "self target reduction",
    torch._C._nn.l1_loss: "self target reduction",
    torch._C._nn.smooth_l1_loss: "self target reduction beta",
    torch._C._nn.huber_loss: "self target reduction delta",
    torch._C._nn.soft_margin_loss: "self target reduction",
    torch._C._nn.binary_cross_entropy: "self target weight reduction",
    torch.binary_cross_entropy_with_logits: "input target weight pos_weight reduction",
    torch.kl_div: "input target reduction log_target",
    torch.poisson_nll_loss: "input target log_input full eps reduction",
    torch.margin_ranking_loss: "input1 input2 target margin reduction",
    torch.hinge_embedding_loss: "input target margin reduction",
}
_ROWWISE: dict[Any, str] = {
    F.cosine_embedding_loss: f"input1 input2 target margin {_LEGACY}",
    F.triplet_margin_loss: f"anchor positive negative margin p eps swap {_LEGACY}",
    F.multi_margin_loss: f"input target p margin weight {_LEGACY}",
    F.multilabel_margin_loss: f"input target {_LEGACY}",
    torch.cosine_embedding_loss: "input1 input2 target margin reduction",
    torch.triplet_margin_loss: "anchor positive negative margin p eps swap reduction",
    torch._C._nn.multi_margin_loss: "self target p margin weight reduction",
    torch._C._nn.multilabel_margin_loss: "self target reduction",
}
_WEIGHTED_MEAN = (F.mse_loss, F.l1_loss, F.huber_loss)
_BY_NUMBER = {0: "none", 1: "mean", 2: "sum"}


def _reduction(bound: dict[str, Any]) -> str | None:
    """Name of the reduction, None where it is given in a way that is left to torch."""
    if bound.get("size_average") is not None or bound.get("reduce") is not None:
        return None
    given = bound.get("reduction")
    given = "mean" if given is None else _BY_NUMBER.get(given, given) if isinstance(given, int) else given
    return given if given in ("none", "mean", "sum", "batchmean") else None


def _with_sum(
    names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with another reduction."""
    at = names.index("reduction")
    if len(args) > at:
        return (*args[:at], value, *args[at + 1 :]), kwargs
    return args, {**kwargs, "reduction": value}


def _reducing(
    names: list[str], reduction: str, total: int, rows: int, count: Callable[[list[Spec]], int]
) -> Callable[[list[Spec], list[Spec]], LocalFunction | None]:
    """Localizer of a mean over `total` items, of which a rank with operands of `specs` holds `count(specs)`."""

    def localize(ins: list[Spec], outs: list[Spec]) -> LocalFunction | None:
        if reduction in ("none", "sum") or not any(s.sharded for s in ins):
            return None
        own = count(ins)

        def local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
            if reduction == "mean" and own:
                mean: Tensor = func(*args, **kwargs)
                return mean * (own / total)
            args, kwargs = _with_sum(names, args, kwargs, "sum" if isinstance(func, types.FunctionType) else 2)
            summed: Tensor = func(*args, **kwargs)
            return summed / (total if reduction == "mean" else rows) if total else summed * math.nan

        return local

    return localize


def _local_elements(specs: list[Spec]) -> int:
    return math.prod(broadcast([s.local_shape for s in specs]))


def _local_rows(specs: list[Spec]) -> int:
    return specs[0].local_shape[0]


def elementwise_loss(names: str) -> RuleFunction:
    """Rule of a loss whose tensor arguments broadcast against each other."""
    order = names.split()

    def rule(call: Call) -> Rule | None:
        bound = call.bind(names)
        reduction = _reduction(bound)
        if reduction is None or (call.func in _WEIGHTED_MEAN and bound.get("weight") is not None):
            return None
        shapes = [s.shape for s in call.specs]
        out = broadcast(shapes)
        strategies = elementwise_strategies(shapes, out)
        if reduction == "none":
            return Rule([out], strategies, uniform=True)
        strategies = [Strategy(s.ins, (P,)) for s in strategies]
        first = shapes[0]
        total, rows = math.prod(out), first[0] if first else 1
        return Rule([()], strategies, _reducing(order, reduction, total, rows, _local_elements), uniform=True)

    return rule


def rowwise_loss(names: str) -> RuleFunction:
    """Rule of a loss of rows ``(N, D)``: sharded along the rows."""
    order = names.split()

    def rule(call: Call) -> Rule | None:
        reduction = _reduction(call.bind(names))
        if reduction is None or call.ndim != 2:
            return None
        rows = call.shape[0]
        weight = call.bind(names).get("weight")
        operands = zip(call.operands, call.specs, strict=True)
        ins = tuple(R if t is weight else 0 if s.ndim and s.shape[0] == rows else None for t, s in operands)
        if None in ins:
            return None  # rows that are broadcast
        shape: Shape = (rows,) if reduction == "none" else ()
        strategies = [Strategy(ins, (0 if reduction == "none" else P,))]  # type: ignore[arg-type]
        return Rule([shape], strategies, _reducing(order, reduction, rows, rows, _local_rows))

    return rule


def similarity_rule(call: Call) -> Rule | None:
    """`cosine_similarity(x1, x2, dim)`: everything but `dim` may be sharded."""
    if len(call.specs) != 2:
        return None
    out = broadcast([s.shape for s in call.specs])
    return _without(call, out, normalize_dim(call.arg(2, "dim", 1), len(out)), keep=False)


def distance_rule(call: Call) -> Rule | None:
    """`pairwise_distance(x1, x2, p, eps, keepdim)`: everything but the last dim may be sharded."""
    if len(call.specs) != 2:
        return None
    out = broadcast([s.shape for s in call.specs])
    return _without(call, out, len(out) - 1, keep=bool(call.arg(4, "keepdim", False))) if out else None


def _without(call: Call, out: Shape, dim: int, *, keep: bool) -> Rule:
    strategies = [
        Strategy(s.ins, (d if d < dim or keep else d - 1,))
        for d, s in enumerate(elementwise_strategies([s.shape for s in call.specs], out))
        if d != dim
    ]
    return Rule([(*out[:dim], *((1,) if keep else ()), *out[dim + 1 :])], strategies)


def _fallback(func: Any) -> Handler:
    """A Python function is entered, so that what it calls is distributed; a C++ one runs whole."""
    if not isinstance(func, types.FunctionType):
        return gather_fallback
    inside = enter(func)
    return lambda _, args, kwargs: inside(*args, **kwargs)


for _table, _make in ((_ELEMENTWISE, elementwise_loss), (_ROWWISE, rowwise_loss)):
    for _function, _names in _table.items():
        TABLE[_function] = keyed_handler(_make(_names), _fallback(_function))
keyed("cosine_similarity", similarity_rule, inplace=False)
keyed("pairwise_distance", distance_rule, inplace=False)
