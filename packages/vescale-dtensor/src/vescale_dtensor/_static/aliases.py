"""Second objects for one value: which of them a program must make as the recorded call did.

An alias that requires gradients is a node of autograd's graph: the gradients of those who use it are added before they
meet the others. Three numbers added in another order may have other bits, so an alias stays where that can happen, and
goes where it cannot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from .recorder import Op, Recorder, plain, tensors_of

__all__ = ["settle_aliases"]

FREE = 2
"""So many gradients may be added in any order."""


def settle_aliases(recorder: Recorder, given: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Make steps of the aliases that must stay, and leave out the others.

    Args:
        recorder: with the record.
        given: what the program is called with.
        results: what it returns; both may have users elsewhere.
    """
    aliases = [op for op in recorder.ops if op.function is plain]
    if not aliases:
        return
    uses: Counter[int] = Counter()
    with torch._C.DisableTorchFunctionSubclass():
        for op in recorder.ops:
            if op.function is not plain and (op.keeps or any(t.requires_grad for t in tensors_of(op.result))):
                weight = FREE + 1 if op.keeps else 1  # a hook, or a write, is one of the very object
                for tensor in tensors_of((op.args, op.kwargs)):
                    uses[recorder.first(tensor)] += weight
        for first in {recorder.first(t) for t in (*given, *results)}:
            uses[first] += 1
        gone = {id(op) for op in aliases if not _stays(op, recorder, uses)}
    for op in aliases:
        if id(op) not in gone:
            recorder.separate(op.result)
    recorder.ops = [op for op in recorder.ops if id(op) not in gone]


def _stays(op: Op, recorder: Recorder, uses: Counter[int]) -> bool:
    first = recorder.first(op.result)
    if first == id(op.result):  # made without gradients of a tensor that has some
        return True
    return bool(op.result.requires_grad) and uses[first] > FREE
