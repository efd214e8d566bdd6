"""What the compressors of this package have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._plan import BufferPlan, Slot
from .._transport import Transport, Work
from ..errors import MismatchError, PlanError
from .memory import Memory
from .wire import Staged, Steps, Wire

__all__ = ["Base"]

RESIDUAL = "residual"


class Base(ABC):
    """A compressor without the compression: subclasses fill in `_steps`.

    Sums and what is owed have float32, or float64 for buffers of float64. What is owed takes as much memory as all
    gradients in that dtype, on every rank.

    Args:
        plan: of the bucket.
        dtype: of its buffer.
        device: of its buffer.
        feedback: whether what was not sent is added to the next gradient.
    """

    def __init__(self, plan: BufferPlan, dtype: torch.dtype, device: torch.device, *, feedback: bool) -> None:
        if not dtype.is_floating_point:
            raise ValueError(
                f"compressor: {type(self).__name__} takes gradients of real floating point; got {dtype} in the bucket "
                f"of {plan.slots[0].name if plan.slots else 'nothing'}. Leave those parameters uncompressed."
            )
        self.plan = plan
        self.dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.wire_bytes = 0
        """Bytes that this rank sent in the last reduction."""
        self._device = device
        self._memory = Memory(plan, self.dtype, device) if feedback else None
        self._gaps = list(_gaps(plan))

    def reduce(self, buffer: Tensor, plan: BufferPlan, transport: Transport, divisor: float, scatter: bool) -> Work:
        """Start to sum the buffers of the ranks, in place; see `Compressor`.

        Raises:
            PlanError: this compressor was made for another bucket.
        """
        if plan is not self.plan and plan.fingerprint != self.plan.fingerprint:
            raise PlanError(f"plan: {type(self).__name__} was made for the bucket of {self._names()}; got another one.")
        return Staged(self._run(buffer.detach(), Wire(transport), divisor, scatter), transport)

    def _run(self, buffer: Tensor, wire: Wire, divisor: float, scatter: bool) -> Steps:
        if not buffer.numel():
            return
        total = buffer.to(self.dtype, copy=True)
        if self._memory is not None:
            self._memory.pay(total)
        if wire.size == 1:
            buffer.copy_(total if divisor == 1 else total.div_(divisor))
        else:
            yield from self._steps(buffer, total, wire, divisor, scatter)
        self.wire_bytes = wire.sent
        for start, stop in self._gaps:
            buffer[start:stop].zero_()  # a block that is not finite reaches into them

    @abstractmethod
    def _steps(self, buffer: Tensor, total: Tensor, wire: Wire, divisor: float, scatter: bool) -> Steps:
        """Reduce over several ranks.

        Args:
            buffer: where the result goes.
            total: what this rank is to send, in the dtype of sums.
            wire: over the ranks.
            divisor: of sums.
            scatter: whether only the own part of the result is needed.
        """

    def _names(self) -> str:
        return ", ".join(slot.name for slot in self.plan.slots[:3]) + (", ..." if len(self.plan.slots) > 3 else "")

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return by name of the parameter what is owed; tensors share memory, in the shape of the gradient."""
        owed = self._memory.items() if self._memory is not None else ()
        return {name: {RESIDUAL: value} for name, value in owed}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over a state; parameters that it does not name start from nothing.

        Raises:
            MismatchError: it names a parameter that is not in the bucket, or holds a tensor of another shape.
        """
        if self._memory is not None:
            self._memory.forget()
        for slot, values in self._known(state):
            if self._memory is not None and RESIDUAL in values:
                self._memory.load(slot, values[RESIDUAL])

    def _known(self, state: Mapping[str, Mapping[str, Any]]) -> Sequence[tuple[Slot, Mapping[str, Any]]]:
        slots = {slot.name: slot for slot in self.plan.slots}
        for name in state:
            if name not in slots:
                raise MismatchError(f"state: {name} is not in the bucket of {self._names()}.")
        return [(slots[name], values) for name, values in state.items()]


def _gaps(plan: BufferPlan) -> Iterator[tuple[int, int]]:
    end = 0
    for slot in plan.slots:
        if slot.offset > end:
            yield end, slot.offset
        end = max(end, slot.stop)
    if end < plan.numel:
        yield end, plan.numel
