"""The backend's own collectives, in place; and rank-ordered sums from its all-to-all, where sends have no tags."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import TransportError
from .blame import Blame
from .call import Call, broadcast_of, flat_buffer, flat_equal_parts, reduction
from .interface import Work
from .rooms import Rooms
from .running import Message, Running, Steps
from .sums import add_in_order, divide

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["NativeTransport", "RankOrderTransport"]

# The old names warn since torch 2.13, the new ones are not in torch 2.11.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class NativeTransport:
    """What torch.distributed offers: sums add in the order of the backend, which may depend on sizes and cuts.

    Divisions are done here, since not all backends know averages. Where `accumulate` is another dtype than that of
    the buffer, what is sent has that dtype.
    """

    name = "native"
    canonical = False

    def __init__(self, group: ProcessGroup) -> None:
        """Take the group.

        Args:
            group: of torch.distributed; this rank must be in it.
        """
        self._group = group
        self.rank, self.size = group.rank(), group.size()
        self._blame = Blame(group, f"{self.name}/{self.canonical}")
        self._calls = 0
        self._in_rounds: list[Running] = []
        """Collectives under way on the CPU that call the backend again when messages have arrived."""
        self._side: Any = None
        """On accelerators, the stream on which sums wait for messages, so that the caller's stream need not."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def reduce_scatter(self, buffer: Tensor, *, divisor: float = 1, accumulate: torch.dtype | None = None) -> Work:
        """Sum parts at their owners; see `Transport`."""
        call = reduction("reduce_scatter", buffer, divisor, accumulate)
        own = flat_equal_parts(buffer, self.size)[self.rank]
        return self._start(call, buffer, partial(self._reduce_scatter, buffer.detach(), own, call))

    def all_gather(self, buffer: Tensor) -> Work:
        """Send the own part to everybody; see `Transport`."""
        call = Call("all_gather", buffer.numel(), buffer.dtype)
        own = flat_equal_parts(buffer, self.size)[self.rank]
        return self._start(call, buffer, partial(self._gather, buffer.detach(), own))

    def all_reduce(self, buffer: Tensor, *, divisor: float = 1, accumulate: torch.dtype | None = None) -> Work:
        """Sum buffers; see `Transport`."""
        call = reduction("all_reduce", buffer, divisor, accumulate)
        return self._start(call, buffer, partial(self._all_reduce, flat_buffer(buffer), call))

    def broadcast(self, buffer: Tensor, source: int) -> Work:
        """Send from one rank to all; see `Transport`."""
        call, flat = broadcast_of(buffer, source, self.size)
        return self._start(call, buffer, partial(self._broadcast, flat, source))

    def all_to_all(self, source: Tensor, goal: Tensor) -> Work:
        """Send part `i` of a flat buffer to rank `i`; part `i` of another one comes from rank `i`."""
        call = Call("all_to_all", source.numel(), source.dtype)
        flat_equal_parts(source, self.size)
        flat_equal_parts(goal, self.size)
        return self._start(call, goal, partial(self._swap, source.detach(), goal.detach()))

    def close(self) -> None:
        """Hold nothing, so give back nothing."""

    def _start(self, call: Call, buffer: Tensor, steps: Callable[[], Steps], rounds: bool = False) -> Work:
        self._calls += 1
        explain = partial(self._blame.explain, call, self._calls - 1)
        if buffer.device.type == "cpu":
            self._in_rounds = [run for run in self._in_rounds if not run.finished]
            run = Running(steps(), explain, tuple(self._in_rounds))
            if rounds:
                self._in_rounds.append(run)
            return run
        return self._on_side_stream(buffer, steps, explain)

    def _on_side_stream(self, buffer: Tensor, steps: Callable[[], Steps], explain: Any) -> Work:
        # There a wait does not block the host, so all steps can be issued now; only the side stream waits in between.
        if self._side is None:
            self._side = torch.Stream(device=buffer.device)
        caller = torch.accelerator.current_stream(buffer.device)
        self._side.wait_stream(caller)
        with self._side:
            running = Running(steps(), explain)
            running.wait()
            done = self._side.record_event()
        return _Issued(buffer, done)

    def _reduce_scatter(self, flat: Tensor, own: Tensor, call: Call) -> Steps:
        total, out = flat, own
        if call.accumulate not in (None, flat.dtype):
            total = flat.to(call.accumulate)
            out = total.tensor_split(self.size)[self.rank]
        if self.size > 1 and flat.numel():
            work = _reduce_scatter(out, total, group=self._group, async_op=True)
            yield [Message(work, "reduce_scatter_tensor")]
        _finish_sum(out, own, call)

    def _all_reduce(self, flat: Tensor, call: Call) -> Steps:
        total = flat if call.accumulate in (None, flat.dtype) else flat.to(call.accumulate)
        if self.size > 1 and flat.numel():
            yield [Message(dist.all_reduce(total, group=self._group, async_op=True), "all_reduce")]
        _finish_sum(total, flat, call)

    def _gather(self, flat: Tensor, own: Tensor, group: ProcessGroup | None = None) -> Steps:
        # As bytes: bits travel whatever dtypes the backend knows.
        if self.size > 1 and flat.numel():
            work = _all_gather(flat.view(torch.uint8), own.view(torch.uint8), group=group or self._group, async_op=True)
            yield [Message(work, "all_gather_into_tensor")]

    def _swap(self, source: Tensor, goal: Tensor) -> Steps:
        if self.size == 1:
            goal.copy_(source)
        elif source.numel():
            arriving, flat = goal.view(torch.uint8), source.view(torch.uint8)
            yield [
                Message(dist.all_to_all_single(arriving, flat, group=self._group, async_op=True), "all_to_all_single")
            ]

    def _broadcast(self, flat: Tensor, source: int) -> Steps:
        if self.size > 1 and flat.numel():
            yield [Message(dist.broadcast(flat, group_src=source, group=self._group, async_op=True), "broadcast")]


