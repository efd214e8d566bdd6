"""Windows: a range or one index of sharded dims, without gathering them.

A rank holds a block of the window already: its own block cut with the window. What does not lie
where the result's own sharding wants it goes there in one exchange: a slice along a sharded dim
stays sharded and moves what crosses a block boundary, one index of a sharded dim goes from its
owner to all. Where nothing crosses a boundary the result is a view.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._comm.move import strip
from .._comm.record import note
from .._comm.steps import intersect, window_of
from .._dispatch import policy
from .._dispatch.copies import mark_copies
from .._order import in_order
from .._spec import Box, Spec, box_at, spec_of
from .._tensor import DTensor
from ..placements import I, R

_run = torch._C._disabled_torch_function_impl


class Range(NamedTuple):
    """Indices start, start + step, ... of one dim; `single` where an int chose the only one."""

    start: int
    step: int
    length: int
    single: bool


class Window:
    """What one rank sends and receives to take a window of a sharded tensor."""

    def __init__(self, source: Spec, ranges: dict[int, Range]) -> None:
        mesh = source.mesh
        self.source, self.ranges = source, ranges
        shape = [ranges[d].length if d in ranges else n for d, n in enumerate(source.shape)]
        types = tuple(I if t in ranges and ranges[t].single else t for t in source.types)
        self.target = spec_of(mesh, shape, types)
        self.varying = R in types
        self.axes = tuple(a for a, t in enumerate(source.types) if t in ranges and mesh.sizes[a] > 1)
        spread = [a for a in self.axes if ranges[source.types[a]].single]
        members = mesh.members(self.axes)
        held, wanted = [self._held(c) for c in members], [self.target.box_of(c) for c in members]
        me = members.index(mesh.coordinate)
        self.held, self.wanted = held[me], wanted[me]
        self.moves = any(self._differ(a, b) for a, b in zip(held, wanted, strict=True))
        self.send = [intersect(self.held, box) for box in wanted]
        self.receive = [intersect(box, self.wanted) for box in held]
        beside = [all(c[a] == mesh.coordinate[a] for a in spread) for c in members]
        self.back_send = [intersect(self.wanted, box) if near else None for box, near in zip(held, beside, strict=True)]
        self.back_receive = [
            intersect(box, self.held) if near else None for box, near in zip(wanted, beside, strict=True)
        ]
        self.back_local = len(spread) == len(self.axes)
        self.local = self._local_index()
        self.group = mesh.group(self.axes) if self.axes else None

    def _held(self, coordinate: tuple[int, ...]) -> Box:
        """Block of the window, in its own indices, that a rank holds before the exchange."""
        offset, length = map(list, box_at(self.source.mesh, self.source.shape, self.source.types, coordinate))
        for d, (start, step, count, _) in self.ranges.items():
            first = min(max(-(-(offset[d] - start) // step), 0), count)
            last = min(max(-(-(offset[d] + length[d] - start) // step), 0), count)
            offset[d], length[d] = first, last - first
        return tuple(offset), tuple(length)

    def _differ(self, a: Box, b: Box) -> bool:
        return any(a[1][d] != b[1][d] or (a[1][d] > 0 and a[0][d] != b[0][d]) for d in self.ranges)

    def _local_index(self) -> tuple[slice, ...]:
        index = [slice(None)] * self.source.ndim
        for d, (start, step, _, _) in self.ranges.items():
            count = self.held[1][d]
            first = start + self.held[0][d] * step - self.source.local_offset[d]
            index[d] = slice(first, first + (count - 1) * step + 1, step) if count else slice(0, 0)
        return tuple(index)

    def exchange(
        self, local: Tensor, origin: Box, send: list[Box | None], receive: list[Box | None], target: Box
    ) -> Tensor:
        """Send boxes of `local`, which covers `origin`, and assemble those received into `target`."""
        parts = [window_of(local, b, origin[0]).reshape(-1) for b in send if b]
        flat = torch.cat(parts) if parts else local.new_empty(0)
        take, give = [[math.prod(b[1]) if b else 0 for b in boxes] for boxes in (receive, send)]
        got = flat.new_empty(sum(take))
        note("all_to_all", flat.numel() * flat.element_size(), self.source.mesh, self.axes)
        dist.all_to_all_single(got, flat, take, give, group=self.group)
        out = got.new_zeros(target[1])
        for part, box in zip(torch.split(got, take), receive, strict=True):
            if box:
                window_of(out, box, target[0]).copy_(part.view(box[1]))
        return out

    def pull(self, local: Tensor) -> Tensor:
        """Local part of the window; dims keep their order in memory."""
        part = self.exchange(local[self.local], self.held, self.send, self.receive, self.wanted)
        return in_order(part, local.shape, local.stride())

    def push(self, grad: Tensor) -> Tensor:
        """Transpose of `pull`."""
        if self.back_local:
            mine = window_of(grad, (self.held[0], self.held[1]), self.wanted[0])
        else:
            mine = self.exchange(grad, self.wanted, self.back_send, self.back_receive, self.held)
        out = grad.new_zeros(self.source.local_shape)
        out[self.local] = mine
        return out

    def __call__(self, x: DTensor, name: str) -> DTensor:
        """Take the window of `x`."""
        local = strip(x)
        if self.moves:
            if policy.state.communication != "allow":
                policy.report(name, [(self.source, self.target.types)], " (it cuts a sharded dim)")
            r = _Pull.apply(local, self)  # type: ignore[no-untyped-call]
        else:
            r = local[self.local]
        r.__class__ = DTensor
        r._spec = self.target.invariant if self.varying and not torch.is_grad_enabled() else self.target
        if self.moves:
            mark_copies(r, name, x)
        return r  # type: ignore[no-any-return]


class _Pull(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, window: Window) -> Tensor:
        ctx.window = window
        return window.pull(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Push.apply(grad, ctx.window), None  # type: ignore[no-untyped-call]


class _Push(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, window: Window) -> Tensor:
        ctx.window = window
        return window.push(grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Pull.apply(grad, ctx.window), None  # type: ignore[no-untyped-call]
