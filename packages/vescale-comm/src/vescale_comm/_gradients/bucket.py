"""A bucket: parameters whose gradients stand in one flat buffer and are reduced together.

From the launch to the end of the reduction `param.grad` is None, so that nobody adds to a buffer that is under way.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .._plan import BufferPlan
from .._report.watch import label, watch
from .._transport import Transport, Work
from ..errors import TransportError
from .local import local_of
from .member import Member, uses
from .memory import BucketMemory
from .places import place_in

__all__ = ["Bucket"]


class Bucket:
    """Gradients that are reduced together.

    Args:
        plan: of the buffer.
        members: the parameters, in the order of the plan's slots.
        transport: over whose ranks the sum goes.
        dtype: of the buffer.
        divisor: of the sum.
        scatter: whether each rank gets its shard of the sum only.
        compressor: reduces in place of the transport; None: the transport does.
        release: have the memory of the buffer only while it is needed, and the shard apart.
    """

    buffer: Tensor
    """The gradients; after a reduction to shards, only `shard` of it means anything."""
    shard: Tensor
    """This rank's part of it."""

    def __init__(
        self,
        plan: BufferPlan,
        members: Sequence[Member],
        transport: Transport,
        *,
        dtype: torch.dtype,
        divisor: float,
        scatter: bool,
        compressor: Any = None,
        release: bool = False,
    ) -> None:
        self.plan = plan
        """Where each gradient stands."""
        self.members = list(members)
        self.parameters: list[Parameter] = [member.param for member in members]
        """In the order of the plan's slots."""
        self.transport, self.divisor, self.scatter, self.compressor = transport, divisor, scatter, compressor
        self._release = release and scatter
        self.apart = not scatter and divisor != transport.size
        """Whether results that stay for the next window are kept apart in it: what is reduced twice stays the same only
        where it is divided by the number of ranks."""
        self.left = 0
        """Gradients that are still to come in this window."""
        self.held = False
        """Whether it waits for the end of backward."""
        self.launched = False
        self.finished = False
        """Whether the buffer, or the shard, holds a sum; until the next launch, or `clear`."""
        self.used = [False] * len(self.members)
        """Per parameter, whether some rank had a gradient in the windows of which there is the result."""
        self.launched_at = self.wait_began = self.wait_ended = 0.0
        """Seconds of `time.perf_counter` in the last window."""
        self.token: object = None
        """Of the span that a timeline records."""
        self._pointed = False
        self._base: Tensor | None = None
        self._kept: Tensor | None = None
        self._work: Work | None = None
        self._narrow: Tensor | None = None
        for member in self.members:
            member.wide = member.param.dtype != dtype
        self._use(transport.allocate(plan.numel, dtype, members[0].param.device))

    def _use(self, buffer: Tensor) -> None:
        """Have the gradients in a buffer from now on."""
        plan, rank = self.plan, self.transport.rank
        self.buffer = buffer
        self.shard = buffer[rank * plan.shard : (rank + 1) * plan.shard]
        for member, slot in zip(self.members, plan.slots, strict=True):
            member.view = place_in(buffer, slot, None if self.scatter else local_of(member.param))
            member.placed = member.view.detach()
        if not self.scatter:
            self._give_places()
        self._memory: BucketMemory | None = None
        if self._release and buffer.untyped_storage().resizable():
            self._memory = BucketMemory(buffer, plan, rank)
            self.shard = self._memory.shard
        for member in self.members:
            member.count()
        self._uses = uses(buffer)

    def _give_places(self) -> None:
        """Make what `param.grad` becomes: places in this buffer or, for another dtype, in a second one."""
        self._narrow = None
        for member, slot in zip(self.members, self.plan.slots, strict=True):
            if not member.plain:
                member.given = torch.empty_like(member.param.detach())
            elif member.wide:
                if self._narrow is None:
                    self._narrow = torch.zeros(self.plan.numel, dtype=member.param.dtype, device=self.buffer.device)
                member.given = place_in(self._narrow, slot, member.param)
            else:
                member.given = member.view
        for member in self.members:
            member.count()
        self._narrow_uses = 0 if self._narrow is None else uses(self._narrow)

    @property
    def names(self) -> list[str]:
        """Names of the parameters."""
        return [member.name for member in self.members]

    def ready(self) -> bool:
        """Tell whether all gradients are there, and will not change any more in this backward."""
        return self.left <= 0 and not self.held

    def open(self) -> None:
        """Begin a window."""
        self.left = sum(param.requires_grad for param in self.parameters)
        self.held = any(member.hold for member in self.members)
        self.launched = False

    def hold_memory(self) -> None:
        """Have memory in the buffer before something is written to it."""
        if self._memory is not None:
            self._memory.hold()

    def place(self, member: Member) -> None:
        """Bring a gradient into the buffer, unless what was reduced before, or somebody else's is still there."""
        if not member.is_apart():
            return
        if (self.scatter and self.finished) or member.is_kept() or uses(self.buffer) > self._uses:
            member.widen()
        else:
            self.hold_memory()
            member.place()

    def gather(self, touched: bytearray, used: bytearray, flag: int) -> None:
        """Bring the gradients into the buffer, and leave none at the parameters.

        Args:
            touched: nonzero for parameters to which a backward added in this window.
            used: gets `flag` for parameters that have something to sum.
            flag: what to set.
        """
        self.hold_memory()
        absent, apart, grads = self._take(touched, used, flag)
        # Where each rank gets its shard only, what comes into the other places is no gradient of anybody.
        if self._is_kept(self.members if self.scatter else [m for m in absent + apart if not m.stays]):
            self._move()
        if absent:
            torch._foreach_zero_([member.view for member in absent])
        if apart:
            torch._foreach_copy_([member.view for member in apart], grads)

    def _take(self, touched: bytearray, used: bytearray, flag: int) -> tuple[list[Member], list[Member], list[Tensor]]:
        """Take the gradients from the parameters; return who has none, and who has which that is not in the buffer."""
        absent: list[Member] = []
        apart: list[Member] = []
        grads: list[Tensor] = []
        for member in self.members:
            grad = member.param.grad
            if grad is None or (self._pointed and grad is member.view and not touched[member.index]):
                member.take()
                absent.append(member)
                continue
            member.stays |= grad is member.given
            reduced = not touched[member.index] and self._is_reduced(member)
            if reduced:
                member.base = member.local(grad).clone()
            else:
                used[member.index] |= flag
            if reduced and self.apart:
                absent.append(member)
            elif grad is not member.view and grad is not member.placed:
                apart.append(member)
                grads.append(member.contribution(grad))
            elif grad.requires_grad:
                member.contribution(grad)
            member.take()
        return absent, apart, grads

    def _is_kept(self, members: Sequence[Member]) -> bool:
        """Tell whether somebody else has gradients of members in the buffer; not to be asked while parameters have.

        Args:
            members: of whom others must not see what comes into their places.
        """
        if len(members) == len(self.members) and uses(self.buffer) > self._uses:
            return True
        return any(member.is_kept() for member in members)

    def _move(self) -> None:
        """Leave the memory to those who keep gradients there."""
        before = self.buffer
        self._use(self.transport.allocate(before.numel(), before.dtype, before.device))
        self.hold_memory()
        self.buffer.copy_(before)

    def _is_reduced(self, member: Member) -> bool:
        return self.finished and member.given is not None and member.param.grad is member.given

    def point_at_buffer(self) -> None:
        """Have autograd add in the buffer from the start, if no parameter has a gradient and nobody else has one."""
        none = all(member.param.grad is None and member.plain for member in self.members)
        if not none or self._is_kept(self.members):
            return
        self.buffer.zero_()
        self.finished, self._pointed = False, True
        for member in self.members:
            member.point()

    def drop(self) -> None:
        """Forget what was reduced in this window; the shard that was there before is there again."""
        self.finished = self._base is not None
        if self._base is not None:
            self.shard.copy_(self._base)
        self._base = self._kept = None
        for member in self.members:
            member.base, member.stays = None, False

    def leave_none(self) -> None:
        """Leave no gradient at any parameter."""
        for member in self.members:
            member.take()

    def drop_results(self) -> None:
        """Take away the gradients that were given."""
        for member in self.members:
            if self._is_reduced(member):
                member.param.grad = None

    def add_fresh(self, member: Member, grad: Tensor) -> None:
        """Add a gradient of the next window to the one that was given for this one, meanwhile."""
        reduced = member.param.grad
        if reduced is None or reduced is grad or self.apart:
            member.base = None if reduced is None or reduced is grad else member.local(reduced).clone()
            member.param.grad = grad
        else:
            member.local(reduced).add_(member.contribution(grad))

    def put_aside(self, member: Member) -> None:
        """Keep a gradient that is reduced already from being reduced again; to be called before autograd adds to it."""
        if self._is_reduced(member):
            member.base = member.local(member.given).clone()  # type: ignore[arg-type]
            member.param.grad, member.stays = None, True

    def launch(self, divisor: float, weight: float) -> None:
        """Start the reduction of what is in the buffer.

        Args:
            divisor: of the sum.
            weight: by which this rank's gradients are multiplied.
        """
        self.launched, self.finished, self._pointed = True, False, False
        self.launched_at = time.perf_counter()
        self.hold_memory()
        if weight != 1:
            self.buffer.mul_(weight)
        if not self.buffer.numel():
            return
        try:
            self._work = self._start(divisor)
        except TransportError as error:
            raise self._failed(error) from error
        operation = "reduce_scatter" if self.scatter else "all_reduce"
        self._work = watch(self._work, operation, lambda: label(self.names), self._sent, self.launched_at, span=False)

    def _start(self, divisor: float) -> Work:
        if self.compressor is not None:
            compressed: Work = self.compressor.reduce(self.buffer, self.plan, self.transport, divisor, self.scatter)
            return compressed
        accumulate = None
        if self.buffer.is_floating_point() and self.buffer.itemsize < 4:
            # Sums of many ranks in 16 bits lose what single ranks add, and may overflow where their mean does not.
            if self.transport.canonical:
                accumulate = torch.float32
            else:  # there it would double what is sent
                self.buffer.div_(divisor)
                divisor = 1
        reduce = self.transport.reduce_scatter if self.scatter else self.transport.all_reduce
        return reduce(self.buffer, divisor=divisor, accumulate=accumulate)

    def _failed(self, error: TransportError) -> TransportError:
        return TransportError(f"While gradients of {_span(self.names)} were reduced: {error}")

    def _sent(self) -> int:
        return int(getattr(self.compressor, "wire_bytes", self.buffer.nbytes))

    def keep_sum(self) -> None:
        """Have the sum that is there added to the next one, which is launched now, before weights divide it."""
        self._kept = self.sum.clone()

    def keep_result(self) -> None:
        """Have the result of a window before added to that of this one."""
        self._base = self.sum.clone()

    def divide_by_weights(self, total: float) -> None:
        """Divide the sum by the weights of the ranks, in place of the divisor.

        Where these are equal, as where all weights are 1, the bits are those of a sum without weights.
        """
        if total != self.divisor:
            self.sum.mul_(self.divisor / total)

    @property
    def sum(self) -> Tensor:
        """Where the sum stands after a reduction."""
        return self.shard if self.scatter else self.buffer

    def wait(self) -> None:
        """Wait for the reduction.

        Raises:
            TransportError: it failed; the text names the bucket by its parameters.
        """
        self.wait_began = time.perf_counter()
        try:
            if self._work is not None:
                self._work.wait()
        except TransportError as error:
            self._work = None
            raise self._failed(error) from error
        self._work = None  # not if the wait was interrupted: it still goes on then
        self.wait_ended = time.perf_counter()
        if self._memory is not None:
            self._memory.keep_shard()
        if self._kept is not None:
            self.sum.add_(self._kept)
            self._kept = None
        self.finished = True

    def give(self, used: Sequence[int] | None) -> None:
        """Hand the sums to the parameters.

        Args:
            used: per parameter, nonzero if some rank had a gradient; None: all had.
        """
        base, self._base = self._base, None
        fresh = [used is None or bool(used[member.index]) for member in self.members]
        self.used = fresh if base is None else [a or b for a, b in zip(self.used, fresh, strict=True)]
        if self.scatter:
            if base is not None:
                self.shard.add_(base)
            return
        if self._is_given_kept():
            self._give_places()
        if self._narrow is not None:
            self._narrow.copy_(self.buffer)
        for member in self.members:
            given, before = member.given, member.base
            if not member.plain:
                member.local(given).copy_(member.view)  # type: ignore[arg-type]
            if used is None or used[member.index]:
                if before is not None and self.apart:
                    member.local(given).add_(before)  # type: ignore[arg-type]
                member.param.grad = given
            elif before is not None:
                member.local(given).copy_(before)  # type: ignore[arg-type]
                member.param.grad = given
            member.base, member.stays = None, False

    def _is_given_kept(self) -> bool:
        """Tell whether somebody else has gradients of a window before, where those of this one are to be given."""
        going = [member for member in self.members if not member.stays]
        if self._narrow is not None and len(going) == len(self.members) and uses(self._narrow) > self._narrow_uses:
            return True
        return any(member.is_given_kept() for member in going)


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)} parameters)"
