"""The bytes of the pieces that this rank writes: taken where they lie, or copied into host buffers that are reused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _codec
from .._geometry import Box, Piece, normal

if TYPE_CHECKING:
    from .staging import StagingPool

__all__ = ["Staged", "Task", "stage"]

ALIGN = 64
"""Staged pieces begin at multiples of this many bytes: the widest loads, and room for every dtype."""


@dataclass(frozen=True, slots=True)
class Task:
    """A piece that this rank has to write."""

    number: int
    """Of its tensor, as in the index."""
    piece: Piece
    """Which elements."""
    sources: tuple[tuple[Piece, Tensor], ...]
    """Parts of this rank's memory that hold them: a box's elements (all of it) and the view that holds the box."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: torch.dtype
    """Its dtype."""
    itemsize: int
    """Bytes per element."""

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return self.piece.numel * self.itemsize


@dataclass(frozen=True, slots=True)
class Staged:
    """A task and its bytes."""

    task: Task
    """What is written."""
    data: Tensor
    """Its bytes, 1-D uint8, contiguous, on the CPU."""


def stage(tasks: Sequence[Task], pool: StagingPool, *, copy: bool) -> tuple[list[Staged], list[Tensor]]:
    """Return the bytes of the tasks.

    Args:
        tasks: what is to be written.
        pool: where host memory comes from.
        copy: copy everything, since the caller may change the state at once. If false, memory that is dense and on the
            CPU is used as it is.

    Returns:
        The staged tasks in order, and the buffers to give back to the pool when they are written.
    """
    direct = [None if copy else _in_place(task) for task in tasks]
    sizes = [_aligned(task.nbytes) if data is None else 0 for task, data in zip(tasks, direct, strict=True)]
    total = sum(sizes)
    buffer = pool.take(total) if total else torch.empty(0, dtype=torch.uint8)
    staged, at, devices = [], 0, set()
    try:
        for task, data, size in zip(tasks, direct, sizes, strict=True):
            if data is None:
                data = buffer[at : at + task.nbytes]
                _copy(task, data)
                devices |= {tensor.device for _, tensor in task.sources if tensor.device.type != "cpu"}
                at += size
            staged.append(Staged(task, data))
        for device in devices:
            torch.accelerator.synchronize(device)
    except BaseException:
        if total:
            pool.give(buffer)
        raise
    return staged, [buffer] if total else []


def sources_of(
    piece: Piece, parts: Iterable[tuple[Box, Tensor]], shape: tuple[int, ...]
) -> tuple[tuple[Piece, Tensor], ...]:
    """Return the parts of this rank's memory that hold a piece, with what of the piece's box they hold.

    Args:
        piece: a piece that the assignment gave to this rank.
        parts: this rank's boxes with views of their elements.
        shape: of the whole tensor.
    """
    found = []
    for box, view in parts:
        mine = normal(Piece(box, 0, box.numel), shape)
        if mine.box == piece.box and mine.start < piece.stop and piece.start < mine.stop:
            found.append((mine, view))
    return tuple(found)


def _in_place(task: Task) -> Tensor | None:
    if len(task.sources) != 1:
        return None
    mine, view = task.sources[0]
    if view.device.type != "cpu" or not view.is_contiguous() or view.is_conj() or view.is_neg():
        return None
    data = _codec.as_bytes(view)
    low = (task.piece.start - mine.start) * task.itemsize
    return data[low : low + task.nbytes]


def _copy(task: Task, out: Tensor) -> None:
    done = task.piece.start
    for mine, view in task.sources:
        low, high = max(done, mine.start), min(task.piece.stop, mine.stop)
        begin = (low - task.piece.start) * task.itemsize
        target = out[begin : begin + (high - low) * task.itemsize]
        _copy_run(view, low - mine.start, high - mine.start, target, task)
        done = high
    assert done == task.piece.stop, (task, done)


def _copy_run(view: Tensor, start: int, stop: int, out: Tensor, task: Task) -> None:
    """Copy elements `start` to `stop` of a view, in row-major order, to `out`."""
    view = view.detach()
    if view.is_contiguous() and not view.is_conj() and not view.is_neg():
        out.copy_(_codec.as_bytes(view)[start * task.itemsize : stop * task.itemsize], non_blocking=True)
        return
    whole, at = Box.whole(tuple(view.shape)), 0
    for block in Piece(whole, start, stop).boxes():
        size = block.numel * task.itemsize
        out[at : at + size].view(view.dtype).view(block.shape).copy_(view[block.slices(whole)], non_blocking=True)
        at += size


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
