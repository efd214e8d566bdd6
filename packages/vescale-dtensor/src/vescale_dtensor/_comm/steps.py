"""The steps that redistribution plans consist of, on plain local tensors, without autograd.

Each step knows the boxes of all ranks beforehand, so running it is packing, one collective, and
unpacking. `start` issues the collective and returns its work with a function that finishes the
step; synchronous callers wait at once, asynchronous ones later.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .._mesh import Axes, MeshInfo
from .._spec import Box, Spec
from .._tap import slot
from .buffers import Pool
from .ranked import RankedSum, all_gather, goes_whole
from .record import begin, end, note

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13


class Waits(Protocol):
    """Something under way."""

    def is_completed(self) -> bool: ...

    def wait(self) -> object: ...


Started = tuple[Waits | None, Callable[[], Tensor]]
"""A running collective (None: nothing to wait for) and what to call once it is done."""


class Step(Protocol):
    """One move of local data."""

    def start(self, local: Tensor) -> Started: ...


_SENT_AS = {
    torch.int16: torch.float16, torch.uint16: torch.float16, torch.uint32: torch.int32, torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8,
    torch.float8_e4m3fnuz: torch.uint8, torch.float8_e5m2fnuz: torch.uint8,
}  # fmt: skip
"""Types that gloo cannot send, and types of the same size that carry their bits."""

_ADDED_AS = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
"""Types that gloo cannot add, and types that hold their sums."""


_SUM = dist.AllreduceOptions()
if hasattr(_SUM, "asyncOp"):
    _SUM.asyncOp = True


def _carried(start: Callable[[Tensor], Started], local: Tensor) -> Started:
    """Send the bits of a tensor whose type the backend cannot send."""
    dtype = local.dtype
    work, finish = start(local.view(_SENT_AS[dtype]))
    return work, lambda: finish().view(dtype)


def _added(start: Callable[[Tensor], Started], local: Tensor) -> Started:
    """Add in a type that the backend can add."""
    dtype = local.dtype
    work, finish = start(local.to(_ADDED_AS[dtype]))
    return work, lambda: finish().to(dtype)


def _bytes(t: Tensor) -> int:
    return t.numel() * t.element_size()


def _flat(parts: list[Tensor]) -> Tensor:
    return torch.cat([p.reshape(-1) for p in parts])


def _in_memory(t: Tensor) -> Tensor:
    """A contiguous tensor whose memory is its values: conjugates and negatives may be mere flags."""
    return t.contiguous().resolve_conj().resolve_neg()


def window_of(t: Tensor, box: Box, origin: tuple[int, ...]) -> Tensor:
    """View of the part of `t` (whose first element lies at `origin`) that is `box`."""
    for dim, (start, length, base) in enumerate(zip(*box, origin, strict=True)):
        if t.shape[dim] != length:
            t = t.narrow(dim, start - base if length else 0, length)
    return t


def intersect(a: Box, b: Box) -> Box | None:
    """Common part of two boxes, or None where they share no element."""
    start = tuple(map(max, a[0], b[0]))
    end = tuple(min(sa + la, sb + lb) for sa, la, sb, lb in zip(*a, *b, strict=True))
    length = tuple(e - s for s, e in zip(start, end, strict=True))
    return (start, length) if all(n > 0 for n in length) else None


def _in_order(boxes: list[Box], dim: int) -> bool:
    """Whether the boxes of a group, in group order, follow each other along `dim`."""
    return all(a[0][dim] + a[1][dim] == b[0][dim] for a, b in itertools.pairwise(boxes))


class Relabel:
    """Between I and R, or along axes of one rank: the data stay, a new tensor object labels them."""

    def start(self, local: Tensor) -> Started:
        return None, local.detach


class Slice:
    """I or R to S: keep this rank's block. Nothing is sent."""

    def __init__(self, source: Spec, target: Spec) -> None:
        self.box = (target.local_offset, target.local_shape)
        self.origin = source.local_offset

    def start(self, local: Tensor) -> Started:
        return None, lambda: window_of(local, self.box, self.origin).clone(memory_format=torch.contiguous_format)


class Pad:
    """S to P: the block stands among zeros. Nothing is sent."""

    def __init__(self, source: Spec, target: Spec) -> None:
        self.shape = target.local_shape
        self.box = (source.local_offset, source.local_shape)
        self.origin = target.local_offset

    def start(self, local: Tensor) -> Started:
        def finish() -> Tensor:
            out = local.new_zeros(self.shape)
            window_of(out, self.box, self.origin).copy_(local)
            return out

        return None, finish


class KeepFirst:
    """I or R to P: the first rank of the axes keeps the value, the others hold zero."""

    def __init__(self, mesh: MeshInfo, axes: Axes) -> None:
        self.first = all(mesh.coordinate[a] == 0 for a in axes)

    def start(self, local: Tensor) -> Started:
        return None, local.clone if self.first else lambda: torch.zeros_like(local)


