"""Steps of plans that irregular cuts take part in: every rank's part is a few pieces, known to all beforehand.

Sizes differ from rank to rank, down to nothing, and not every backend gathers or scatters uneven parts, so what is
not of one size goes through an all-to-all with the true sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .._mesh import Axes
from .._pieces import Box, Holding, part_of, view_of
from .._spec import Spec, contiguous_stride
from .ranked import all_gather
from .record import note
from .steps import _ADDED_AS, _SENT_AS, Started, _added, _bytes, _carried, _flat, intersect

Meeting = tuple[int, int, Box]
"""Piece of one holding, piece of another, and the box that they share."""


def meetings(a: Holding, b: Holding) -> list[Meeting]:
    """What two holdings share, in an order that both sides of a message agree on."""
    found = []
    for i, one in enumerate(a.pieces):
        for j, other in enumerate(b.pieces):
            box = intersect(one.box, other.box)
            if box is not None:
                found.append((i, j, box))
    return found


def _relative(box: Box, base: Box) -> Box:
    return tuple(o - b for o, b in zip(box[0], base[0], strict=True)), box[1]


def _numel(shared: Sequence[Meeting]) -> int:
    return sum(math.prod(box[1]) for _, _, box in shared)


def _in_a_row(parts: Sequence[Holding], whole: Holding) -> bool:
    """Whether the elements of `parts`, one after the other, are those of `whole` in order: no packing is needed."""
    if len(whole.pieces) != 1:
        return False
    base = whole.pieces[0].box
    stride, passed = contiguous_stride(base[1]), 0
    for piece in (p for part in parts for p in part.pieces):
        offset, shape = _relative(piece.box, base)
        inner = itertools.dropwhile(lambda pair: pair[0] == 1, zip(shape, base[1], strict=True))
        dense = all(n == full for n, full in itertools.islice(inner, 1, None))
        if not dense or any(o < 0 for o in offset) or passed != sum(o * s for o, s in zip(offset, stride, strict=True)):
            return False
        passed += math.prod(shape)
    return passed == math.prod(base[1])


class _Packer:
    """Takes boxes out of a local part, or puts them there."""

    def __init__(self, held: Holding) -> None:
        self.held = held

    def window(self, local: Tensor, piece: int, box: Box) -> Tensor:
        """View of a box that lies in one piece."""
        found = self.held.pieces[piece]
        return part_of(view_of(local, found), _relative(box, found.box))

    def packed(self, local: Tensor, messages: Sequence[Sequence[Meeting]]) -> Tensor:
        """Elements of all messages, one after the other."""
        parts = [self.window(local, i, box) for shared in messages for i, _, box in shared]
        return _flat(parts) if parts else local.new_empty(0)

    def unpack(self, out: Tensor, shared: Sequence[Meeting], received: Tensor) -> None:
        """Put the elements of one message where they belong."""
        passed = 0
        for _, j, box in shared:
            count = math.prod(box[1])
            self.window(out, j, box).copy_(received[passed : passed + count].view(box[1]))
            passed += count


class LocalCopy:
    """Between layouts where this rank has all that it needs: keep its elements, zeros elsewhere. Nothing is sent."""

    def __init__(self, source: Spec, target: Spec) -> None:
        at = source.mesh.coordinate
        mine, wanted = source.pieces_of(at), target.pieces_of(at)
        self.shape, self.shared = wanted.shape, meetings(mine, wanted)
        self.source, self.target = _Packer(mine), _Packer(wanted)
        self.full = _numel(self.shared) == math.prod(wanted.shape)

    def start(self, local: Tensor) -> Started:
        return None, lambda: self._copy(local)

    def _copy(self, local: Tensor) -> Tensor:
        out = (local.new_empty if self.full else local.new_zeros)(self.shape)
        for i, j, box in self.shared:
            self.target.window(out, j, box).copy_(self.source.window(local, i, box))
        return out


class PieceExchange:
    """Cut to cut, or cut to whole, over `axes`: each rank sends every other rank what belongs there."""

    def __init__(self, source: Spec, target: Spec, axes: Axes) -> None:
        mesh = source.mesh
        self.mesh, self.axes, self.group = mesh, axes, mesh.group(axes)
        members = mesh.members(axes)
        held, wanted = [source.pieces_of(c) for c in members], [target.pieces_of(c) for c in members]
        me = members.index(mesh.coordinate)
        self.shape = wanted[me].shape
        self.source, self.target = _Packer(held[me]), _Packer(wanted[me])
        self.send = [meetings(held[me], w) for w in wanted]
        self.receive = [meetings(h, wanted[me]) for h in held]
        self.send_sizes, self.receive_sizes = list(map(_numel, self.send)), list(map(_numel, self.receive))
        sizes = [math.prod(h.shape) for h in held]
        self.most = max(sizes)
        everywhere = all(w == wanted[0] for w in wanted)
        self.gathers = everywhere and self._pays(sizes)
        self.in_a_row = everywhere and _in_a_row(held, wanted[0])

    def _pays(self, sizes: list[int]) -> bool:
        """Whether all parts go everywhere and are of nearly one size: gathering pads each of them to the largest."""
        return sum(self.receive_sizes) == sum(sizes) and 4 * self.most * len(sizes) <= 5 * sum(sizes)

    def start(self, local: Tensor) -> Started:
        if local.dtype in _SENT_AS:
            return _carried(self.start, local)
        if self.gathers:
            return self._gather(local)
        send = self.source.packed(local, self.send)
        received = send.new_empty(sum(self.receive_sizes))
        note("all_to_all", _bytes(send), self.mesh, self.axes)
        work = dist.all_to_all_single(
            received, send, self.receive_sizes, self.send_sizes, group=self.group, async_op=True
        )
        if self.in_a_row:
            return work, lambda: received.view(self.shape)
        return work, lambda: self._assemble(torch.split(received, self.receive_sizes), local)

    def _gather(self, local: Tensor) -> Started:
        send = local.reshape(-1) if self.in_a_row else self.source.packed(local, self.send[:1])
        if send.numel() < self.most:
            send = torch.cat([send, send.new_zeros(self.most - send.numel())])
        note("all_gather", _bytes(local), self.mesh, self.axes)
        received = send.new_empty(len(self.send) * self.most)
        work = all_gather(received, send, group=self.group, async_op=True)
        if self.in_a_row and self.most * len(self.send) == sum(self.receive_sizes):
            return work, lambda: received.view(self.shape)
        rows = received.view(len(self.send), self.most).unbind(0)
        return work, lambda: self._assemble(
            [row[:size] for row, size in zip(rows, self.receive_sizes, strict=True)], local
        )

    def _assemble(self, parts: Sequence[Tensor], local: Tensor) -> Tensor:
        if self.in_a_row:
            return torch.cat(list(parts)).view(self.shape)
        out = local.new_empty(self.shape)
        for part, shared in zip(parts, self.receive, strict=True):
            self.target.unpack(out, shared, part)
        return out


class PieceReduceScatter:
    """P to a cut over `axes`: each rank receives the parts of the sum that it keeps, and adds them in rank order."""

    def __init__(self, source: Spec, target: Spec, axes: Axes) -> None:
        mesh = source.mesh
        self.mesh, self.axes, self.group, self.num = mesh, axes, mesh.group(axes), mesh.size_of(axes)
        held = source.pieces_of(mesh.coordinate)
        wanted = target.pieces_of(mesh.coordinate)
        self.shape, self.source, self.target = wanted.shape, _Packer(held), _Packer(wanted)
        kept = [target.pieces_of(c) for c in mesh.members(axes)]
        self.send = [meetings(held, k) for k in kept]
        self.in_a_row = _in_a_row(kept, held)
        self.sizes = list(map(_numel, self.send))
        self.shared = meetings(held, wanted)
        self.mine = _numel(self.shared)

    def start(self, local: Tensor) -> Started:
        if local.dtype in _ADDED_AS:
            return _added(self.start, local)
        note("reduce_scatter", _bytes(local), self.mesh, self.axes)
        send = local.contiguous().view(-1) if self.in_a_row else self.source.packed(local, self.send)
        received = send.new_empty(self.num * self.mine)
        work = dist.all_to_all_single(
            received, send, [self.mine] * self.num, self.sizes, group=self.group, async_op=True
        )
        return work, lambda: self._add(received)

    def _add(self, received: Tensor) -> Tensor:
        first, *rest = received.view(self.num, self.mine).unbind(0)
        total = first + rest[0] if rest else first
        for part in rest[1:]:
            total += part
        if self.in_a_row:
            return total.view(self.shape)
        out = received.new_empty(self.shape)
        self.target.unpack(out, self.shared, total)
        return out
