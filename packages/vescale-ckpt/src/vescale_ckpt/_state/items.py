"""A state, or the JSON of one, taken apart: the common form of what is saved and what is found in a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .names import Path, named

__all__ = ["DEPTH", "LEAVES", "Item", "leaf_names", "leaves_of"]

DEPTH = 190
"""Nesting of the JSON of a state: below what a reader accepts of a whole file."""
LEAVES = ("tensor", "numpy", "value", "local")
"""Kinds that have a name of their own."""


@dataclass(slots=True, eq=False)
class Item:
    """One place of a state."""

    kind: str
    """Leaves: "tensor", "numpy", "value", "local"; containers: "dict", "ordered", "list", "tuple"; "stateful"."""
    path: Path
    """The keys on the way here."""
    value: Any = None
    """Of a state the object that stands here; of a file the decoded value, where `kind` is "value"."""
    node: Any = None
    """The JSON of a value."""
    number: int = -1
    """Of a file: the tensor or the slot that is meant."""
    children: list[tuple[Any, Item]] = field(default_factory=list)
    """(key, item) of what a container holds; the state_dict of a "stateful"; of a state what a "local" marks."""


def leaves_of(item: Item) -> Iterator[Item]:
    """Yield the leaves below an item in order; what a `local` marks is not looked into."""
    stack = [item]
    while stack:
        top = stack.pop()
        if top.kind in LEAVES:
            yield top
        else:
            stack.extend(child for _, child in reversed(top.children))


def leaf_names(item: Item) -> dict[int, str]:
    """Return id of a leaf item -> its name, for all leaves below the root `item`."""
    leaves = list(leaves_of(item))
    return {id(leaf): name for leaf, name in zip(leaves, named([leaf.path for leaf in leaves]), strict=True)}
