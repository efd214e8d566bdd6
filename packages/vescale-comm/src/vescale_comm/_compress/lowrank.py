"""PowerSGD: the gradient of a matrix as a product of two thin ones, by one step of subspace iteration.

Source: Vogels et al., "PowerSGD: Practical low-rank gradient compression for distributed optimization" (2019),
arXiv 1905.13727.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._plan import BufferPlan, Slot
from ..errors import MismatchError
from .base import Base
from .orthogonal import orthonormal, outer
from .wire import Steps, Wire

__all__ = ["PowerSGD"]

BASIS, COUNT = "basis", "count"


class PowerSGD(Base):
    """Sends two thin factors of each matrix; what they do not tell is owed.

    A tensor of more dims is a matrix of its first one and all others. Tensors of one dim, and matrices for which the
    factors save too little, are sent as they are. A matrix with a number that is not finite arrives as NaN.

    Args:
        plan: of the bucket.
        dtype: of its buffer.
        device: of its buffer.
        rank: number of columns of the factors; more is closer to the truth.
        start: reductions of a parameter that go uncompressed first.
        gain: factor by which the bytes of a matrix must shrink.
        seed: of the first bases.
    """

    def __init__(
        self,
        plan: BufferPlan,
        dtype: torch.dtype,
        device: torch.device,
        *,
        rank: int = 2,
        start: int = 0,
        gain: float = 2.0,
        seed: int = 0,
    ) -> None:
        super().__init__(plan, dtype, device, feedback=True)
        for name, value in (("rank", rank - 1), ("start", start), ("gain", gain)):
            if value < 0:
                raise ValueError(
                    f"{name}: PowerSGD needs rank >= 1, start >= 0 and gain >= 0; got {rank, start, gain}."
                )
        self._rank, self._start, self._seed = rank, start, seed
        self._fits = {
            slot.name for slot in plan.slots if slot.numel and sum(_shape(slot)) * rank * max(gain, 0) <= slot.numel
        }
        self._bases: dict[str, Tensor] = {}
        self._first: dict[str, Tensor] = {}
        self._counts = dict.fromkeys((slot.name for slot in plan.slots), 0)

    def _steps(self, buffer: Tensor, total: Tensor, wire: Wire, divisor: float, scatter: bool) -> Steps:
        assert self._memory is not None
        thin = [slot for slot in self.plan.slots if slot.name in self._fits and self._counts[slot.name] >= self._start]
        for name in self._counts:
            self._counts[name] += 1
        if not thin:
            message = buffer if self._memory.empty else total
            yield wire.reduce_scatter(message, divisor) if scatter else wire.all_reduce(message, divisor)
            if message is not buffer:
                buffer.copy_(message)
            return
        matrices = [total[slot.offset : slot.stop].view(_shape(slot)) for slot in thin]
        whole = [slot for slot in self.plan.slots if slot not in thin]
        first = [_times(matrix, self._basis(slot)) for slot, matrix in zip(thin, matrices, strict=True)]
        message = _join([*(total[slot.offset : slot.stop] for slot in whole), *first])
        yield wire.all_reduce(message, divisor)
        *sums, spans = _split(message, [slot.numel for slot in whole], first)
        lefts = [orthonormal(span) for span in spans]
        rights = [_times(matrix.t(), left) for matrix, left in zip(matrices, lefts, strict=True)]
        message = _join(rights)
        yield wire.all_reduce(message, divisor)
        (means,) = _split(message, [], rights)
        for slot, value in zip(whole, sums, strict=True):
            buffer[slot.offset : slot.stop].copy_(value)
        for slot, matrix, left, right, mean in zip(thin, matrices, lefts, rights, means, strict=True):
            self._memory.owe(matrix.reshape(-1), outer(left, right).view(-1), slot.offset)
            buffer[slot.offset : slot.stop].view(_shape(slot)).copy_(outer(left, mean))
            self._bases[slot.name] = self._next_basis(slot, mean)

    def _basis(self, slot: Slot) -> Tensor:
        found = self._bases.get(slot.name)
        return self._fresh(slot) if found is None else found

    def _fresh(self, slot: Slot) -> Tensor:
        """Return a basis to begin with, the same on all ranks and in any bucket."""
        if slot.name not in self._first:
            generator = torch.Generator().manual_seed((zlib.crc32(slot.name.encode()) << 16) + self._seed)
            basis = torch.randn(_shape(slot)[1], self._rank, generator=generator, dtype=torch.float32)
            self._first[slot.name] = basis.to(self._device, self.dtype)
        return self._first[slot.name]

    def _next_basis(self, slot: Slot, mean: Tensor) -> Tensor:
        # Scaled, or small gradients would vanish when they are multiplied. Columns that are of no use start anew.
        largest = mean.abs().amax(0)
        return torch.where((largest > 0) & largest.isfinite(), mean / largest, self._fresh(slot))

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return by name of the parameter what is owed, the basis, and the number of reductions."""
        state = super().state_dict()
        for name, count in self._counts.items():
            if count:
                state.setdefault(name, {})[COUNT] = count
        for name, basis in self._bases.items():
            state.setdefault(name, {})[BASIS] = basis
        return state

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over a state; parameters that it does not name start from nothing.

        Raises:
            MismatchError: it names a parameter that is not in the bucket, or holds a tensor of another shape.
        """
        super().load_state_dict(state)
        self._counts = dict.fromkeys(self._counts, 0)
        self._bases = {}
        for slot, values in self._known(state):
            self._counts[slot.name] = int(values.get(COUNT, 0))
            basis = values.get(BASIS)
            if basis is not None and slot.name in self._fits:
                if tuple(basis.shape) != (_shape(slot)[1], self._rank):
                    raise MismatchError(
                        f"state: the basis of {slot.name} has shape {list(basis.shape)}, but this PowerSGD needs "
                        f"{[_shape(slot)[1], self._rank]}. Give the rank with which it was saved."
                    )
                self._bases[slot.name] = basis.to(self._device, self.dtype, copy=True)


def _shape(slot: Slot) -> tuple[int, int]:
    rows = slot.shape[0] if slot.shape else 1
    return rows, math.prod(slot.shape[1:])


def _times(left: Tensor, right: Tensor) -> Tensor:
    # A backward inside autocast would have it in another dtype.
    with torch.autocast(left.device.type, enabled=False):
        return left @ right


def _join(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def _split(message: Tensor, lengths: Sequence[int], like: Sequence[Tensor]) -> list[Any]:
    """Return parts of these lengths, and a list of those of these shapes."""
    parts = torch.split(message, [*lengths, *(one.numel() for one in like)])
    tail = [part.view_as(one) for part, one in zip(parts[len(lengths) :], like, strict=True)]
    return [*parts[: len(lengths)], tail]
