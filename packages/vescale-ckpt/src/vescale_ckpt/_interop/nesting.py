"""Flat keys and the paths that they stand for -> nested dicts and lists, the way back from what DCP flattens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import FormatError

__all__ = ["nest", "path_of"]

DEPTH = 150
"""Longest path: its JSON stays below what a reader accepts."""
SLACK = 1000
"""Places that a list may have beyond ten for each value that it holds."""
KeyPath = tuple[str | int, ...]


class _Node(dict[Any, Any]):
    """A container that is being filled; a leaf is any other object."""


def path_of(value: Any, at: str) -> KeyPath:
    """Return a path read from a file: strings for keys of dicts, integers for places in lists.

    Raises:
        FormatError: it is none.
    """
    if not isinstance(value, tuple) or not 1 <= len(value) <= DEPTH:
        raise FormatError(f"{at}: must be a path of 1 to {DEPTH} keys, but is {value!r:.200}.")
    for key in value:
        if not (type(key) is str or (type(key) is int and key >= 0)):
            raise FormatError(f"{at}: a key must be a string or a place in a list, but is {key!r:.200}.")
    return value


def nest(leaves: Iterable[tuple[KeyPath, Any]]) -> Any:
    """Return the containers that hold leaves at these paths; None stands in a list where nothing else does.

    Raises:
        FormatError: a leaf stands where others are to be below it, or a list would be mostly holes.

    Example:
        >>> nest([(("a", "b"), 1), (("a", "c", 1), 2), (("a", "c", 0), 3)])
        {'a': {'b': 1, 'c': [3, 2]}}
    """
    root = _Node()
    for path, value in leaves:
        node = root
        for key in path[:-1]:
            child = node.setdefault(key, _Node())
            if not isinstance(child, _Node):
                raise FormatError(f"keys: {path!r:.200} lies below a key that holds a value.")
            node = child
        if path[-1] in node:
            raise FormatError(f"keys: {path!r:.200} stands twice, or holds a value and others below it.")
        node[path[-1]] = value
    return _finished(root, ())


def _finished(node: _Node, path: KeyPath) -> Any:
    items = {key: _finished(child, (*path, key)) if isinstance(child, _Node) else child for key, child in node.items()}
    places = [key for key in items if type(key) is int]
    if not places:
        return items
    if len(places) < len(items) or not path:
        raise FormatError(f"keys: {path!r:.200} has keys of a dict and places of a list.")
    length = max(places) + 1
    if length > 10 * len(places) + SLACK:
        raise FormatError(f"keys: {path!r:.200} has place {length - 1} in a list of {len(places)} values.")
    return [items.get(number) for number in range(length)]