class AllReduce:
    """P to I or R, over one or several axes at once."""

    def __init__(self, mesh: MeshInfo, axes: Axes) -> None:
        self.mesh, self.axes = mesh, axes
        self.group, self.num = mesh.group(axes), mesh.size_of(axes)
        self._on_gloo: bool | None = None
        """Whether tensors of a CPU travel by gloo; None: nobody has asked yet."""

    def start(self, local: Tensor) -> Started:
        if local.dtype in _ADDED_AS:
            return _added(self.start, local)
        out = local.clone(memory_format=torch.contiguous_format)
        return self.start_in_place(out), lambda: out

    def start_in_place(self, out: Tensor, pool: Pool | None = None) -> Waits | None:
        """Start reducing a contiguous tensor where it lies.

        Args:
            out: the tensor.
            pool: where further memory comes from; None: anew.
        """
        num_bytes = _bytes(out)
        note("all_reduce", num_bytes, self.mesh, self.axes)
        if self._on_gloo is not False and self._gathers(num_bytes, out.device):
            return RankedSum(out, self.group, self.num, pool)
        # The group's own method: the wrappers of torch.distributed.all_reduce cost more than the rest of a small cast.
        work: dist.Work | None = self.group.allreduce([torch.view_as_real(out) if out.is_complex() else out], _SUM)
        return work

    def start_ranked(self, out: Tensor, pool: Pool | None = None) -> Waits | None:
        """Start reducing a contiguous tensor where it lies, in the order of ranks (see `ranked`): for parameters.

        Args:
            out: the tensor.
            pool: where further memory comes from; None: anew.
        """
        inexact = out.is_floating_point() or out.is_complex()  # the order of whole numbers leaves no trace
        if not inexact or not out.numel() or self.is_ranked(_bytes(out), out.device):
            return self.start_in_place(out, pool)
        note("all_reduce", _bytes(out), self.mesh, self.axes)
        return RankedSum(out, self.group, self.num, pool)

    def is_ranked(self, num_bytes: int, device: torch.device) -> bool:
        """Whether every sum of so many bytes is one in the order of ranks; the order of two addends leaves no trace."""
        return self.num <= 2 or self._gathers(num_bytes, device)

    def _gathers(self, num_bytes: int, device: torch.device) -> bool:
        """Whether everybody sends a small message to all and adds by itself: half the rounds of gloo's all-reduce."""
        if device.type != "cpu" or not num_bytes or not goes_whole(num_bytes, self.num):
            return False
        if self._on_gloo is None:
            self._on_gloo = "cpu:gloo" in dist.get_backend_config(self.group)
        return self._on_gloo

    def run_in_place(self, out: Tensor, *, ranked: bool = False) -> None:
        """Reduce a contiguous tensor where it lies.

        Args:
            out: the tensor.
            ranked: add in the order of ranks.
        """
        if slot.active and slot.recorder is not None:
            slot.recorder.atomic(self.run_in_place, (out,), {"ranked": ranked}, writes=True)
            return
        span = begin("AllReduce")
        work = self.start_ranked(out) if ranked else self.start_in_place(out)
        if work is not None:
            work.wait()
        end(span)


class AllGather:
    """S to I or R: every rank of `axes` receives all blocks."""

    def __init__(self, source: Spec, target: Spec, axes: Axes) -> None:
        mesh = source.mesh
        self.mesh, self.axes, self.group, self.num = mesh, axes, mesh.group(axes), mesh.size_of(axes)
        self.shape, self.origin = target.local_shape, target.local_offset
        self.boxes = [source.box_of(c) for c in mesh.members(axes)]
        sizes = [math.prod(shape) for _, shape in self.boxes]
        self.most = max(sizes)
        self.sizes = sizes
        even = len({shape for _, shape in self.boxes}) == 1
        dims = {t for a, t in enumerate(source.types) if a in axes}
        dim = next(iter(dims)) if len(dims) == 1 else None
        self.concat_dim = dim if even and dim is not None and _in_order(self.boxes, dim) else None

    def start(self, local: Tensor) -> Started:
        if local.dtype in _SENT_AS:
            return _carried(self.start, local)
        send = _in_memory(local)
        if self.concat_dim is None:
            send = send.reshape(-1)
            if send.numel() < self.most:
                send = torch.cat([send, send.new_zeros(self.most - send.numel())])
        note("all_gather", _bytes(local), self.mesh, self.axes)
        if self.concat_dim == 0:
            out = send.new_empty(self.shape)
            work = all_gather(out, send, group=self.group, async_op=True)
            return work, lambda: out
        received = send.new_empty((self.num * send.shape[0], *send.shape[1:]) if send.ndim else (self.num,))
        work = all_gather(received, send, group=self.group, async_op=True)
        parts = received.view(self.num, *send.shape)
        return work, lambda: self._concat(parts) if self.concat_dim is not None else self._assemble(parts)

    def _concat(self, parts: Tensor) -> Tensor:
        assert self.concat_dim is not None
        return torch.cat(parts.unbind(0), self.concat_dim)

    def _assemble(self, parts: Tensor) -> Tensor:
        out = parts.new_empty(self.shape)
        for part, box, size in zip(parts, self.boxes, self.sizes, strict=True):
            if size:
                window_of(out, box, self.origin).copy_(part[:size].view(box[1]))
        return out


