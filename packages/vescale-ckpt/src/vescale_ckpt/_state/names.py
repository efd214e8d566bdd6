"""Names of the leaves of a state: the keys on the way to a leaf, joined by dots.

Where two leaves would get one name, all of them get an escaped form that tells keys with dots and numbers apart, so
that a name never depends on the order in which a dict was filled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

__all__ = ["NAMES_CHARS", "NAME_CHARS", "Path", "escaped", "named", "plain", "spell", "text_of"]

Path = tuple[Any, ...]
"""The keys from the root to a leaf; a list has the keys 0, 1, ..."""
NAME_CHARS = 16384
"""Longest name that a reader accepts."""
NAMES_CHARS = 1 << 30
"""Most characters of all names together: a long key above many leaves would fill the memory with their names."""
ROOT = "$"
"""Name of a state that is a single leaf."""


def plain(path: Path) -> str:
    """Return the usual name.

    Example:
        >>> plain(("model", "layers", 0, "weight"))
        'model.layers.0.weight'
    """
    return ".".join(map(text_of, path)) if path else ROOT


def escaped(path: Path) -> str:
    r"""Return a name that no other path has among the escaped ones.

    Example:
        >>> escaped(("a.b", 0, "c"))
        'a\\.b.[0].c'
    """
    return ".".join(map(_escaped_key, path)) if path else ROOT


def named(paths: Sequence[Path]) -> list[str]:
    r"""Return the names of leaves, given all of them: plain where that is unique, else escaped.

    Args:
        paths: of all leaves, each of them once.

    Example:
        >>> named([("a", "b"), ("a.b",), ("c",)])
        ['a.b', 'a\\.b', 'c']
    """
    names = [plain(path) for path in paths]
    long: set[int] = set()
    while True:
        owners: dict[str, list[int]] = {}
        for number, name in enumerate(names):
            owners.setdefault(name, []).append(number)
        # An escaped name may be the plain name of yet another leaf, which is then escaped too.
        torn = [n for group in owners.values() if len(group) > 1 for n in group if n not in long]
        if not torn:
            return names
        for number in torn:
            names[number] = escaped(paths[number])
        long.update(torn)


def spell(path: Path) -> str:
    """Return a path for messages: never long, and never a name that is mistaken for another."""
    name = ascii(plain(path))[1:-1] if path else "the state itself"
    return name if len(name) <= 300 else name[:150] + "..." + name[-140:]


def text_of(key: Any) -> str:
    """Return what a key is in a plain name."""
    if isinstance(key, str):
        return key
    if isinstance(key, tuple):
        return "(" + ",".join(map(text_of, key)) + ")"
    return str(key)


def _escaped_key(key: Any) -> str:
    if isinstance(key, str):
        text = key.replace("\\", "\\\\").replace(".", "\\.")
        return "\\" + text if text.startswith("[") else text
    text = json.dumps(_listed(key), separators=(",", ":"))
    return "[" + text.replace("\\", "\\\\").replace(".", "\\.") + "]"


def _listed(key: Any) -> Any:
    """Return a key as JSON; a tuple inside of a tuple as a list in a list."""
    return [_listed(item) for item in key] if isinstance(key, tuple) else key
