"""A bucket: parameters whose gradients stand in one flat buffer and are reduced together.

Until a bucket is launched, `param.grad` is the truth: what the user did to it counts, whether it was zeroed, replaced
or dropped. From the launch to the end of the reduction it is None, so that nobody adds to a buffer that is under way.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .._plan import BufferPlan, Slot
from .._report.watch import label, watch
from .._transport import Transport, Work
from ..errors import CommError, TransportError
from .local import is_plain, local_gradient, local_of
from .memory import BucketMemory

__all__ = ["Bucket", "Member"]


class Member:
    """A parameter in its bucket."""

    __slots__ = ("axes", "base", "given", "hold", "index", "name", "param", "placed", "plain", "view", "wide")

    def __init__(self, name: str, param: Parameter, index: int, axes: tuple[int, ...]) -> None:
        self.name, self.param = name, param
        self.index = index
        """Of its flags."""
        self.axes = axes
        """Mesh axes over which its gradient comes as a pending sum."""
        self.plain = is_plain(param)
        """Whether its gradient is a tensor that may lie in a buffer."""
        self.wide = False
        """Whether the buffer has another dtype than the gradient."""
        self.hold = False
        """Whether backwards inside backwards add to it, so that its bucket waits for the end of the outermost one."""
        self.view: Tensor = torch.empty(0)
        """Its place in the buffer."""
        self.placed: Tensor = self.view
        """The same place, as `param.grad` while it holds what is not reduced yet."""
        self.given: Tensor | None = None
        """What `param.grad` becomes after the reduction; None: nothing."""
        self.base: Tensor | None = None
        """A gradient that is reduced already, to be added to the result."""

    def local(self, tensor: Tensor) -> Tensor:
        """Return the part on this rank of a tensor of the parameter's kind, such as `given`."""
        return tensor if self.plain else local_of(tensor)

    def contribution(self, grad: Tensor) -> Tensor:
        """Return what of a gradient is to be summed.

        Raises:
            CommError: no reduction can take this gradient.
        """
        if grad.requires_grad:
            raise CommError(
                f"{self.name}: its gradient has a graph, as backward(create_graph=True) leaves it, and reducing would "
                "cut it. Take second derivatives with torch.autograd.grad, or run this backward under no_sync()."
            )
        if grad.layout is not torch.strided:
            raise CommError(
                f"{self.name}: its gradient is {grad.layout}; only dense gradients are reduced. Make the module with "
                "sparse=False, or leave the parameter out of the reduction."
            )
        return grad if self.plain else local_gradient(self.name, self.param, grad, self.axes)

    def place(self) -> None:
        """Bring the gradient into the buffer, while caches have it; autograd adds the next ones there."""
        grad = self.param.grad
        if grad is None or grad is self.placed or grad is self.view or not self.plain:
            return
        if grad.requires_grad or grad.layout is not torch.strided:
            return  # what cannot be reduced is told when it is to be
        self.view.copy_(grad)
        if self.wide:
            self.param.grad = None
            self.param.grad_dtype = self.view.dtype
        self.param.grad = self.placed

    def take(self) -> None:
        """Leave no gradient at the parameter."""
        self.param.grad = None
        if self.wide and self.plain:
            self.param.grad_dtype = self.param.dtype


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
        device = members[0].param.device
        self.buffer = transport.allocate(plan.numel, dtype, device)
        """The gradients; after a reduction to shards, only `shard` of it means anything."""
        self.shard = self.buffer[transport.rank * plan.shard : (transport.rank + 1) * plan.shard]
        """This rank's part of it."""
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
        for member, slot in zip(members, plan.slots, strict=True):
            member.view = _place(self.buffer, slot, None if scatter else local_of(member.param))
            member.placed = member.view.detach()
            member.wide = member.param.dtype != dtype
        if not scatter:
            self._give_places(device)
        self._memory: BucketMemory | None = None
        if release and scatter and self.buffer.untyped_storage().resizable():
            self._memory = BucketMemory(self.buffer, plan, transport.rank)
            self.shard = self._memory.shard

    def _give_places(self, device: torch.device) -> None:
        """Make what `param.grad` becomes: places in this buffer or, for another dtype, in a second one."""
        self._narrow = None
        for member, slot in zip(self.members, self.plan.slots, strict=True):
            if not member.plain:
                member.given = torch.empty_like(member.param.detach())
            elif member.wide:
                if self._narrow is None:
                    self._narrow = torch.zeros(self.plan.numel, dtype=member.param.dtype, device=device)
                member.given = _place(self._narrow, slot, member.param)
            else:
                member.given = member.view

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
        """Bring a gradient into the buffer, unless what was reduced before is still there."""
        if not (self.scatter and self.finished):
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
        views: list[Tensor] = []
        grads: list[Tensor] = []
        absent: list[Tensor] = []
        for member in self.members:
            param = member.param
            grad = param.grad
            if grad is None or (self._pointed and grad is member.view and not touched[member.index]):
                member.take()
                absent.append(member.view)
                continue
            reduced = not touched[member.index] and self._is_reduced(member)
            if reduced:
                member.base = member.local(grad).clone()
            else:
                used[member.index] |= flag
            if reduced and self.apart:
                absent.append(member.view)
            else:
                if grad is not member.view and grad is not member.placed:
                    views.append(member.view)
                    grads.append(member.contribution(grad))
                elif grad.requires_grad:
                    member.contribution(grad)
            member.take()
        if absent:
            torch._foreach_zero_(absent)
        if views:
            torch._foreach_copy_(views, grads)

    def _is_reduced(self, member: Member) -> bool:
        return self.finished and member.given is not None and member.param.grad is member.given

    def point_at_buffer(self) -> None:
        """Have autograd add in the buffer from the start, if no parameter has a gradient."""
        if all(member.param.grad is None and member.plain for member in self.members):
            self.buffer.zero_()
            self.finished, self._pointed = False, True
            for member in self.members:
                if member.wide:
                    member.param.grad_dtype = self.buffer.dtype
                member.param.grad = member.view

    def drop(self) -> None:
        """Forget what was reduced in this window; the shard that was there before is there again."""
        self.finished = self._base is not None
        if self._base is not None:
            self.shard.copy_(self._base)
        self._base = self._kept = None
        for member in self.members:
            member.base = None

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
            member.param.grad = None

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
        if self.scatter:
            return self.transport.reduce_scatter(self.buffer, divisor=divisor)
        return self.transport.all_reduce(self.buffer, divisor=divisor)

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
        work, self._work = self._work, None
        self.wait_began = time.perf_counter()
        try:
            if work is not None:
                work.wait()
        except TransportError as error:
            raise self._failed(error) from error
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
            member.base = None


def _place(buffer: Tensor, slot: Slot, like: Tensor | None) -> Tensor:
    """Return the part of a buffer for a tensor, with the strides of `like` if those leave no holes."""
    if like is None or like.is_contiguous() or not _is_dense(like):
        return buffer[slot.offset : slot.stop].view(slot.shape)
    return buffer.as_strided(slot.shape, like.stride(), buffer.storage_offset() + slot.offset)


def _is_dense(tensor: Tensor) -> bool:
    """Tell whether a tensor's elements fill their memory, in some order of the dims."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride != expected:
                return False
            expected *= length
    return True


def _span(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)} parameters)"