class Exchange:
    """S to S over `axes`: each rank sends every other rank the part of its block that belongs there."""

    def __init__(self, source: Spec, target: Spec, axes: Axes) -> None:
        mesh = source.mesh
        self.mesh, self.axes, self.group = mesh, axes, mesh.group(axes)
        self.shape, self.out_origin, self.in_origin = (
            target.local_shape,
            target.local_offset,
            source.local_offset,
        )
        mine_in, mine_out = source.box_of(mesh.coordinate), target.box_of(mesh.coordinate)
        members = mesh.members(axes)
        self.send = [intersect(mine_in, target.box_of(c)) for c in members]
        self.receive = [intersect(source.box_of(c), mine_out) for c in members]
        self.send_sizes = [math.prod(b[1]) if b else 0 for b in self.send]
        self.receive_sizes = [math.prod(b[1]) if b else 0 for b in self.receive]

    def start(self, local: Tensor) -> Started:
        if local.dtype in _SENT_AS:
            return _carried(self.start, local)
        parts = [window_of(local, b, self.in_origin) for b in self.send if b]
        send = _flat(parts) if parts else local.new_empty(0)
        received = send.new_empty(sum(self.receive_sizes))
        note("all_to_all", _bytes(send), self.mesh, self.axes)
        work = dist.all_to_all_single(
            received, send, self.receive_sizes, self.send_sizes, group=self.group, async_op=True
        )
        return work, lambda: self._assemble(received)

    def _assemble(self, received: Tensor) -> Tensor:
        out = received.new_empty(self.shape)
        for part, box in zip(torch.split(received, self.receive_sizes), self.receive, strict=True):
            if box:
                window_of(out, box, self.out_origin).copy_(part.view(box[1]))
        return out


class ReduceScatter:
    """P to S over `axes`: each rank receives the sum of its block.

    gloo's own reduce-scatter sends a whole all-reduce and drops most of it, so off NCCL the blocks
    are exchanged and added here, in rank order.
    """

    def __init__(self, source: Spec, target: Spec, axes: Axes) -> None:
        mesh = source.mesh
        self.mesh, self.axes, self.group, self.num = mesh, axes, mesh.group(axes), mesh.size_of(axes)
        self.shape, self.origin = target.local_shape, source.local_offset
        self.boxes = [target.box_of(c) for c in mesh.members(axes)]
        self.sizes = [math.prod(shape) for _, shape in self.boxes]
        self.mine = math.prod(self.shape)
        self.native = mesh.device_type != "cpu"
        in_place = math.prod(source.local_shape) == sum(self.sizes)
        dims = {t for a, t in enumerate(target.types) if a in axes}
        self.contiguous = dims == {0} and in_place and len(axes) == 1 and _in_order(self.boxes, 0)

    def start(self, local: Tensor) -> Started:
        if local.dtype in _ADDED_AS:
            return _added(self.start, local)
        note("reduce_scatter", _bytes(local), self.mesh, self.axes)
        return self._start_native(local) if self.native else self._start_exchange(local)

    def _start_exchange(self, local: Tensor) -> Started:
        if self.contiguous:
            send = _in_memory(local).view(-1)  # reshape(-1) would keep the stride of a 1-d tensor
        else:
            send = _flat([window_of(local, b, self.origin) for b in self.boxes])
        received = send.new_empty(self.num * self.mine)
        work = dist.all_to_all_single(
            received, send, [self.mine] * self.num, self.sizes, group=self.group, async_op=True
        )
        return work, lambda: self._add(received)

    def _add(self, received: Tensor) -> Tensor:
        first, *rest = received.view(self.num, *self.shape).unbind(0)
        out = first + rest[0] if rest else first.clone()
        for part in rest[1:]:
            out += part
        return out

    def _start_native(self, local: Tensor) -> Started:
        most = max(self.sizes)
        send = local.new_zeros(self.num, most)
        for row, box, size in zip(send, self.boxes, self.sizes, strict=True):
            row[:size].view(box[1]).copy_(window_of(local, box, self.origin))
        out = send.new_empty(most)
        work = _reduce_scatter(out, send.view(-1), group=self.group, async_op=True)
        return work, lambda: out[: self.mine].view(self.shape)


class ReduceExtremum:
    """Maximum or minimum over `axes`, in place; for rules that need one (softmax, amax)."""

    def __init__(self, mesh: MeshInfo, axes: Axes, op: dist.ReduceOp.RedOpType) -> None:
        self.mesh, self.axes, self.group, self.op = mesh, axes, mesh.group(axes), op

    def run(self, out: Tensor) -> Tensor:
        if slot.active and slot.recorder is not None:
            reduced: Tensor = slot.recorder.atomic(self.run, (out,), {}, writes=True)
            return reduced
        note("all_reduce", _bytes(out), self.mesh, self.axes)
        dist.all_reduce(out, op=self.op, group=self.group)
        return out
