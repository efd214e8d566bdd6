"""Making the whole of a deferred tensor: its operators run again, on one device's tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import draws
from .tape import Constant, Memory, Node, Ref, mapped, needed


def whole(ref: Ref, *, before: float = float("inf")) -> Tensor:
    """Return the values of a deferred tensor.

    Args:
        ref: what it stands for.
        before: time up to which writes count.
    """
    with torch.no_grad():
        env = Values()
        for node in needed(ref.memory, before):
            env.run(node)
        return env.view(ref)


class Values:
    """Real tensors for memories, as far as they were made."""

    def __init__(self) -> None:
        self.of: dict[Memory, Tensor] = {}

    def view(self, ref: Ref) -> Tensor:
        """A real view for a tensor argument."""
        base = self.of[ref.memory]
        if ref.is_whole:
            return base
        empty = torch.empty(0, dtype=ref.dtype, device=base.device)
        return empty.set_(base.untyped_storage(), ref.offset, ref.size, ref.stride)

    def run(self, node: Node) -> None:
        """Run one operator."""
        args, kwargs = mapped((node.args, node.kwargs), self._value)
        if node.state is not None:
            device = node.written[0].memory.device if node.written else node.made[0][1].device
            result = draws.run_whole(node, args, kwargs, device)
        else:
            result = node.run(args, kwargs)
        results = list(result) if isinstance(result, list | tuple) else [result]
        for position, memory in node.made:
            self.of[memory] = as_recorded(results[position], memory)

    def _value(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self.view(value)
        return value.value() if isinstance(value, Constant) else value


def as_recorded(result: Tensor, memory: Memory) -> Tensor:
    """A result laid out in memory as the meta kernel said."""
    if tuple(result.stride()) == memory.stride and not result.storage_offset():
        return result
    laid_out = torch.empty_strided(memory.size, memory.stride, dtype=result.dtype, device=result.device)
    return laid_out.copy_(result)
