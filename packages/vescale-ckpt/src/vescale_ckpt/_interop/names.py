"""New names for tensors that go to another format or come from one, checked: no two may become one."""

from __future__ import annotations

from collections.abc import Iterable

from .._load.names import Rename, renamer
from ..errors import MismatchError

__all__ = ["below", "new_names"]


def new_names(names: Iterable[str], rename: Rename = None, prefix: str = "") -> dict[str, str]:
    """Return name -> new name.

    Args:
        names: what is there.
        rename: a mapping of names (others stay), a list of (regular expression, replacement), a function, or None.
        prefix: is cut off first; names without it are left out.

    Raises:
        MismatchError: two names become one, or no name has the prefix.

    Example:
        >>> new_names(["model.w", "opt.w"], {"w": "v"}, "model.")
        {'model.w': 'v'}
    """
    all_names, rule = list(names), renamer(rename)
    found: dict[str, str] = {}
    owner: dict[str, str] = {}
    for name in all_names:
        if not name.startswith(prefix) or name == prefix:
            continue
        new = rule(name[len(prefix) :])
        if not isinstance(new, str) or not new:
            raise MismatchError(f"rename: {name} must become a name, but becomes {new!r}.")
        if new in owner:
            raise MismatchError(f"rename: {owner[new]} and {name} would both become {new}; names must stay distinct.")
        found[name], owner[new] = new, name
    if all_names and not found:
        some = ", ".join(all_names[:5])
        raise MismatchError(f"prefix: no name begins with {prefix!r}; there are {some}.")
    return found


def below(under: str | None) -> tuple[str, ...]:
    """Return the keys below which an import puts what it finds.

    Args:
        under: keys joined by dots; None or "": the root.

    Example:
        >>> below("train.model"), below(None)
        (('train', 'model'), ())
    """
    if not under:
        return ()
    if not isinstance(under, str) or not all(under.split(".")):
        raise ValueError(f'under: expected keys joined by dots such as "model", but got {under!r}.')
    return tuple(under.split("."))
