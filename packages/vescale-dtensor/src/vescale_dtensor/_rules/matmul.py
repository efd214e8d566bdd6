"""Products: every function that is an einsum, by the labels of its dims.

A label that the result keeps may be sharded in all operands that have it, and the result is
sharded along it. A contracted label may be sharded in all operands that have it, and the result is
a pending sum. The product is linear in each operand, so one operand may be a pending sum itself.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from .._dispatch.call import Call, LocalFunction, Rule, Shape, Strategy
from .._dispatch.table import keyed
from .._spec import Spec
from ..placements import P, R


def product_strategies(labels: Sequence[str], out: str, shapes: Sequence[Sequence[int]]) -> list[Strategy]:
    """Strategies of an einsum; operands of length 1 along a broadcast label stay whole."""
    lengths = {
        c: max(s[lab.index(c)] for lab, s in zip(labels, shapes, strict=True) if c in lab) for c in set("".join(labels))
    }
    strategies = []
    for c in sorted(lengths, key="".join(labels).index):
        ins = tuple(
            lab.index(c) if c in lab and s[lab.index(c)] == lengths[c] else R
            for lab, s in zip(labels, shapes, strict=True)
        )
        strategies.append(Strategy(ins, (out.index(c) if c in out else P,)))
    pending = [tuple(P if i == j else R for i in range(len(labels))) for j in range(len(labels))]
    return strategies + [Strategy(ins, (P,), exact=True) for ins in pending]


def _out_shape(labels: Sequence[str], out: str, shapes: Sequence[Sequence[int]]) -> Shape:
    lengths: dict[str, int] = {}
    for lab, shape in zip(labels, shapes, strict=True):
        for c, n in zip(lab, shape, strict=True):
            lengths[c] = max(lengths.get(c, n), n) if n != 1 else lengths.get(c, 1)
            if n == 0:
                lengths[c] = 0
    return tuple(lengths[c] for c in out)


def product_rule(labels: Sequence[str], out: str, shapes: Sequence[Sequence[int]]) -> Rule:
    """Rule of a product by the labels of its dims."""
    return Rule([_out_shape(labels, out, shapes)], product_strategies(labels, out, shapes), uniform=True)


def matmul_labels(left: int, right: int) -> tuple[str, str, str]:
    """Labels of `matmul` for operands of `left` and `right` dims: batch dims align from the right."""
    if left == 1 and right == 1:
        return "k", "k", ""
    batch = string.ascii_lowercase[:8]
    if left == 1:
        b = batch[8 - (right - 2) :] if right > 2 else ""
        return "k", f"{b}kn", f"{b}n"
    if right == 1:
        b = batch[8 - (left - 2) :] if left > 2 else ""
        return f"{b}mk", "k", f"{b}m"
    b_left = batch[8 - (left - 2) :] if left > 2 else ""
    b_right = batch[8 - (right - 2) :] if right > 2 else ""
    return f"{b_left}mk", f"{b_right}kn", f"{max(b_left, b_right, key=len)}mn"


def matmul_rule(call: Call) -> Rule | None:
    """`matmul` and its fixed-rank forms."""
    specs = call.specs[::-1] if call.name == "__rmatmul__" else call.specs
    if len(specs) != 2 or not all(s.ndim for s in specs):
        return None
    left, right, out = matmul_labels(specs[0].ndim, specs[1].ndim)
    shapes = [s.shape for s in specs]
    if shapes[0][left.index("k")] != shapes[1][right.index("k")]:
        call.on_meta()  # torch's own error
        return None
    strategies = product_strategies((left, right), out, shapes)
    if call.name == "__rmatmul__":
        strategies = [Strategy(s.ins[::-1], s.outs, exact=s.exact) for s in strategies]
    return Rule([_out_shape((left, right), out, shapes)], strategies, uniform=True)


def linear_rule(call: Call) -> Rule | None:
    """`linear(input, weight, bias)`: a bias is sharded with the result, or added by one rank to a pending sum."""
    x, weight = call.specs[:2]
    batch = string.ascii_lowercase[: x.ndim - 1]
    if x.ndim == 0 or weight.ndim not in (1, 2) or x.shape[-1] != weight.shape[-1]:
        call.on_meta()  # torch's own error
        return None
    labels = (f"{batch}k", "zk" if weight.ndim == 2 else "k")
    out = batch + ("z" if weight.ndim == 2 else "")
    strategies = product_strategies(labels, out, (x.shape, weight.shape))
    if len(call.specs) == 3:
        if call.specs[2].ndim != weight.ndim - 1:
            return None
        last = x.ndim - 1
        strategies = [
            Strategy((*s.ins, 0 if s.outs == (last,) and weight.ndim == 2 else P if s.outs == (P,) else R), s.outs)
            for s in strategies
            if not s.exact
        ]
    return Rule([_out_shape(labels, out, (x.shape, weight.shape))], strategies, uniform=True)


def addmm_rule(call: Call) -> Rule | None:
    """`addmm`, `baddbmm`, `addmv`, `addr`: a product plus a broadcast operand."""
    added, left_spec, right_spec = call.specs[:3]
    if call.name.startswith("addr"):
        left, right, out = "m", "n", "mn"
    elif call.name.startswith("addbmm"):
        left, right, out = "bmk", "bkn", "mn"
    else:
        left, right, out = matmul_labels(left_spec.ndim, right_spec.ndim)
    shapes = (left_spec.shape, right_spec.shape)
    shape = _out_shape((left, right), out, shapes)
    if call.name.startswith("addbmm_") and tuple(added.shape) != shape:
        return None  # torch would give its first argument another shape
    strategies = []
    for s in product_strategies((left, right), out, shapes):
        (to,) = s.outs
        if s.exact:
            continue
        if to == P:
            first = P
        else:
            own = to - len(shape) + added.ndim
            first = own if own >= 0 and added.shape[own] == shape[to] else R
        strategies.append(Strategy((first, *s.ins), s.outs))
    return Rule([shape], strategies, _expand_first if call.name.startswith("addmv") else None, uniform=True)


def _expand_first(ins: list[Spec], outs: list[Spec]) -> LocalFunction | None:
    """`addmv` of no rows gives the shape of what is added, where that is broadcast: it is expanded first."""
    shape = outs[0].local_shape
    if 0 not in shape or ins[0].local_shape == shape:
        return None

    def local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return func(args[0].expand(shape), *args[1:], **kwargs)
        return func(**{**kwargs, "input": kwargs["input"].expand(shape)})

    return local


def einsum_rule(call: Call) -> Rule | None:
    """`einsum` with an equation string without repeated labels in one operand."""
    equation = call.args[0]
    if not isinstance(equation, str):
        return None
    equation = equation.replace(" ", "")
    left, arrow, out = equation.partition("->")
    labels = left.split(",")
    shapes = [s.shape for s in call.specs]
    if "." in equation:
        expanded = _expand_ellipsis(labels, out if arrow else None, shapes)
        if expanded is None:
            return None
        labels, out = expanded
    elif not arrow:
        joined = "".join(labels)
        out = "".join(sorted(c for c in set(joined) if joined.count(c) == 1))
    if len(labels) != len(shapes) or any(len(set(lab)) != len(lab) for lab in labels):
        return None
    if any(len(lab) != len(s) for lab, s in zip(labels, shapes, strict=True)):
        return None
    return product_rule(labels, out, shapes)


def _expand_ellipsis(
    labels: list[str], out: str | None, shapes: Sequence[Sequence[int]]
) -> tuple[list[str], str] | None:
    spare = [c for c in string.ascii_letters if c not in "".join(labels)]
    widths = [len(s) - len(lab.replace("...", "")) for lab, s in zip(labels, shapes, strict=True) if "..." in lab]
    most = max(widths, default=0)
    if min(widths, default=0) < 0 or most > len(spare):
        return None
    dots = "".join(spare[:most])
    new = []
    for lab, s in zip(labels, shapes, strict=True):
        width = len(s) - len(lab.replace("...", ""))
        new.append(lab.replace("...", dots[most - width :]) if "..." in lab else lab)
    if out is None:
        joined = "".join(labels).replace("...", "")
        return new, dots + "".join(sorted(c for c in set(joined) if joined.count(c) == 1))
    return new, out.replace("...", dots)


keyed("matmul mm bmm mv dot __matmul__ __rmatmul__", matmul_rule, inplace=False)
keyed("linear", linear_rule, inplace=False)
keyed("addmm addmv addr baddbmm addbmm", addmm_rule)
keyed("einsum", einsum_rule, inplace=False)


def outer_rule(call: Call) -> Rule | None:
    """`outer` of two vectors."""
    if [s.ndim for s in call.specs] != [1, 1]:
        return None
    return product_rule(("m", "n"), "mn", [s.shape for s in call.specs])


keyed("outer ger", outer_rule, inplace=False)
