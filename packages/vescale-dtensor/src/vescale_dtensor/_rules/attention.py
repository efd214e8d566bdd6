"""`scaled_dot_product_attention`: batch, heads, query positions, or the width of the values sharded.

Grouped queries (`enable_gqa`) keep their key and value heads on the same rank where the head counts
divide evenly. Dropout on the attention weights takes the plain formula, operator by operator, so
that its mask comes from the random machinery.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dispatch.call import Call, LocalFunction, Rule, Shape, Strategy
from .._dispatch.engine import keyed_handler, tag
from .._dispatch.fallback import gather_fallback
from .._dispatch.table import register
from .._spec import Spec, replicated
from .._tensor import DTensor
from ..placements import P, R

_NAMES = "query key value attn_mask dropout_p is_causal scale enable_gqa"


def attention_rule(call: Call) -> Rule | None:
    """Strategies by the dims of the result ``(..., heads, queries, width)``."""
    bound = call.bind(_NAMES, dropout_p=0.0, is_causal=False, enable_gqa=False)
    has_mask = bound["attn_mask"] is not None
    names = _NAMES.split()
    order = [path[0] if isinstance(path[0], str) else names[path[0]] for path in call.paths]
    shapes = [s.shape for s in call.specs]
    if order != names[: 3 + has_mask] or any(len(s) < 2 for s in shapes):
        return None
    shape = _result_shape(shapes, bound["enable_gqa"])
    if shape is None:
        return None
    ndim = len(shape)
    queries, width = ndim - 2, ndim - 1

    def own(operand: int, dim: int) -> int:
        """Dim of an operand that stands for dim `dim` of the result, R where it is broadcast."""
        s = shapes[operand]
        at = dim - ndim + len(s)
        if at < 0:
            return R
        return at if s[at] == shape[dim] else R

    strategies = []
    for dim in range(ndim - 2):
        if bound["enable_gqa"] and dim == ndim - 3:
            strategies.append(_heads(shapes, dim, ndim, own, has_mask))
            continue
        ins = tuple(own(i, dim) for i in range(len(shapes)))
        strategies.append(Strategy(ins, (dim,)))
    rest = (own(3, queries),) if has_mask else ()
    strategies.append(Strategy((own(0, queries), R, R, *rest), (queries,)))
    rest = (R,) if has_mask else ()
    strategies.append(Strategy((R, R, len(shapes[2]) - 1, *rest), (width,)))
    strategies.append(Strategy((R, R, P, *rest), (P,), exact=True))

    def localize(ins: list[Spec], outs: list[Spec]) -> LocalFunction | None:
        if 0 in outs[0].local_shape:
            return _nothing(outs[0].local_shape)
        if not bound["is_causal"] or queries not in outs[0].sharded:
            return None
        return _causal_block(bound["enable_gqa"], bound["scale"], outs[0].local_offset[queries])

    return Rule([shape], strategies, localize)


def _heads(shapes: list[torch.Size], dim: int, ndim: int, own: Any, has_mask: bool) -> Strategy:
    """Query heads with the key and value heads of their groups."""
    at = [dim - ndim + len(s) for s in shapes]
    ins, even = [at[0]], [(0, at[0])]
    for i in (1, 2):
        if shapes[i][at[i]] == 1:
            ins.append(R)
        else:
            ins.append(at[i])
            even.append((i, at[i]))
    if has_mask:
        ins.append(own(3, dim))
    return Strategy(tuple(ins), (dim,), tuple(even))


def _result_shape(shapes: list[torch.Size], grouped: bool) -> Shape | None:
    q, k, v = shapes[:3]
    lead = [list(s[:-2]) for s in (q, k, v)]
    if grouped:
        if min(map(len, lead)) < 1:
            return None
        heads = lead[0][-1]
        if any(not part[-1] or heads % part[-1] for part in lead[1:]):
            return None
        for part in lead[1:]:
            part[-1] = heads
    try:
        batch = torch.broadcast_shapes(*lead)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None  # torch's own error, from whole tensors
    if q[-1] != k[-1] or k[-2] != v[-2]:
        return None
    return (*batch, q[-2], v[-1])


def _nothing(shape: Shape) -> LocalFunction:
    """Attention of a rank without elements: torch's own has no gradient for the mask."""

    def local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        operands = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()]
        return torch.stack([t.sum() for t in operands]).sum().expand(shape)

    return local


def _causal_block(grouped: bool, scale: float | None, offset: int) -> LocalFunction:
    """Causal attention of a block of query positions that starts at `offset`."""

    def local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        q, k, v = (args[i] if len(args) > i else kwargs[n] for i, n in enumerate(("query", "key", "value")))
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril(offset)
        result: Tensor = func(q, k, v, attn_mask=seen, scale=scale, enable_gqa=grouped)
        return result

    return local


_handler = keyed_handler(attention_rule, gather_fallback)


def attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`scaled_dot_product_attention`; without dropout by the rule, with it by the formula."""
    if len(args) == 3 and kwargs.keys() == {"is_causal"}:  # positions make a cheaper key than names
        return _handler(func, (*args, None, 0.0, kwargs["is_causal"]), {})
    dropout_p = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    if not dropout_p:
        return _handler(func, args, kwargs)
    bound: dict[str, Any] = dict(zip(_NAMES.split(), args, strict=False))
    bound.update(kwargs)
    return attention_formula(**bound)


def attention_formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What torch computes on a CPU where dropout is wanted: the weights are formed and dropped."""
    if is_causal and attn_mask is not None:
        raise RuntimeError("Explicit attn_mask should not be set when is_causal=True")
    scaling = math.sqrt(scale if scale is not None else 1.0 / math.sqrt(query.shape[-1]))
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = torch.matmul(query * scaling, key.transpose(-2, -1) * scaling)
    if is_causal:
        scores = scores + _causal(scores)
    elif attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=scores.dtype).masked_fill(attn_mask.logical_not(), -math.inf)
        scores = scores + attn_mask
        nothing = scores.eq(-math.inf).all(-1, keepdim=True)  # rows that may see nothing give zeros, not nan
        weights = F.softmax(scores.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)
        return torch.matmul(F.dropout(weights, dropout_p, True), value)
    return torch.matmul(F.dropout(F.softmax(scores, -1), dropout_p, True), value)


def _causal(scores: Tensor) -> DTensor:
    """What to add to scores so that no query sees a later key."""
    assert isinstance(scores, DTensor)
    shape = scores.shape[-2:]
    added = torch.full(shape, -math.inf, dtype=scores.dtype, device=scores.device).triu(1)
    return tag(added, replicated(scores._spec.mesh, shape))


register("scaled_dot_product_attention", attention)
