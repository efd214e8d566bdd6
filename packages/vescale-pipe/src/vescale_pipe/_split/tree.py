"""Nested Python values that hold tensors: tuples, dicts, dataclasses, outputs of Hugging Face models.

One function does all of it: `mapped` rebuilds a value with its leaves replaced and says how each leaf is reached.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["Leaf", "Slot", "Step", "fill", "leaves", "mapped", "pick"]

PLAIN = (type(None), bool, int, float, complex, str, bytes)


class Leaf:
    """Base of classes that are never looked into, though they are dataclasses."""

    __slots__ = ()


class Slot(NamedTuple):
    """Stands in a template where the value with this number goes."""

    number: int
    """Number of the value."""


class Step(NamedTuple):
    """One step on the way from a value to something inside it."""

    kind: str
    """`item` (value[key]), `attr` (value.key) or `leaf` (number key in the order of torch's pytree)."""
    key: Any
    """Index, key, name or number."""


Path = tuple[Step, ...]


def mapped(function: Callable[[Any, Path], Any], value: Any, path: Path = ()) -> Any:
    """Return a value with `function(leaf, path)` in place of each leaf; the value itself where no leaf changed.

    Args:
        function: gets what is no container (a tensor, a number, None, an object) and how it is reached.
        value: any nesting of tuples, lists, dicts, slices, dataclasses and types that torch's pytree knows.
        path: how `value` itself is reached.

    Example:
        >>> mapped(lambda leaf, path: leaf + 1, {"a": (1, [2])})
        {'a': (2, [3])}
    """
    kind = type(value)
    if kind in PLAIN or kind is Slot or isinstance(value, (Leaf, Tensor, torch.Size)):
        return function(value, path)
    if isinstance(value, (tuple, list)):
        new = [mapped(function, item, (*path, Step("item", index))) for index, item in enumerate(value)]
        if all(one is other for one, other in zip(new, value, strict=True)):
            return value
        return kind(*new) if hasattr(value, "_fields") else kind(new)
    if isinstance(value, Mapping) and hasattr(value, "items"):
        fresh = {key: mapped(function, item, (*path, Step("item", key))) for key, item in value.items()}
        if all(fresh[key] is item for key, item in value.items()):
            return value
        return fresh if kind is dict else _replaced_mapping(value, fresh)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        before = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        after = {name: mapped(function, item, (*path, Step("attr", name))) for name, item in before.items()}
        if all(after[name] is item for name, item in before.items()):
            return value
        twin = copy.copy(value)
        for name, item in after.items():
            object.__setattr__(twin, name, item)
        return twin
    if kind is slice:
        parts = [
            mapped(function, getattr(value, name), (*path, Step("attr", name))) for name in ("start", "stop", "step")
        ]
        return value if parts == [value.start, value.stop, value.step] else slice(*parts)
    return _registered(function, value, path)


def _replaced_mapping(value: Any, fresh: dict[Any, Any]) -> Any:
    """Return a copy of a mapping of a class of its own, such as the outputs of Hugging Face models, with new items."""
    twin = copy.copy(value)
    for key, item in fresh.items():
        # Their dataclass fields follow their items, and the other way round, so that one is enough.
        twin[key] = item
    return twin


def _registered(function: Callable[[Any, Path], Any], value: Any, path: Path) -> Any:
    """Map a value whose type was registered with torch's pytree, or is a leaf."""
    found, spec = pytree.tree_flatten(value)
    if len(found) == 1 and found[0] is value:
        return function(value, path)
    new = [mapped(function, leaf, (*path, Step("leaf", number))) for number, leaf in enumerate(found)]
    if all(one is other for one, other in zip(new, found, strict=True)):
        return value
    return pytree.tree_unflatten(new, spec)


def leaves(value: Any) -> list[Any]:
    """Return the leaves of a value in the order in which `mapped` meets them."""
    found: list[Any] = []

    def note(leaf: Any, path: Path) -> Any:
        found.append(leaf)
        return leaf

    mapped(note, value)
    return found


def fill(template: Any, values: Sequence[Any]) -> Any:
    """Return a template with each `Slot` replaced by the value of its number.

    Example:
        >>> fill({"a": Slot(1), "b": (Slot(0), "kept")}, ["x", "y"])
        {'a': 'y', 'b': ('x', 'kept')}
    """
    return mapped(lambda leaf, path: values[leaf.number] if type(leaf) is Slot else leaf, template)


def pick(value: Any, path: Sequence[Step]) -> Any:
    """Return what a path leads to."""
    for step in path:
        if step.kind == "item":
            value = value[step.key]
        elif step.kind == "attr":
            value = getattr(value, step.key)
        else:
            value = pytree.tree_leaves(value)[step.key]
    return value
