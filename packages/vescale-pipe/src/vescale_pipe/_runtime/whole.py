"""Values that go whole to each micro-batch although they have as many rows as the batch, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils import _pytree

from .._nearest import nearest
from ..errors import PipeError

__all__ = ["TARGET", "Paths", "flags", "whole_paths"]

TARGET = "target"
"""Name of the second argument of the loss."""
Paths = tuple[str, ...]
"""Within an argument the leaves, or containers of leaves, that are whole; "" for all of it."""


def whole_paths(
    names: Sequence[str | int],
    parameters: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> dict[int | str, Paths]:
    """Return per argument of a call what of it is whole.

    Args:
        names: what `PipePlan.whole` says: positions, names, or names with a path into containers ("batch.table").
        parameters: names of the arguments that the model has, as far as they are known.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.

    Raises:
        PipeError: there is no such argument.

    Example:
        >>> whole_paths(["table", 0, "target.weights"], ["x", "table"], [1, 2], {})
        {1: ('',), 0: ('',), 'target': ('weights',)}
    """
    found: dict[int | str, Paths] = {}
    for name in names:
        head, _, path = str(name).partition(".")
        key: int | str = int(head) if head.isdigit() else head
        if isinstance(key, str) and key not in kwargs and key in parameters[: len(args)]:
            key = parameters.index(key)
        is_given = 0 <= key < len(args) if isinstance(key, int) else key in kwargs or key == TARGET
        if is_given:
            found[key] = (*found.get(key, ()), path)
        elif not (0 <= key < len(parameters) if isinstance(key, int) else key in parameters):
            have = dict.fromkeys([*map(str, range(len(args))), *kwargs, *parameters, TARGET])
            raise PipeError(
                f"whole={name!r}: the call has no argument {head!r} (given: {len(args)} positional and "
                f"{sorted(kwargs)}).{nearest(head, have, 'arguments')}"
            )
    return found


def flags(name: int | str, value: Any, paths: Paths, count: int) -> list[bool]:
    """Return for each leaf of an argument whether it is whole.

    Args:
        name: of the argument, for errors.
        value: the argument.
        paths: what of it is whole.
        count: its leaves.

    Raises:
        PipeError: a path leads nowhere.

    Example:
        >>> flags("batch", {"x": 1, "table": [2, 3]}, ("table",), 3)
        [False, True, True]
    """
    if "" in paths:
        return [True] * count
    if value is None or not paths:  # a rank that does not need the argument may leave it out
        return [False] * count
    try:
        leaves, _ = _pytree.tree_flatten_with_path(value)
    except ValueError as error:
        raise PipeError(
            f"whole='{name}.{paths[0]}': names inside of a {type(value).__name__} are not known; give the argument "
            "whole, or as a dict."
        ) from error
    texts = [".".join(_text(step) for step in path) for path, _ in leaves]
    found = [False] * count
    for path in paths:
        hits = [place for place, text in enumerate(texts) if text == path or text.startswith(f"{path}.")]
        if not hits:
            raise PipeError(f"whole='{name}.{path}': nothing is there.{nearest(path, texts, 'leaves')}")
        for place in hits:
            found[place] = True
    return found


def _text(step: Any) -> str:
    for name in ("key", "idx", "name"):
        if hasattr(step, name):
            return str(getattr(step, name))
    return str(step)
