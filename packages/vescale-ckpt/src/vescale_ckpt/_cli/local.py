"""What stands at a key for `cat`, also where each rank has a value of its own."""

from __future__ import annotations

from typing import Any

from .._load import Checkpoint
from .._state import Local
from .arguments import UsageError

__all__ = ["value_at"]


def value_at(checkpoint: Checkpoint, key: str, rank: int | None) -> Any:
    """Return a value, a `TensorView`, or a dict or list of those.

    Args:
        checkpoint: an open step.
        key: keys on the way, joined by dots.
        rank: whose value, where each rank has its own; None: rank 0's if one rank saved.

    Raises:
        KeyError: nothing is there.
        UsageError: each rank has its own value there, and no rank is given, or one that did not save.
    """
    world = checkpoint.manifest.world
    ranks = "rank 0" if world == 1 else f"ranks 0 to {world - 1}"
    if rank is not None and not 0 <= rank < world:
        raise UsageError(f"--rank {rank}: step {checkpoint.step} was saved by {ranks}.")
    found = _walk(checkpoint.tree(0 if rank is None and world == 1 else rank), key)
    if not found:
        return checkpoint[key]  # knows what is near
    if isinstance(found[0], Local):
        raise UsageError(f"{key}: each rank has a value of its own: give --rank; step {checkpoint.step} has {ranks}.")
    return found[0]


def _walk(value: Any, rest: str) -> list[Any]:
    """Return what is at the rest of a key, in a list that is empty if nothing is; values of single ranks end the way.

    Example:
        >>> _walk({"a.b": {"c": 1}, "a": [2, 3]}, "a.b.c"), _walk({"a": [2, 3]}, "a.1"), _walk({"a": 1}, "b")
        ([1], [3], [])
    """
    if isinstance(value, Local):
        return [value]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, inner in items:
        if str(key) == rest:
            return [inner]
        if rest.startswith(f"{key}.") and (found := _walk(inner, rest[len(str(key)) + 1 :])):
            return found
    return []
