"""Which other steps a caller can go back to when one cannot be read."""

from __future__ import annotations

from .._format import StepFolders
from .._storage import Storage
from ..errors import CheckpointError, CorruptionError

__all__ = ["with_earlier"]

SHOWN = 4


def with_earlier(error: CorruptionError, storage: Storage, step: int) -> CorruptionError:
    """Return an error that also names the steps before the damaged one, newest first.

    Args:
        error: what is wrong.
        storage: the store.
        step: the step that is damaged.
    """
    try:
        folders = StepFolders(storage)
        found: list[int] = []
        for number in folders.numbers:
            if number < step and len(found) <= SHOWN and folders.of(number):
                found.append(number)
    except CheckpointError:  # the storage fails too, and the damage is what the caller should see
        return error
    if not found:
        return error
    some = ", ".join(map(str, found[:SHOWN])) + (" and more" if len(found) > SHOWN else "")
    return CorruptionError(
        f"{error}\nEarlier steps that are there: {some}. Load one with step={found[0]}; `vescale-ckpt verify` tells "
        f"whether it is sound.",
        error.tensors,
    )
