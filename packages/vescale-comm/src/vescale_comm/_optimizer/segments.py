"""What the inner optimizer sees of a bucket: a few tensors of this rank's shard, each with the parameters in it.

A merged segment is one flat tensor over all parameters of a group that meet in the shard. Numbers that the optimizer
keeps per tensor, such as the step, then hold for all of them: as soon as they differ, the segment is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .._plan import BufferPlan
from .partition import Entry

__all__ = ["Member", "Segment", "cut"]


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter in a segment."""

    number: int
    """Number of its slot in the plan."""
    name: str
    """Its name."""
    start: int
    """First element, counted in the parameter."""
    stop: int
    """First element behind those that are here; equal to `start` for a parameter of which nothing is here."""
    offset: int
    """Where they begin in the segment."""

    @property
    def numel(self) -> int:
        """Number of elements here."""
        return self.stop - self.start


@dataclass(slots=True, eq=False)
class Segment:
    """A run of a shard that is one tensor for the optimizer."""

    bucket: int
    """Number of the bucket."""
    group: int
    """Number of the parameter group."""
    begin: int
    """First element in the shard."""
    end: int
    """First element of the shard behind it."""
    members: tuple[Member, ...]
    """The parameters in it, and those that are not here but share its numbers."""
    shape: tuple[int, ...]
    """Shape of the tensor."""
    merged: bool
    """Whether it may have been made of several parameters: its state must have its shape or be a number."""
    tensor: nn.Parameter = field(init=False)
    """The tensor that the optimizer updates: a view of the bucket's main shard."""

    def attach(self, main: Tensor) -> None:
        """Make the tensor a view of the shard with the main parameters."""
        self.tensor = nn.Parameter(self.of(main), requires_grad=True)

    def of(self, shard: Tensor) -> Tensor:
        """Return the view of this segment in a shard."""
        return shard[self.begin : self.end].view(self.shape)

    def split(self) -> list[Segment]:
        """Return one segment per member, with tensors that share this one's memory."""
        parts = []
        for member in self.members:
            begin = self.begin + member.offset
            part = Segment(self.bucket, self.group, begin, begin + member.numel, (), (member.numel,), True)
            part.members = (Member(member.number, member.name, member.start, member.stop, 0),)
            flat = self.tensor.detach().view(-1)[member.offset : member.offset + member.numel]
            part.tensor = nn.Parameter(flat, requires_grad=True)
            parts.append(part)
        return parts


def cut(bucket: int, plan: BufferPlan, entries: Sequence[Entry], rank: int) -> list[Segment]:
    """Return the segments of a rank's shard.

    Args:
        bucket: number of the bucket.
        plan: its plan.
        entries: what stands in the slots of the plan, in their order.
        rank: whose shard.

    Returns:
        The segments by offset, then those without elements. Mergeable parameters of which nothing is in the shard
        are members of some segment of their group, so that every rank knows the numbers of all of them.
    """
    numbers = {slot.name: number for number, slot in enumerate(plan.slots)}
    segments: list[Segment] = []
    for piece in plan.pieces(rank):
        number = numbers[piece.slot.name]
        entry, numel = entries[number], piece.stop - piece.start
        merge = entry.granularity == 0
        last = segments[-1] if segments else None
        if last is None or not merge or not last.merged or last.group != entry.group:
            shape = (numel,) if merge or numel < piece.slot.numel else entry.shape
            last = Segment(bucket, entry.group, piece.offset, piece.offset + numel, (), shape, merge)
            segments.append(last)
        last.end = piece.offset + numel
        if merge:
            last.shape = (last.end - last.begin,)
        last.members += (Member(number, entry.name, piece.start, piece.stop, piece.offset - last.begin),)
    here = {member.number for segment in segments for member in segment.members}
    for number, entry in enumerate(entries):
        if number not in here and entry.granularity == 0:
            _adopt(segments, bucket, number, entry)
    return segments


def _adopt(segments: list[Segment], bucket: int, number: int, entry: Entry) -> None:
    """Make a parameter of which nothing is here a member of a segment of its group."""
    home = next((segment for segment in segments if segment.merged and segment.group == entry.group), None)
    if home is None:
        home = Segment(bucket, entry.group, 0, 0, (), (0,), True)
        segments.append(home)
    home.members += (Member(number, entry.name, 0, 0, 0),)


def used_parts(segment: Segment, used: Sequence[bool]) -> tuple[bool, bool]:
    """Return whether some, and whether all members of a segment got a gradient.

    Args:
        segment: the segment.
        used: per slot of its bucket, whether any rank used the parameter.
    """
    flags = [used[member.number] for member in segment.members]
    return any(flags), all(flags)


def state_tensor(value: object, segment: Segment) -> torch.Tensor | None:
    """Return a value of the optimizer's state if it is a tensor with one element per element of the segment."""
    if isinstance(value, Tensor) and tuple(value.shape) == segment.shape:
        return value
    return None
