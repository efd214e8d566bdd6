"""Names that were meant, for errors about names that are not there."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["nearest"]

SHOWN = 12


def nearest(name: str, known: Iterable[str], what: str = "names") -> str:
    """Return a hint with the known names closest to a wrong one; if none is close, with all, or the first dozen.

    Args:
        name: the wrong one.
        known: those that there are.
        what: what they are called.

    Example:
        >>> nearest("blocs.1", ["blocks", "blocks.0", "blocks.1"])
        " Nearest names: 'blocks.1', 'blocks.0', 'blocks'."
        >>> nearest("x", ["head", "embed"], "modules")
        " There are modules 'head', 'embed'."
        >>> nearest("x", [])
        ''
    """
    names = [one for one in known if one]
    found = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    if found:
        return f" Nearest {what}: {', '.join(map(repr, found))}."
    if not names:
        return ""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f" There are {what} {', '.join(map(repr, names[:SHOWN]))}{more}."