class RankOrderTransport(NativeTransport):
    """Sums in rank order on any backend: parts go to their owners by all-to-all, which add them."""

    canonical = True

    def __init__(self, group: ProcessGroup, second: ProcessGroup | None = None) -> None:
        """Take the group.

        Args:
            group: of torch.distributed; this rank must be in it.
            second: of the same ranks, for what all_reduce sends when sums are ready, which may be at another place
                among the other collectives on each rank; None where all_reduce is not called, or not for the CPU.
        """
        super().__init__(group)
        self._second = second
        self._rooms = Rooms()

    def all_reduce(self, buffer: Tensor, *, divisor: float = 1, accumulate: torch.dtype | None = None) -> Work:
        """Sum parts at their owners, then gather them; see `Transport`."""
        call = reduction("all_reduce", buffer, divisor, accumulate)
        if self._second is None and buffer.device.type == "cpu" and self.size > 1:
            raise TransportError(f"rank {self.rank}: {call} needs a second group on the CPU, and none was given.")
        return self._start(call, buffer, partial(self._all_reduce, flat_buffer(buffer), call), rounds=True)

    def close(self) -> None:
        """Free the memory for arriving parts."""
        self._rooms.clear()

    def _reduce_scatter(self, flat: Tensor, own: Tensor, call: Call) -> Steps:
        if not flat.numel():
            return
        arriving, room = flat, None
        if self.size > 1:
            arriving, room = self._rooms.take(flat.numel(), flat.dtype, flat.device)
            work = dist.all_to_all_single(
                arriving.view(torch.uint8), flat.view(torch.uint8), group=self._group, async_op=True
            )
            yield [Message(work, "all_to_all_single")]
        add_in_order(arriving.tensor_split(self.size), own, call.divisor, call.accumulate)
        if room is not None:
            self._rooms.give_back(room)

    def _all_reduce(self, flat: Tensor, call: Call) -> Steps:
        padding = -flat.numel() % self.size
        even = torch.cat([flat, flat.new_zeros(padding)]) if padding else flat
        own = even.tensor_split(self.size)[self.rank]
        yield from self._reduce_scatter(even, own, call)
        yield from self._gather(even, own, self._second)
        if padding:
            flat.copy_(even[: flat.numel()])


class _Issued:
    """A collective of which all is issued to a side stream."""

    def __init__(self, buffer: Tensor, done: Any) -> None:
        self._buffer, self._done = buffer, done

    def wait(self) -> None:
        """Let the current stream wait for it."""
        torch.accelerator.current_stream(self._buffer.device).wait_event(self._done)


def _finish_sum(total: Tensor, goal: Tensor, call: Call) -> None:
    divide(total, call.divisor)
    if total.dtype != goal.dtype:
        goal.copy_(total)
