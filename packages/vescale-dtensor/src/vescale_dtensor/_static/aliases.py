"""Second objects for one value: which of them a program must make as the recorded call did.

An alias that requires gradients is a node of autograd's graph: the gradients of those who use it are added before they
meet the others. Three numbers added in another order may have other bits, so an alias stays where that can happen, and
goes where it cannot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .recorder import Op, plain
from .values import Value, values_of

__all__ = ["settle_aliases"]

FREE = 2
"""So many gradients may be added in any order."""


def settle_aliases(ops: Sequence[Op], given: Sequence[Value], results: Sequence[Value]) -> list[Op]:
    """Make steps of the aliases that must stay, and leave out the others; returns the steps.

    Args:
        ops: the steps of a record.
        given: what the program is called with.
        results: what it returns; both may have users elsewhere.
    """
    aliases = [op for op in ops if op.function is plain]
    if not aliases:
        return list(ops)
    uses: Counter[Value] = Counter()
    for op in ops:
        if op.function is not plain and (op.keeps or any(v.requires_grad for v in values_of(op.result))):
            weight = FREE + 1 if op.keeps else 1  # a hook, or a write, is one of the very object
            for value in values_of((op.args, op.kwargs)):
                uses[value.first] += weight
    for first in {value.first for value in (*given, *results)}:
        uses[first] += 1
    gone = {id(op) for op in aliases if not _stays(op, uses)}
    for op in aliases:
        if id(op) not in gone:
            op.result.first = op.result
    return [op for op in ops if id(op) not in gone]


def _stays(op: Op, uses: Counter[Value]) -> bool:
    first = op.result.first
    if first is op.result:  # made without gradients of a tensor that has some
        return True
    return bool(op.result.requires_grad) and uses[first] > FREE
