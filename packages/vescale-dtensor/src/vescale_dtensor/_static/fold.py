"""Tensors that are the same in every call: positions, masks, and what follows from them alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .recorder import Op, tensors_of
from .watch import memory_of

__all__ = ["MOST", "constants", "memory_of"]

MOST = 1 << 22
"""Bytes of a tensor that is kept between calls; larger ones are made again."""


def constants(ops: Sequence[Op], escaping: Sequence[Tensor]) -> set[int]:
    """Return the ids of the steps whose results need not be made again.

    Such a step depends on no tensor but on results of such steps, draws nothing, and nobody writes to the memory of its
    result: no other step, and no caller who gets hold of it.

    Args:
        ops: the steps, in order.
        escaping: tensors that others have, too: inputs, what modules hold, results.
    """
    with torch._C.DisableTorchFunctionSubclass():
        written = {memory_of(t) for op in ops if op.keeps for t in tensors_of((op.args, op.kwargs, op.result))}
        written |= {memory_of(t) for t in escaping}
        found: set[int] = set()
        made: set[int] = set()
        for op in ops:
            result = op.result
            if op.keeps or not isinstance(result, Tensor) or result.requires_grad:
                continue
            if result.layout is not torch.strided or result.nbytes > MOST or memory_of(result) in written:
                continue
            if all(id(t) in made for t in tensors_of((op.args, op.kwargs))):
                found.add(id(op))
                made.add(id(result))
    return found
