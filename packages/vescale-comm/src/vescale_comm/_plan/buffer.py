"""The plan of one flat buffer: tensors one behind the other, cut into one equal shard per rank.

A plan is data: every rank works out the same one from the same specs, and its fingerprint tells whether they did.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..errors import PlanError

__all__ = ["BufferPlan", "Piece", "Slot", "TensorSpec"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that wants a place in a buffer."""

    name: str
    """Fully qualified name of the parameter."""
    shape: tuple[int, ...]
    """Shape of what one rank of the group would hold unsharded."""
    granularity: int = 1
    """Elements, in storage order, that must stay together on one rank; the last block may be smaller."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one tensor in a buffer."""

    name: str
    """Fully qualified name of the parameter."""
    shape: tuple[int, ...]
    """Its shape."""
    offset: int
    """Its first element in the buffer."""
    granularity: int = 1
    """Elements that stay together."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """First element of the buffer behind it."""
        return self.offset + self.numel


@dataclass(frozen=True, slots=True)
class Piece:
    """The elements of one tensor that stand in the shard of one rank."""

    slot: Slot
    """Whose elements."""
    start: int
    """First element, counted in the flattened tensor."""
    stop: int
    """First element behind them, counted in the flattened tensor."""
    offset: int
    """Where the first one stands in the shard, in elements."""


@dataclass(frozen=True)
class BufferPlan:
    """Places of tensors in a buffer of `world * shard` elements, of which each rank owns `shard`.

    Example:
        >>> plan = BufferPlan((Slot("w", (3, 2), 0), Slot("b", (3,), 6)), world=2, shard=5)
        >>> [(p.slot.name, p.start, p.stop, p.offset) for p in plan.pieces(1)]
        [('w', 5, 6, 0), ('b', 0, 3, 1)]
        >>> plan.padding
        0.1
    """

    slots: tuple[Slot, ...]
    """By offset, without overlap; there may be gaps."""
    world: int
    """Number of shards."""
    shard: int
    """Elements per rank."""
    reason: str = ""
    """What keeps the shard from being smaller."""

    def __post_init__(self) -> None:
        """Refuse what is no plan.

        Raises:
            PlanError: slots overlap or leave the buffer, or a cut between ranks tears a block.
        """
        end = 0
        for slot in self.slots:
            if slot.offset < end:
                raise PlanError(f"{slot.name} begins at element {slot.offset}, but the tensor before it ends at {end}.")
            end = slot.stop
        if end > self.numel:
            raise PlanError(f"The tensors end at {end}, but {self.world} shards of {self.shard} are {self.numel}.")
        for slot in self.slots:
            if slot.granularity > 1 and slot.numel:
                self._check_cuts(slot)

    def _check_cuts(self, slot: Slot) -> None:
        for cut in range(slot.offset // self.shard + 1, -(-slot.stop // self.shard)):
            if (cut * self.shard - slot.offset) % slot.granularity:
                raise PlanError(
                    f"The cut before rank {cut}, at element {cut * self.shard}, tears a block of {slot.granularity} "
                    f"elements of {slot.name}, which begins at {slot.offset}."
                )

    @property
    def numel(self) -> int:
        """Elements of the whole buffer."""
        return self.world * self.shard

    @property
    def used(self) -> int:
        """Elements of tensors."""
        return sum(slot.numel for slot in self.slots)

    @property
    def padding(self) -> float:
        """Share of the buffer that holds no tensor."""
        return (self.numel - self.used) / self.numel if self.numel else 0.0

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return what stands in the shard of a rank, in order; empty tensors have no pieces."""
        return self._pieces[rank]

    @cached_property
    def _pieces(self) -> Sequence[tuple[Piece, ...]]:
        found: list[list[Piece]] = [[] for _ in range(self.world)]
        for slot in self.slots:
            at = slot.offset
            while at < slot.stop:
                rank = at // self.shard
                stop = min(slot.stop, (rank + 1) * self.shard)
                found[rank].append(Piece(slot, at - slot.offset, stop - slot.offset, at - rank * self.shard))
                at = stop
        return [tuple(pieces) for pieces in found]

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the places, equal on ranks that agree."""
        lines = [f"{self.world} {self.shard}"]
        lines += [f"{slot.offset} {slot.granularity} {slot.shape} {slot.name}" for slot in self.slots]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
