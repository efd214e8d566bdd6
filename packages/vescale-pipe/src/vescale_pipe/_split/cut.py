"""What each stage needs: its own calls, what it repeats of the batch's, what it is sent, and what it sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import SplitError
from .tree import leaves
from .values import Node, Recording, Value

__all__ = ["Part", "cut", "gather", "stage_of"]


@dataclass(eq=False, slots=True)
class Part:
    """One stage, before it is written as a module."""

    index: int
    """Number of the stage."""
    nodes: dict[int, Node] = field(default_factory=dict)
    """Calls by number: its own and repeated ones."""
    batch: dict[int, Value] = field(default_factory=dict)
    """Values of the batch that it uses."""
    received: dict[int, Value] = field(default_factory=dict)
    """Values of earlier stages."""
    sent: dict[int, Value] = field(default_factory=dict)
    """Values that later stages use."""
    held: dict[str, Value] = field(default_factory=dict)
    """Parameters and buffers that it uses outside of modules."""
    seen: set[int] = field(default_factory=set)
    """Numbers of the values that are taken care of."""

    def ordered(self) -> list[Node]:
        """Return its calls in order."""
        return [self.nodes[number] for number in sorted(self.nodes)]


def stage_of(recording: Recording, starts: Sequence[int]) -> dict[int, int]:
    """Return the stage of each call that isn't repeated.

    Args:
        recording: of the model.
        starts: number of the first call of each stage; the first is 0.
    """
    stages: dict[int, int] = {}
    current = 0
    for node in recording.nodes:
        while current + 1 < len(starts) and node.number >= starts[current + 1]:
            current += 1
        if not node.known:
            stages[node.number] = current
    return stages


def cut(recording: Recording, starts: Sequence[int]) -> list[Part]:
    """Divide a recording into stages.

    Raises:
        SplitError: a value is changed in place on one stage and used through another view of the same memory that this
            stage does not have.
    """
    stages = stage_of(recording, starts)
    parts = [Part(index) for index in range(len(starts))]
    for node in recording.nodes:
        if node.number in stages:
            parts[stages[node.number]].nodes[node.number] = node
    # From the last to the first: a stage must have what later ones need of it.
    for part in reversed(parts):
        roots: list[Any] = [leaf for node in part.nodes.values() for leaf in leaves((node.args, node.kwargs))]
        roots += part.sent.values()
        if part is parts[-1]:
            roots += leaves(recording.output)
        gather(part, [root for root in roots if isinstance(root, Value)], stages, parts)
    _check_memory(recording, stages, parts)
    return parts


def gather(part: Part, wanted: list[Value], stages: dict[int, int], parts: Sequence[Part]) -> None:
    """Add to a stage all that some values need; `stages` has the stage of each call that isn't repeated."""
    while wanted:
        value = wanted.pop()
        if value.number in part.seen:
            continue
        part.seen.add(value.number)
        if value.source == "batch":
            part.batch[value.number] = value
        elif value.source in ("parameter", "buffer"):
            part.held[value.key] = value
        elif value.node is not None:
            owner = stages.get(value.node.number)
            if owner is not None and owner != part.index:
                part.received[value.number] = value
                parts[owner].sent[value.number] = value
                continue
            if value.key is None and value.alias is not None:  # changed in place: the same object as before
                wanted.append(value.alias)
            if value.node.number not in part.nodes:
                part.nodes[value.node.number] = value.node
                wanted += [leaf for leaf in leaves((value.node.args, value.node.kwargs)) if isinstance(leaf, Value)]


def _check_memory(recording: Recording, stages: dict[int, int], parts: list[Part]) -> None:
    used = {number for part in parts for number in part.seen}
    for node in recording.nodes:
        stage = stages.get(node.number)
        if stage is None:
            continue
        direct = [leaf for leaf in leaves((node.args, node.kwargs)) if isinstance(leaf, Value)]
        for old, new in node.touched:
            if old in direct or new.number not in used:
                continue
            roots = {_root(value, stage, stages) for value in direct if value.group == old.group}
            if _root(old, stage, stages) not in roots:
                changed = next(value for value in direct if value.group == old.group)
                raise SplitError(
                    f"{node}, on stage {stage}, changes {changed.text} in place. {old.text} shares its memory and is "
                    "used afterwards, but comes from an earlier stage by itself. Cut elsewhere, or write the change "
                    "without an in-place operation."
                )


def _root(value: Value, stage: int, stages: dict[int, int]) -> int:
    """Return the value that a stage has by itself and of which this one is a view."""
    while value.alias is not None and value.node is not None:
        if stages.get(value.node.number, stage) != stage:
            break
        value = value.alias
    return value.number
