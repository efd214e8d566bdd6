"""JSON of a state -> items. Trusts nothing: every number is checked, and an error names the place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import FormatError
from .items import DEPTH, Item, leaf_names, leaves_of
from .names import NAME_CHARS, NAMES_CHARS, Path, spell, text_of
from .values import decode, decode_key, is_primitive

__all__ = ["ABSENT", "Leaf", "check", "is_absent", "leaves", "local_names", "parse"]

ABSENT = {"$absent": None}
"""Stands where a rank lacks a local value that others have; it is no part of a state."""
_CONTAINERS = {"$dict": "dict", "$ordered": "ordered", "$tuple": "tuple"}
_NUMBERS = {"$tensor": "tensor", "$numpy": "numpy", "$local": "local"}


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor or value of a tree."""

    name: str
    """Its name, unique in the tree."""
    path: Path
    """The keys on the way to it."""
    node: Any
    """Its JSON."""
    record: int | None
    """Number of the tensor, where it is one."""
    slot: int | None
    """Number of the local value, where it is one."""


def parse(node: Any, tensors: int | None = None, locals: int | None = None) -> Item:
    """Return the items of a JSON tree.

    Args:
        node: JSON.
        tensors: how many tensors there are; None if numbers are checked by whoever uses them.
        locals: how many local values there are, likewise.

    Raises:
        FormatError: the tree is none; the message names the place.

    Example:
        >>> parse({"a": [{"$tensor": 0}]}, 1).children[0][1].kind
        'list'
    """
    return _Parser(tensors, locals).item(node, (), 0)


def check(node: Any, tensors: int, locals: int) -> None:
    """Raise FormatError if a JSON tree is none, or names a tensor or local value that does not exist.

    Example:
        >>> check({"a": {"$tensor": 3}}, 3, 0)
        Traceback (most recent call last):
        vescale_ckpt.errors.FormatError: tree: a: $tensor 3 does not exist, there are 3.
    """
    parse(node, tensors, locals)


def leaves(tree: Any) -> list[Leaf]:
    """Return all tensors and values of a tree with their names; a list of plain numbers and strings is one value.

    Raises:
        FormatError: the tree is none.

    Example:
        >>> [(leaf.name, leaf.record) for leaf in leaves({"lr": 0.1, "w": {"$tensor": 0}})]
        [('lr', None), ('w', 0)]
    """
    root = parse(tree)
    names = leaf_names(root)
    return [
        Leaf(
            names[id(item)],
            item.path,
            item.node,
            item.number if item.kind in ("tensor", "numpy") else None,
            item.number if item.kind == "local" else None,
        )
        for item in leaves_of(root)
    ]


def local_names(tree: Any) -> list[str]:
    """Return the names of the local values of a tree, in the order of their numbers.

    Raises:
        FormatError: the tree is none, or its numbers are not 0, 1, 2, ...

    Example:
        >>> local_names({"rng": {"$local": 1}, "loader": {"$local": 0}})
        ['loader', 'rng']
    """
    found = {leaf.slot: leaf.name for leaf in leaves(tree) if leaf.slot is not None}
    if sorted(found) != list(range(len(found))):
        raise FormatError(f"tree: local values have the numbers {sorted(found)[:20]}; they must be 0, 1, 2, ...")
    return [found[slot] for slot in range(len(found))]


def is_absent(node: Any) -> bool:
    """Tell whether the JSON of a local value says that the rank has none.

    Example:
        >>> is_absent(ABSENT)
        True
    """
    return isinstance(node, dict) and "$absent" in node


class _Parser:
    def __init__(self, tensors: int | None, locals: int | None) -> None:
        self.limits = {"$tensor": tensors, "$numpy": tensors, "$local": locals}
        self.chars = 0

    def item(self, node: Any, path: Path, depth: int, chars: int = 0) -> Item:
        """Return the item of a node; `chars` is the length of the plain name."""
        if is_primitive(node):
            return self._leaf("value", path, node, chars, node)
        if depth > DEPTH:
            raise self._error(path, f"more than {DEPTH} levels deep")
        if type(node) is list:
            if node and all(map(is_primitive, node)):
                return self._leaf("value", path, node, chars, node)
            return self._sequence("list", node, node, path, depth + 1, chars)
        if type(node) is not dict:
            raise self._error(path, f"{ascii(node)[:60]} is no JSON that stands for a value")
        if not any(type(key) is not str or key.startswith("$") for key in node):
            pairs = [
                (key, self.item(child, (*path, key), depth + 1, chars + len(key) + 1)) for key, child in node.items()
            ]
            return Item("dict", path, node=node, children=pairs)
        if len(node) != 1 or type(next(iter(node))) is not str:
            raise self._error(path, f"an object with the keys {ascii(list(node)[:5])[:100]}: one tag must stand alone")
        tag, payload = next(iter(node.items()))
        return self._tagged(tag, payload, node, path, depth, chars)

    def _tagged(self, tag: str, payload: Any, node: Any, path: Path, depth: int, chars: int) -> Item:
        if tag in _NUMBERS:
            limit = self.limits[tag]
            if type(payload) is not int or payload < 0:
                raise self._error(path, f"{tag} {ascii(payload)[:60]} is no number of one")
            if limit is not None and payload >= limit:
                raise self._error(path, f"{tag} {payload} does not exist, there are {limit}")
            return self._leaf(_NUMBERS[tag], path, node, chars, number=payload)
        if tag not in _CONTAINERS:
            return self._leaf("value", path, node, chars, decode(tag, payload, f"tree: {spell(path)}"))
        if type(payload) is not list:
            raise self._error(path, f"{tag} must hold a list")
        if tag == "$tuple":
            if payload and all(map(is_primitive, payload)):
                return self._leaf("value", path, node, chars, tuple(payload))
            return self._sequence("tuple", payload, node, path, depth + 2, chars)
        pairs: dict[Any, Item] = {}
        for entry in payload:
            if type(entry) is not list or len(entry) != 2:
                raise self._error(path, f"{tag} must hold pairs of key and value")
            key = decode_key(entry[0], f"tree: {spell(path)}")
            if key in pairs:
                raise self._error(path, f"the key {ascii(key)[:60]} stands twice")
            pairs[key] = self.item(entry[1], (*path, key), depth + 3, chars + len(text_of(key)) + 1)
        return Item(_CONTAINERS[tag], path, node=node, children=list(pairs.items()))

    def _sequence(self, kind: str, payload: list[Any], node: Any, path: Path, depth: int, chars: int) -> Item:
        children = [
            (number, self.item(child, (*path, number), depth, chars + len(str(number)) + 1))
            for number, child in enumerate(payload)
        ]
        return Item(kind, path, node=node, children=children)

    def _leaf(self, kind: str, path: Path, node: Any, chars: int, value: Any = None, number: int = -1) -> Item:
        self.chars += chars
        if chars > NAME_CHARS + 1 or self.chars > NAMES_CHARS:
            raise self._error(path, f"a name of {chars} characters, or all names together too long")
        return Item(kind, path, value, node, number)

    @staticmethod
    def _error(path: Path, what: str) -> FormatError:
        return FormatError(f"tree: {spell(path)}: {what}.")
