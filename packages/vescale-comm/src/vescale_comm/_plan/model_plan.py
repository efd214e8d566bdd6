"""What the search over a whole model returns: groups of units, their buffers, and what was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .blocks import Storage
from .buffer import BufferPlan

__all__ = ["GroupPlan", "ModelPlan"]


@dataclass(frozen=True)
class GroupPlan:
    """Units that are gathered and reduced together."""

    units: tuple[str, ...]
    """Their names, in the order of the model."""
    buffers: tuple[BufferPlan, ...]
    """Usually one; several where unlike blocks would pad one buffer too much."""

    @property
    def used(self) -> int:
        """Elements of parameters."""
        return sum(buffer.used for buffer in self.buffers)

    @property
    def numel(self) -> int:
        """Elements of the buffers."""
        return sum(buffer.numel for buffer in self.buffers)


@dataclass(frozen=True)
class ModelPlan:
    """The buffers of a model.

    Shares such as `padding` are of the parameters: 0.1 means that a tenth more than the parameters is communicated.
    """

    world: int
    """Number of ranks."""
    shard_world: int
    """Ranks over which a buffer is sharded; the others hold copies (HSDP)."""
    groups: tuple[GroupPlan, ...]
    """In the order of the model."""
    storage: Mapping[str, Storage]
    """Parameters that are not stored as given."""
    even: float
    """Padding of the even layout over all ranks: each tensor by itself, as given, at the same blocks."""
    bound: float
    """Padding below which no plan of these buffers exists."""
    seconds: float
    """Time that planning took."""

    @property
    def used(self) -> int:
        """Elements of parameters."""
        return sum(group.used for group in self.groups)

    @property
    def padding(self) -> float:
        """Elements of the buffers that are no parameters, as a share of the parameters."""
        return sum(group.numel for group in self.groups) / self.used - 1

    @property
    def replicas(self) -> int:
        """Number of copies of each shard."""
        return self.world // self.shard_world

    @property
    def memory(self) -> float:
        """Elements per rank over those of a rank if all ranks shared the parameters without padding."""
        return (1 + self.padding) * self.replicas

    @property
    def largest(self) -> int:
        """Elements of the largest group: what is gathered at once."""
        return max(group.numel for group in self.groups)

    @property
    def buffers(self) -> int:
        """Number of buffers: all-gathers of a forward."""
        return sum(len(group.buffers) for group in self.groups)

    @property
    def reason(self) -> str:
        """What keeps the buffer with most padding from being smaller."""
        worst = max((b for group in self.groups for b in group.buffers), key=lambda b: b.numel - b.used)
        return f"shards of {worst.shard} elements: {worst.reason}"

    def choice(self) -> str:
        """Return in words what was chosen."""
        sizes = sorted({len(group.units) for group in self.groups})
        span = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        parts = [f"{len(self.groups)} groups of {span} units"]
        if self.buffers > len(self.groups):
            parts.append(f"{self.buffers} buffers")
        for kind in (Storage.TRANSPOSED, Storage.TILES):
            count = sum(1 for stored in self.storage.values() if stored is kind)
            if count:
                parts.append(f"{count} tensors stored {kind.value}")
        if self.replicas > 1:
            parts.append(f"{self.replicas} copies of {self.shard_world} shards")
        return ", ".join(parts)

    def explain(self) -> str:
        """Return a table of the groups, with what binds each buffer."""
        lines = [
            f"{self.used} elements over {self.world} ranks: padding {self.padding:.2%} "
            f"(even layout {self.even:.2%}, bound {self.bound:.2%}), planned in {self.seconds:.2f} s",
            f"{self.choice()}; largest group {self.largest} elements; {self.memory:.2f} times the least memory",
        ]
        for group in self.groups:
            names = group.units[0] if len(group.units) == 1 else f"{group.units[0]} to {group.units[-1]}"
            lines.append(f"{names}: {group.used} elements, padding {group.numel / max(1, group.used) - 1:.2%}")
            lines += [
                f"  {len(buffer.slots)} tensors, shard {buffer.shard}, padding {buffer.padding:.2%} of the buffer: "
                f"{buffer.reason}"
                for buffer in group.buffers
            ]
        return "\n".join(lines)
