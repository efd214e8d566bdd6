"""What was not sent: kept per element, and added to the next gradient (error feedback).

Source: Seide et al., "1-bit stochastic gradient descent" (2014); Karimireddy et al., "Error feedback fixes SignSGD"
(2019).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._plan import BufferPlan, Slot
from ..errors import MismatchError

__all__ = ["Memory"]


class Memory:
    """What one rank owes for the gradients of a bucket.

    A parameter whose gradient is zero on this rank sends nothing of what it owes: nobody may be looking at the result.
    What is not finite is not kept, or one bad step would spoil all others.

    Args:
        plan: of the bucket.
        dtype: in which it is kept.
        device: where.
    """

    def __init__(self, plan: BufferPlan, dtype: torch.dtype, device: torch.device) -> None:
        self._plan, self._dtype, self._device = plan, dtype, device
        self._flat: Tensor | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing was kept so far."""
        return self._flat is None

    def pay(self, total: Tensor, first: int = 0, share: float = 1) -> None:
        """Add what is owed to gradients, and owe it no more.

        Args:
            total: flat gradients, changed.
            first: place in the buffer of their first element.
            share: factor of what is added.
        """
        if self._flat is None:
            return
        for slot in self._plan.slots:
            start, stop = max(slot.offset, first), min(slot.stop, first + total.numel())
            if start < stop:
                there, owed = total[start - first : stop - first], self._flat[start:stop]
                used = there.any().to(self._dtype)
                there.addcmul_(owed, used, value=share)
                owed.mul_(1 - used)

    def owe(self, total: Tensor, sent: Tensor, first: int = 0) -> None:
        """Keep the difference.

        Args:
            total: what was to be sent, flat.
            sent: what was sent.
            first: place in the buffer of their first element.
        """
        kept = self._all()[first : first + total.numel()]
        kept.add_(total.sub(sent).nan_to_num_(0, 0, 0))

    def _all(self) -> Tensor:
        if self._flat is None:
            self._flat = torch.zeros(self._plan.numel, dtype=self._dtype, device=self._device)
        return self._flat

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Return what is owed by name of the parameter, in its shape; shares memory."""
        if self._flat is not None:
            for slot in self._plan.slots:
                yield slot.name, self._flat[slot.offset : slot.stop].view(slot.shape)

    def forget(self) -> None:
        """Owe nothing."""
        self._flat = None

    def load(self, slot: Slot, value: Tensor) -> None:
        """Take over what was owed for one parameter.

        Raises:
            MismatchError: it has another shape.
        """
        if tuple(value.shape) != slot.shape:
            raise MismatchError(
                f"state: the residual of {slot.name} has shape {list(value.shape)}, but its gradient "
                f"{list(slot.shape)} on this rank. It was saved for another model."
            )
        self._all()[slot.offset : slot.stop].view(slot.shape).copy_(value)
