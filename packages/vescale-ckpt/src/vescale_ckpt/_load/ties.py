"""Tensors that are one in the state and several in the checkpoint: fine, if they are equal there.

Formats that know no ties save each key by itself. Each rank compares the boxes that it holds, a stretch at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .. import _codec, _state
from .._geometry import Box
from .._state import Match, Target
from .checkpoint import Checkpoint
from .target import Request

__all__ = ["settle"]

STRETCH = 32 << 20
"""Bytes that are compared at a time."""


def settle(checkpoint: Checkpoint, match: Match, ranks: Sequence[int], rank: int) -> list[str]:
    """Drop all but one of the equal tensors that go to the same memory; return a line for each pair that differs.

    Args:
        checkpoint: that is loaded.
        match: whose `targets` are changed.
        ranks: global rank of each member.
        rank: number of this member.

    Raises:
        CorruptionError: what is compared is damaged.
    """
    problems = []
    for one, other in match.shared:
        first, second = checkpoint.number(one), checkpoint.number(other)
        target, extra = _targets(match, first, second)
        if _equal(checkpoint, target, extra, ranks, rank):
            match.targets.remove(extra)
        else:
            problems.append(
                f"{one}, {other}: two tensors in the checkpoint that differ, one in the state; untie them, or leave "
                f"one out: keys=lambda name: name != {extra.name!r}"
            )
    return problems


def _targets(match: Match, first: int, second: int) -> tuple[Target, Target]:
    for extra in match.targets:
        if extra.record == second:
            for target in match.targets:
                if target.record == first and target.tensor is extra.tensor:
                    return target, extra
    raise AssertionError(f"no memory takes both of the tensors {first} and {second}")


def _equal(checkpoint: Checkpoint, target: Target, extra: Target, ranks: Sequence[int], rank: int) -> bool:
    if (target.shape, target.dtype) != (extra.shape, extra.dtype):
        return False
    assert target.tensor is not None
    held = _state.describe(target.name, target.tensor, ranks, rank)
    if held.spec.shape != target.shape:
        return True  # its shape is what is told
    for whole, _ in held.parts:
        for box in _cut(whole, STRETCH // target.dtype.itemsize):
            pair = [torch.empty(box.shape, dtype=target.dtype) for _ in range(2)]
            records = (target.record, extra.record)
            requests = [Request(record, box, out) for record, out in zip(records, pair, strict=True)]
            checkpoint.read_many(requests, consequence="Nothing was loaded.")
            one, other = (_codec.as_bytes(out) for out in pair)
            if not torch.equal(one, other):
                return False
    return True


def _cut(box: Box, most: int) -> Iterator[Box]:
    """Cut a box into parts of at most so many elements.

    Example:
        >>> list(_cut(Box((1,), (5,)), 3))
        [Box(offset=(1,), shape=(2,)), Box(offset=(3,), shape=(3,))]
    """
    if box.numel <= most:
        yield box
        return
    dim = max(range(len(box.shape)), key=box.shape.__getitem__)
    half = box.shape[dim] // 2
    for start, size in ((0, half), (half, box.shape[dim] - half)):
        offset = (*box.offset[:dim], box.offset[dim] + start, *box.offset[dim + 1 :])
        yield from _cut(Box(offset, (*box.shape[:dim], size, *box.shape[dim + 1 :])), most)
