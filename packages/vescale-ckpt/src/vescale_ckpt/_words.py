"""Words of messages that depend on numbers and names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["counted", "near"]

MOST = 20_000
"""Names that are looked at: comparing takes some microseconds for each."""


def counted(count: int, noun: str, verbs: tuple[str, str] | None = None) -> str:
    """Return a number with its noun, and a verb that goes with it.

    Args:
        count: how many.
        noun: for one.
        verbs: for one and for several.

    Example:
        >>> counted(1, "chunk"), counted(2, "box"), counted(1, "rank", ("holds", "hold"))
        ('1 chunk', '2 boxes', '1 rank holds')
    """
    text = f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith(('x', 's', 'ch')) else 's'}"
    return text if verbs is None else f"{text} {verbs[count != 1]}"


def near(asked: Iterable[str], names: Iterable[str], limit: int = 3) -> list[str]:
    """Return names, or beginnings of names up to a dot, that were probably meant.

    Args:
        asked: what fits none; patterns such as "model.*" too.
        names: those that are there.
        limit: how many at most.

    Example:
        >>> near(["modle.*"], ["model.w", "model.b", "epoch"])
        ['model']
    """
    there: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        there.update((".".join(parts[:count]), None) for count in range(1, len(parts) + 1))
        if len(there) > MOST:
            break
    found: list[str] = []
    for one in asked:
        for match in difflib.get_close_matches(one.removesuffix("*").removesuffix("."), there, limit):
            if not any(f"{match}.".startswith(f"{closer}.") for closer in found):
                found.append(match)
    return found[:limit]
