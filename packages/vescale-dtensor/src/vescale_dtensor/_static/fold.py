"""Tensors that are the same in every call: positions, masks, and what follows from them alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .values import Value, values_of

if TYPE_CHECKING:
    from .recorder import Op

__all__ = ["MOST", "Constants", "constants"]

MOST = 1 << 22
"""Bytes of a tensor that is kept between calls; larger ones are made again."""


class Constants:
    """Lets values hold their tensors, as long as these may be the same in every call.

    Such a tensor depends on no other but on such ones, is not drawn, and no step writes to its memory.
    """

    def __init__(self) -> None:
        self._values: list[Value] = []

    def note(self, op: Op, result: Any) -> None:
        """Look at a step.

        Args:
            op: the step.
            result: what it returned, with tensors.
        """
        if op.keeps:
            self._drop({v.memory for v in values_of((op.args, op.kwargs, op.result))})
            return
        value = op.result
        if not isinstance(value, Value) or value.constant is not None or value.given is not None:
            return
        if any(v.constant is None for v in values_of((op.args, op.kwargs))):
            return
        with torch._C.DisableTorchFunction():  # a recorder must not see it
            if value.requires_grad or result.layout is not torch.strided or result.nbytes > MOST:
                return
        value.constant = result
        self._values.append(value)

    def _drop(self, memory: set[int]) -> None:
        for value in self._values:
            if value.memory in memory:
                value.constant = None
        self._values = [v for v in self._values if v.constant is not None]

    def clear(self) -> None:
        """Let all of them go."""
        self._drop({v.memory for v in self._values})


def constants(ops: Sequence[Op], escaping: Sequence[Value]) -> set[int]:
    """Return the ids of the steps whose results need not be made again.

    Args:
        ops: the steps, in order.
        escaping: tensors that others have, too, and may write to: inputs, what modules hold, results.
    """
    lost = {value.memory for value in escaping}
    found: set[int] = set()
    made: set[Value] = set()
    for op in ops:
        value = op.result
        if not isinstance(value, Value) or value.constant is None or value.memory in lost:
            continue
        if made.issuperset(values_of((op.args, op.kwargs))):
            found.add(id(op))
            made.add(value)
    return found
