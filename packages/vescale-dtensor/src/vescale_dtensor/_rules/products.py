"""Products that are einsums under other names: `tensordot`, `inner`, `kron`, `multi_dot`, `bilinear` and more.

What is said of einsums in `matmul` holds here: kept dims may be sharded, contracted ones give a pending
sum, and one operand may be a pending sum itself.
"""

from __future__ import annotations

import string
from collections.abc import Sequence

from .._dispatch.call import Call, Rule, Strategy, normalize_dim, normalize_dims
from .._dispatch.table import keyed
from ..placements import P, R
from .matmul import product_rule, product_strategies
from .pointwise import broadcast, elementwise_strategies

_LETTERS = string.ascii_letters


def _named(call: Call, labels: Sequence[str], out: str) -> Rule | None:
    """Rule of a product by labels, None where the lengths of a label differ: torch's own error."""
    shapes = [s.shape for s in call.specs]
    lengths: dict[str, int] = {}
    for label, shape in zip(labels, shapes, strict=True):
        for c, n in zip(label, shape, strict=True):
            if lengths.setdefault(c, n) != n:
                return None
    return product_rule(labels, out, shapes)


def tensordot_rule(call: Call) -> Rule | None:
    """`tensordot(a, b, dims)`, with a number of dims or two lists of them."""
    if len(call.specs) != 2:
        return None
    left, right = call.specs
    dims = call.args[2:4] if len(call.args) == 4 else call.arg(2, "dims", 2)
    if isinstance(dims, int):
        if not 0 <= dims <= min(left.ndim, right.ndim):
            return None
        dims = range(left.ndim - dims, left.ndim), range(dims)
    if not isinstance(dims, list | tuple) or len(dims) != 2:
        return None
    if not all(isinstance(side, list | tuple | range) for side in dims):
        return None
    contracted = [normalize_dims(tuple(side), s.ndim) for side, s in zip(dims, (left, right), strict=True)]
    if len(contracted[0]) != len(contracted[1]):
        return None
    a = _LETTERS[: left.ndim]
    b = list(_LETTERS[left.ndim : left.ndim + right.ndim])
    for i, j in zip(*contracted, strict=True):
        b[j] = a[i]
    out = [c for d, c in enumerate(a) if d not in contracted[0]] + [c for c in b if c not in a]
    return _named(call, (a, "".join(b)), "".join(out))


def inner_rule(call: Call) -> Rule | None:
    """`inner`: the last dims are contracted."""
    if len(call.specs) != 2 or not all(s.ndim for s in call.specs):
        return None
    left, right = (s.ndim - 1 for s in call.specs)
    a, b = _LETTERS[:left], _LETTERS[left : left + right]
    return _named(call, (f"{a}z", f"{b}z"), a + b)


def vdot_rule(call: Call) -> Rule | None:
    """`vdot` of two vectors."""
    if [s.ndim for s in call.specs] != [1, 1]:
        return None
    return _named(call, ("k", "k"), "")


def vecdot_rule(call: Call) -> Rule | None:
    """`linalg.vecdot(x, y, dim)`: elementwise, then summed over `dim`."""
    if len(call.specs) != 2:
        return None
    shapes = [s.shape for s in call.specs]
    out = broadcast(shapes)
    dim = normalize_dim(call.arg(2, "dim", -1), len(out))
    strategies = [
        Strategy(s.ins, (P if d == dim else d - (d > dim),)) for d, s in enumerate(elementwise_strategies(shapes, out))
    ]
    strategies += [Strategy(ins, (P,), exact=True) for ins in ((P, R), (R, P))]
    return Rule([(*out[:dim], *out[dim + 1 :])], strategies)


def chain_rule(call: Call) -> Rule | None:
    """`multi_dot` and `chain_matmul`: matrices one after the other, vectors perhaps at the ends."""
    ndims = [s.ndim for s in call.specs]
    last = len(ndims) - 1
    if last < 1 or any(n != 2 and not (n == 1 and i in (0, last)) for i, n in enumerate(ndims)):
        return None
    labels = [_LETTERS[i : i + 2] for i in range(len(ndims))]
    first, end = labels[0][0], labels[-1][1]
    if ndims[0] == 1:
        labels[0], first = labels[0][1], ""
    if ndims[-1] == 1:
        labels[-1], end = labels[-1][0], ""
    return _named(call, labels, first + end)


def kron_rule(call: Call) -> Rule | None:
    """`kron`: the left factor may be sharded along a dim that its shards cut evenly, so that blocks stay whole."""
    if len(call.specs) != 2:
        return None
    left, right = call.specs
    ndim = max(left.ndim, right.ndim)
    a, b = ((*(1,) * (ndim - s.ndim), *s.shape) for s in (left, right))
    strategies = []
    for d in range(ndim):
        own = d - ndim + left.ndim
        if own >= 0:
            strategies.append(Strategy((own, R), (d,), even=((0, own),)))
        own = d - ndim + right.ndim
        if own >= 0 and a[d] == 1:
            strategies.append(Strategy((R, own), (d,)))
    strategies += [Strategy(ins, (P,), exact=True) for ins in ((P, R), (R, P))]
    return Rule([tuple(m * n for m, n in zip(a, b, strict=True))], strategies)


def bilinear_rule(call: Call) -> Rule | None:
    """`bilinear(x1, x2, weight, bias)`: a bias is sharded with the result, or added by one rank to a pending sum."""
    if len(call.specs) not in (3, 4) or call.specs[2].ndim != 3:
        return None
    x1, x2, weight = (s.shape for s in call.specs[:3])
    if not x1 or len(x1) != len(x2):
        return None
    batch = _LETTERS[: len(x1) - 1]
    labels, out = (f"{batch}X", f"{batch}Y", "ZXY"), f"{batch}Z"
    lengths = [x1[:-1] == x2[:-1], x1[-1] == weight[1], x2[-1] == weight[2]]
    if not all(lengths):
        return None  # torch's own error
    rule, last = product_rule(labels, out, (x1, x2, weight)), len(out) - 1
    strategies = []
    for s in product_strategies(labels, out, (x1, x2, weight)):
        if s.ins[2] >= 0:  # torch refuses a weight without elements
            s = s._replace(even=((2, s.ins[2]),))
        if len(call.specs) == 4:
            s = s._replace(ins=(*s.ins, 0 if s.outs == (last,) else P if s.outs == (P,) else R))
        if len(call.specs) == 3 or not s.exact:
            strategies.append(s)
    rule.strategies = strategies
    return rule


keyed("tensordot", tensordot_rule, inplace=False)
keyed("inner", inner_rule, inplace=False)
keyed("vdot", vdot_rule, inplace=False)
keyed("linalg.vecdot", vecdot_rule, inplace=False)
keyed("linalg.multi_dot chain_matmul", chain_rule, inplace=False)
keyed("kron", kron_rule, inplace=False)
keyed("bilinear", bilinear_rule, inplace=False)
