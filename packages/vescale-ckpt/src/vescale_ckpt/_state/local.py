"""The mark on values that each rank keeps for itself, such as the position of its data loader."""

from __future__ import annotations

from typing import Any

__all__ = ["Local", "local"]


class Local:
    """A value that belongs to one rank; made by `local`."""

    __slots__ = ("value",)

    value: Any
    """What is marked; after a load in place, what was loaded."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"local({self.value!r})"


def local(value: Any) -> Local:
    """Mark a value as this rank's own.

    Without the mark all ranks must have the same value under one key, and it is saved once. A marked value is saved
    by every rank, and each rank gets back its own.

    Args:
        value: anything that a state may hold: a number, tensors, a dict, a `Stateful` object.

    Returns:
        What to put into the state in place of the value. After a load in place its `value` is the loaded one.

    Example:
        >>> import vescale_ckpt as ck
        >>> ck.local({"position": 7}).value["position"]
        7
    """
    return value if isinstance(value, Local) else Local(value)
