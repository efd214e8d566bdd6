"""Rows that go to other ranks and come back: all-to-alls with uneven splits that autograd understands.

`dispatch` copies rows of a local tensor to the ranks that want them, `combine` adds up what comes back where
the rows came from. Each is the other's backward, so gradients of any order are right. Both keep the row numbers
as a saved tensor even where the data would not need it: under activation checkpointing reading it starts the
recomputation, with its all-to-alls, at the same place of the backward on every rank, whatever a rank got to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._comm.record import begin, end, note
from .._comm.steps import _SENT_AS
from .._mesh import Axes, MeshInfo


@dataclass(frozen=True, slots=True)
class Traffic:
    """How many rows go between this rank and the others of a group."""

    mesh: MeshInfo
    """Mesh that the ranks belong to."""
    axes: Axes
    """Mesh axes that the group spans."""
    send: list[int]
    """Rows for each rank of the group, in group order."""
    receive: list[int]
    """Rows from each rank of the group."""

    def back(self) -> Traffic:
        """The way back."""
        return Traffic(self.mesh, self.axes, self.receive, self.send)


def exchange(rows: Tensor, traffic: Traffic) -> Tensor:
    """Send the rows of a plain tensor, which lie in group order, and return what arrives in group order.

    Args:
        rows: [sum of `traffic.send`, ...], any dtype.
        traffic: numbers of rows.

    Returns:
        [sum of `traffic.receive`, ...].
    """
    if traffic.mesh.size_of(traffic.axes) == 1:
        return rows
    carrier = _SENT_AS.get(rows.dtype)
    sent = rows.contiguous() if carrier is None else rows.contiguous().view(carrier)
    received = sent.new_empty((sum(traffic.receive), *sent.shape[1:]))
    note("all_to_all", sent.numel() * sent.element_size(), traffic.mesh, traffic.axes)
    span = begin("Experts")
    dist.all_to_all_single(received, sent, traffic.receive, traffic.send, group=traffic.mesh.group(traffic.axes))
    end(span)
    return received if carrier is None else received.view(rows.dtype)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor, traffic: Traffic) -> Tensor:
        ctx.save_for_backward(index)
        ctx.traffic, ctx.length = traffic, source.shape[0]
        return exchange(source.index_select(0, index), traffic)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return combine(grad, index, ctx.traffic, ctx.length), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, traffic: Traffic, length: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.traffic = traffic
        back = exchange(rows, traffic.back())
        return back.new_zeros((length, *back.shape[1:])).index_add_(0, index, back)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (index,) = ctx.saved_tensors
        return dispatch(grad, index, ctx.traffic), None, None, None


def dispatch(source: Tensor, index: Tensor, traffic: Traffic) -> Tensor:
    """Send rows `index` of `source` out; row i goes to the rank whose turn in `traffic.send` it is.

    Args:
        source: [length, ...].
        index: [sum of `traffic.send`], int64, in group order of the receivers.
        traffic: numbers of rows.

    Returns:
        What arrived, [sum of `traffic.receive`, ...].
    """
    return _Dispatch.apply(source, index, traffic)  # type: ignore[no-any-return, no-untyped-call]


def combine(rows: Tensor, index: Tensor, traffic: Traffic, length: int) -> Tensor:
    """Send rows back to where `dispatch` took them, and add them up there.

    Args:
        rows: [sum of `traffic.receive`, ...], one for each row that arrived.
        index: as it was given to `dispatch`.
        traffic: as it was given to `dispatch`.
        length: rows of the result.

    Returns:
        [length, ...]; zero where nothing came back.
    """
    return _Combine.apply(rows, index, traffic, length)  # type: ignore[no-any-return, no-untyped-call]


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, *sources: Tensor) -> Tensor:
        ctx.like = [(s.shape, s.dtype, s.device) for s in sources]
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device) if needed else None
            for (shape, dtype, device), needed in zip(ctx.like, ctx.needs_input_grad[1:], strict=True)
        ]
        return grad, *zeros


def tie(result: Tensor, *sources: Tensor) -> Tensor:
    """Return `result` as if it had been computed from `sources`, which get zero gradients.

    A rank that no token reached computes nothing, but the others wait for it in the backward pass.
    """
    return _Tie.apply(result, *sources)  # type: ignore[no-any-return, no-untyped-call]
