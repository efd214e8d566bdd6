"""Embedding lookups: indices sharded, or the table by columns, or the table by rows (the vocabulary).

With the vocabulary sharded each rank looks up the indices that fall into its rows and leaves zeros
elsewhere: the result is a pending sum. An index outside the whole table stays outside every
shard, so that torch's own bounds check finds it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .._dispatch import engine
from .._dispatch.call import Call, LocalFunction, Rule, Strategy
from .._dispatch.engine import execute, keyed_handler
from .._dispatch.entry import NoRule, miss
from .._dispatch.fallback import gather_fallback
from .._dispatch.table import register, spellings
from .._spec import Spec
from .._tensor import TABLE, DTensor
from ..errors import UnsupportedOperationError
from ..placements import I, P, R

_run = torch._C._disabled_torch_function_impl
_NOTHING: dict[str, Any] = {}

_FUNCTIONAL = "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse"
_NATIVE = "weight indices padding_idx scale_grad_by_freq sparse"


def embedding_rule(call: Call) -> Rule | None:
    """`F.embedding(input, weight, ...)` and `torch.embedding(weight, indices, ...)`."""
    functional = call.func is F.embedding
    bound = call.bind(_FUNCTIONAL if functional else _NATIVE)
    index, weight = bound["input" if functional else "indices"], bound["weight"]
    if len(call.specs) != 2 or index is weight:
        return None
    i, w = call.operand_index(index), call.operand_index(weight)
    index_spec, weight_spec = call.specs[i], call.specs[w]
    if weight_spec.ndim != 2:
        return None  # torch's own error
    shape = (*index_spec.shape, weight_spec.shape[1])
    if bound["sparse"]:
        raise UnsupportedOperationError(
            "embedding(sparse=True) makes a sparse gradient, which cannot be reduced over the mesh; use sparse=False"
        )
    if bound.get("max_norm") is not None:
        return renormalized_rule(weight_spec, shape)

    def pair(of_index: int, of_weight: int) -> tuple[int, ...]:
        return (of_index, of_weight) if i < w else (of_weight, of_index)

    strategies = [Strategy(pair(R, 1), (len(shape) - 1,))]
    if not bound["scale_grad_by_freq"]:  # which counts an index over the whole batch
        strategies += [Strategy(pair(d, R), (d,)) for d in range(index_spec.ndim)]
        strategies.append(Strategy(pair(R, 0), (P,)))
    strategies.append(Strategy(pair(R, P), (P,), exact=True))

    def localize(ins: list[Spec], outs: list[Spec]) -> LocalFunction | None:
        if 0 not in ins[w].sharded:
            return None
        return _vocabulary_lookup(ins[w], functional, bound)

    return Rule([shape], strategies, localize)


def renormalized_rule(weight: Spec, shape: tuple[int, ...], name: str = "embedding") -> Rule:
    """`max_norm` rewrites the rows that are looked up: right where everyone has the table and all indices."""
    if any(t not in (I, R) for t in weight.types):
        raise UnsupportedOperationError(
            f"{name}(max_norm=...) renormalizes the table in place, which has no rule for a table laid out "
            f"as {weight!r}; "
            "redistribute the weight to Replicate(), or normalize its rows yourself"
        )
    return Rule([shape], [])


def _padding(padding: int | None, rows: int, functional: bool) -> int:
    """Row without a gradient, -1 for none; with torch's checks and meanings of negative numbers."""
    if padding is None:
        return -1
    if not functional:
        return padding
    if not -rows <= padding < max(rows, 1):
        raise AssertionError("Padding_idx must be within num_embeddings")
    return padding % rows if padding < 0 else padding


def _vocabulary_lookup(weight: Spec, functional: bool, bound: dict[str, Any]) -> LocalFunction:
    rows = weight.shape[0]
    start, count = weight.local_offset[0], weight.local_shape[0]
    stop = start + count
    padding = _padding(bound["padding_idx"], rows, functional)
    padding = padding - start if start <= padding < stop else -1
    names = (_FUNCTIONAL if functional else _NATIVE).split()
    index_at, weight_at = (0, 1) if functional else (1, 0)

    def local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index = args[index_at] if len(args) > index_at else kwargs[names[index_at]]
        table = args[weight_at] if len(args) > weight_at else kwargs[names[weight_at]]
        if not count:  # zeros that are connected to the table, so that every rank has a gradient
            return table.sum(0).expand(*index.shape, table.shape[1])
        elsewhere = ((index >= 0) & (index < start)) | ((index >= stop) & (index < rows))
        own = (index - start).masked_fill_(elsewhere, 0)
        return torch.embedding(table, own, padding).masked_fill(elsewhere.unsqueeze(-1), 0)

    return local


# ------------------------------------------------------------------ one_hot


def one_hot_rule(call: Call) -> Rule | None:
    """`one_hot(tensor, num_classes)` with a known number of classes."""
    num = call.arg(1, "num_classes", -1)
    if len(call.specs) != 1 or num <= 0:
        return None
    return Rule([(*call.shape, num)], [Strategy((d,), (d,)) for d in range(call.ndim)])


def one_hot(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Find the number of classes over all ranks where it is not given."""
    x = args[0] if args else kwargs["tensor"]
    num = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    if isinstance(x, DTensor) and num == -1 and x.numel():
        if int(x.min()) < 0:
            raise RuntimeError("Class values must be non-negative.")
        num = int(x.max()) + 1
    try:
        return execute(miss(func, (x, num), {}, one_hot_rule), func, (x, num), {})
    except NoRule:
        return gather_fallback(func, args, kwargs)


_by_rule = keyed_handler(embedding_rule, gather_fallback)
_find = _by_rule.cache.get  # type: ignore[attr-defined]


def embedding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`F.embedding`; the plain lookup becomes `torch.embedding`, whose arguments make a cheap key."""
    if len(args) != 2 or kwargs.get("max_norm") is not None or kwargs.get("scale_grad_by_freq") or kwargs.get("sparse"):
        return _by_rule(func, args, kwargs)
    index, weight = args
    padding = kwargs.get("padding_idx")
    padding = -1 if padding is None else _padding(padding, weight.shape[0], functional=True)
    if index.__class__ is DTensor and weight.__class__ is DTensor:
        e = _find((weight._spec, index._spec, padding, False, False))
        if e is not None and e.fast and not engine.checking:
            r = _run(torch.embedding, (), (weight, index, padding, False, False), _NOTHING)
            r.__class__ = DTensor
            r._spec = e.out
            return r
    return _by_rule(torch.embedding, (weight, index, padding, False, False), {})


for _function in spellings("embedding"):
    TABLE[_function] = _by_rule
TABLE[F.embedding] = embedding
register("one_hot", one_hot)
