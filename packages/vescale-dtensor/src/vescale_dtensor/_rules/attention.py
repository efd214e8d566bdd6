"""`scaled_dot_product_attention`: batch, heads, positions, or the width of the values sharded.

Where queries, keys and values are sharded along the sequence, keys and values go round (`_ring`).
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
from .._mesh import Axes
from .._spec import Spec, replicated
from .._tap import alias
from .._tensor import DTensor
from ..placements import P, R
from ._ring import Deal, Ring, RingAttention, dealt

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
            strategies += _heads(shapes, dim, ndim, own, has_mask)
            continue
        ins = tuple(own(i, dim) for i in range(len(shapes)))
        strategies.append(Strategy(ins, (dim,)))
    rest = (own(3, queries),) if has_mask else ()
    strategies.append(Strategy((own(0, queries), R, R, *rest), (queries,)))
    if _same_batch(shapes, bound["enable_gqa"]) and shapes[1][-2]:
        at = len(shapes[1]) - 2  # only where keys and values lie so: what goes round costs, though no operand moves
        lie = [spec.types for spec in call.specs[1:3]]
        cut = Strategy((queries, at, at, *rest), (queries,), when=lambda a, _: all(t[a] == at for t in lie))
        strategies.append(cut)
    rest = (R,) if has_mask else ()
    strategies.append(Strategy((R, R, len(shapes[2]) - 1, *rest), (width,)))
    strategies.append(Strategy((R, R, P, *rest), (P,), exact=True))

    def localize(ins: list[Spec], outs: list[Spec]) -> LocalFunction | None:
        axes = _cut(ins[1], len(shapes[1]) - 2)
        if any(not n and not (d == queries and axes) for d, n in enumerate(outs[0].local_shape)):
            return _nothing(outs[0].local_shape)
        picked = _picked_heads(ins) if bound["enable_gqa"] else None
        grouped, block = bound["enable_gqa"] and picked is None, None
        if axes:
            block = _ring(ins, axes, bound, grouped=grouped)
        elif bound["is_causal"] and queries in outs[0].sharded:
            block = _causal_block(grouped, bound["scale"], outs[0].local_offset[queries])
        return block if picked is None else _of_own_groups(picked, block)

    return Rule([shape], strategies, localize)


def _heads(shapes: list[torch.Size], dim: int, ndim: int, own: Any, has_mask: bool) -> list[Strategy]:
    """Query heads with the key and value heads of their groups, or with all of these where they do not divide."""
    at = [dim - ndim + len(s) for s in shapes]
    ins, even = [at[0]], [(0, at[0])]
    for i in (1, 2):
        if shapes[i][at[i]] == 1:
            ins.append(R)
        else:
            ins.append(at[i])
            even.append((i, at[i]))
    mask = (own(3, dim),) if has_mask else ()
    whole = (at[0], R, R, *mask)
    together = (*ins, *mask)
    if together == whole:
        return [Strategy(whole, (dim,))]

    def none_before(_axis: int, chosen: list[Strategy]) -> bool:
        """A cut of the groups inside a cut of the queries alone would part queries from their groups."""
        return all(s.ins != whole for s in chosen)

    return [Strategy(together, (dim,), tuple(even), when=none_before), Strategy(whole, (dim,))]


def _picked_heads(ins: list[Spec]) -> list[list[int]] | None:
    """For keys and values, the head of each query head of this rank, as a position in its own part; None: all fit."""
    query, groups = ins[0], ins[1:3]
    heads, first, count = query.shape[-3], query.local_offset[-3], query.local_shape[-3]
    picked, fits = [], True
    for spec in groups:
        ratio, start, held = heads // spec.shape[-3], spec.local_offset[-3], spec.local_shape[-3]
        fits &= spec.shape[-3] == 1 or (first == start * ratio and count == held * ratio)
        picked.append([(first + i) // ratio - start for i in range(count)])
    return None if fits else picked


def _of_own_groups(picked: list[list[int]], inner: LocalFunction | None) -> LocalFunction:
    """Attention where every query head gets the key and value head of its group from those that the rank holds."""

    def local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound: dict[str, Any] = dict(zip(_NAMES.split(), args, strict=False), **kwargs)
        for name, positions in zip(("key", "value"), picked, strict=True):
            bound[name] = bound[name].index_select(-3, torch.tensor(positions, device=bound[name].device))
        bound["enable_gqa"] = False
        return func(**bound) if inner is None else inner(func, (), bound)

    return local


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


def _cut(spec: Spec, dim: int) -> Axes:
    """Mesh axes of more than one rank that cut a dim."""
    return tuple(a for a, t in enumerate(spec.types) if t == dim and spec.mesh.sizes[a] > 1)


def _same_batch(shapes: list[torch.Size], grouped: bool) -> bool:
    """Whether queries, keys and values have the same batch dims and, unless grouped, heads."""
    q, k, v = (tuple(s[:-3] if grouped else s[:-2]) for s in shapes[:3])
    return q == k == v and (not grouped or shapes[1][-3] == shapes[2][-3])


def _ring(ins: list[Spec], axes: Axes, bound: dict[str, Any], *, grouped: bool) -> LocalFunction:
    """Attention of this rank's queries to keys and values that are cut over `axes`."""
    q, k = ins[:2]
    mesh, causal = q.mesh, bool(bound["is_causal"])
    members = mesh.members(axes)
    me = members.index(mesh.coordinate)
    held = [[((box[0][-2], box[1][-2]),) for box in map(s.box_of, members)] for s in (q, k)]
    deal = causal and _cut(q, q.ndim - 2) == axes
    own = [dealt(s.shape[-2], len(members)) for s in (q, k)] if deal else held
    scale = bound["scale"] if bound["scale"] is not None else 1.0 / math.sqrt(q.shape[-1])
    groups = q.local_shape[-3] // k.local_shape[-3] if grouped else 1
    ring = Ring(mesh, axes, me, own[0][me], tuple(own[1]), causal, scale, groups)

    def local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        given: list[Any] = [args[i] if len(args) > i else kwargs.get(n) for i, n in enumerate(_NAMES.split()[:4])]
        query, key, value, mask = [alias(t) if isinstance(t, Tensor) else None for t in given]
        if causal and mask is not None:
            raise RuntimeError("Explicit attn_mask should not be set when is_causal=True")
        if not deal:
            return RingAttention.apply(query, key, value, mask, ring)  # type: ignore[no-any-return, no-untyped-call]
        parts = [
            Deal.apply(t, -2, before, after, me, mesh, axes)  # type: ignore[no-untyped-call]
            for t, before, after in zip((query, key, value), (*held, held[1]), (*own, own[1]), strict=True)
        ]
        out = RingAttention.apply(*parts, None, ring)  # type: ignore[no-untyped-call]
        return Deal.apply(out, -2, own[0], held[0], me, mesh, axes)  # type: ignore[no-any-return, no-untyped-call]

    return local


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
