"""Gradients of one flat buffer: copied once into a buffer of the plan, reduced, and handed to the shard parameters.

Between micro-batches that are not reduced the buffer stays. `optimizer.zero_grad()` then has to clear it too, which is
seen from the `.grad` of the shard parameters: it is left as a marker.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from .._report.watch import watch
from .._transport import Transport, Work
from ..errors import CommError, TransportError
from .flat import Flat

__all__ = ["Gradients", "Sums"]

NOT_USED, USED, NOT_FINITE = 0, 1, 2
"""What a rank tells the others of each parameter."""


@dataclass(slots=True)
class _Marker:
    """The `.grad` of a shard parameter as it was left after a micro-batch."""

    gradient: Tensor
    """The tensor."""
    version: int
    """Its count of changes."""
    placeholder: bool
    """Whether it stands there as a marker only, and is no reduced gradient."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Over whom gradients are summed, and what they are divided by."""

    shard: Transport
    """Ranks among which the parameters are cut."""
    others: tuple[Transport, ...]
    """Transports over which the reduced shard is summed further: replicas, partial gradients."""
    divisor: float
    """By which sums are divided, once."""


class Gradients:
    """Gradients of the parameters of one flat buffer."""

    def __init__(self, flat: Flat, sums: Sums, check_finite: bool) -> None:
        """Take the buffer.

        Args:
            flat: the parameters.
            sums: how to reduce.
            check_finite: look at each gradient for infinities and NaN.
        """
        self.flat, self.sums, self._check_finite = flat, sums, check_finite
        count = len(flat.entries)
        self.buffer: Tensor | None = None
        """Gradients of the whole parameters, not reduced yet."""
        self.seen = [False] * count
        """Which of them are in the buffer."""
        self.state = [NOT_USED] * count
        """What came in since the last reduction."""
        self.reduced: Tensor | None = None
        """Reduced gradients of the shard that the parameters have not got yet."""
        self._markers: list[_Marker | None] = [None] * count
        self._work: Work | None = None
        self._in_flight: Tensor | None = None

    def take(self, index: int, gradient: Tensor) -> None:
        """Copy or add the gradient of one whole parameter."""
        if gradient.layout is not torch.strided:
            raise CommError(
                f"{self.flat.entries[index].name}: its gradient has the layout {gradient.layout}; fully_shard needs "
                f"dense gradients, such as of Embedding(sparse=False)."
            )
        if self.buffer is None:
            self.buffer = torch.empty(self.flat.plan.numel, dtype=self.flat.dtypes.reduce, device=self.flat.device)
        slot = self.flat.plan.slots[index]
        place = self.buffer[slot.offset : slot.stop].view(slot.shape)
        if self.seen[index]:
            place.add_(gradient)
        else:
            place.copy_(gradient)
            self.seen[index] = True
        if self._check_finite and not bool(torch.isfinite(gradient).all()):
            self.state[index] = NOT_FINITE
        else:
            self.state[index] = max(self.state[index], USED)

    @property
    def waiting(self) -> bool:
        """Whether anything came in that was not sent."""
        return any(self.seen)

    def launch(self) -> None:
        """Begin to reduce what came in; what did not counts as zeros."""
        buffer = self.buffer
        if buffer is None:
            buffer = torch.zeros(self.flat.plan.numel, dtype=self.flat.dtypes.reduce, device=self.flat.device)
        else:
            for slot, seen in zip(self.flat.plan.slots, self.seen, strict=True):
                if not seen:
                    buffer[slot.offset : slot.stop] = 0
            for gap in self.flat.gaps():
                buffer[gap] = 0
        divisor = 1 if self.sums.others else self.sums.divisor
        try:
            work = self.sums.shard.reduce_scatter(buffer, divisor=divisor, accumulate=self.flat.dtypes.accumulate)
        except TransportError as error:
            raise self._failed(error) from error
        self._work = watch(work, "reduce_scatter", self.flat.label, buffer.nbytes)
        self._in_flight, self.buffer = buffer, None
        self.seen = [False] * len(self.seen)

    def collect(self) -> None:
        """Finish the reduction among the shards, and give the buffer back."""
        if self._work is None or self._in_flight is None:
            return
        self._wait()
        buffer, self._in_flight = self._in_flight, None
        size = self.flat.plan.shard
        own = buffer[self.flat.rank * size : (self.flat.rank + 1) * size]
        if self.sums.others and self.flat.dtypes.accumulate is not None:
            # What is summed further must not be rounded on the way.
            own = own.to(self.flat.dtypes.accumulate)
        else:
            own = own.clone()
        self.reduced = own if self.reduced is None else self.reduced.add_(own)

    def start_others(self) -> None:
        """Begin to sum the reduced shard over the further groups; call `finish_others` before it is used."""
        if self.reduced is None or not self.sums.others:
            return
        for number, transport in enumerate(self.sums.others):
            self._wait()
            last = number == len(self.sums.others) - 1
            try:
                work = transport.all_reduce(self.reduced, divisor=self.sums.divisor if last else 1)
            except TransportError as error:
                raise self._failed(error) from error
            self._work = watch(work, "all_reduce", self.flat.label, self.reduced.nbytes)

    def finish_others(self) -> None:
        """Finish what `start_others` began."""
        self._wait()

    def _wait(self) -> None:
        try:
            if self._work is not None:
                self._work.wait()
        except TransportError as error:
            self._work = None
            raise self._failed(error) from error
        self._work = None  # not if the wait was interrupted: it still goes on then

    def _failed(self, error: TransportError) -> TransportError:
        return TransportError(f"While gradients of {self.flat.label()} were reduced: {error}")

    def place(self, used: Sequence[int]) -> None:
        """Hand the reduced gradients to the shard parameters.

        Args:
            used: for each parameter, the largest state among all ranks; who was used nowhere keeps its `.grad`.
        """
        reduced, self.reduced = self.reduced, None
        self.state = [NOT_USED] * len(self.state)
        markers, self._markers = self._markers, [None] * len(self._markers)
        if reduced is None:
            return
        if reduced.dtype != self.flat.dtypes.store or reduced.device != self.flat.shard.device:
            reduced = reduced.to(self.flat.shard)
        for index, (shard, piece) in enumerate(zip(self.flat.shards, self.flat.pieces, strict=True)):
            marker = markers[index]
            if marker is not None and marker.placeholder and shard.grad is marker.gradient:
                shard.grad = None
            if used[index] == NOT_USED or not shard.requires_grad:
                continue
            own = reduced[piece.offset : piece.offset + piece.stop - piece.start] if piece else reduced[:0]
            if shard.grad is None:
                shard.grad = own
            else:
                shard.grad.add_(own)

    def hold(self) -> None:
        """Keep what came in for the next micro-batch, and mark the shard parameters."""
        if self.buffer is None:
            return
        base = self.flat.rank * self.flat.plan.shard
        for index, (shard, piece) in enumerate(zip(self.flat.shards, self.flat.pieces, strict=True)):
            if not self.seen[index]:
                continue
            known = self._markers[index]
            placeholder = shard.grad is None or (known is not None and known.placeholder)
            if shard.grad is None:
                start, stop = (piece.offset, piece.offset + piece.stop - piece.start) if piece else (0, 0)
                shard.grad = self.buffer[base + start : base + stop].to(self.flat.shard)
            self._markers[index] = _Marker(shard.grad, shard.grad._version, placeholder)

    def forget_cleared(self) -> None:
        """Drop what was held of parameters whose `.grad` was cleared meanwhile.

        Raises:
            CommError: the `.grad` of a shard parameter was changed in another way.
        """
        for index, (marker, shard) in enumerate(zip(self._markers, self.flat.shards, strict=True)):
            if marker is None or (shard.grad is marker.gradient and shard.grad._version == marker.version):
                continue
            if shard.grad is None or not bool(shard.grad.any()):
                self._drop(index)
                continue
            raise CommError(
                f"{self.flat.entries[index].name}: its .grad was changed between micro-batches under no_sync, where "
                f"gradients are not reduced yet. Clip or scale after the last micro-batch."
            )

    def _drop(self, index: int) -> None:
        marker, self._markers[index] = self._markers[index], None
        self.seen[index], self.state[index] = False, NOT_USED
        shard = self.flat.shards[index]
        if marker is not None and marker.placeholder and shard.grad is marker.gradient:
            shard.grad = None

    def abandon(self) -> None:
        """Drop what is under way and what came in, except for parameters that wait for more micro-batches."""
        with suppress(TransportError):  # it is dropped anyway
            self._wait()
        self._work = self._in_flight = self.reduced = None
        for index, marker in enumerate(self._markers):
            if marker is None:
                self.seen[index], self.state[index] = False, NOT_USED
        if not any(self.seen):
            self.buffer = None
