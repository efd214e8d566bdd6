"""Pins: a step that has one is never removed by retention."""

from __future__ import annotations

import json
import os
import time

from .._format import find, step_path
from .._format.paths import PIN
from .._storage import Storage, open_storage
from ..errors import MissingStepError
from .scan import look

__all__ = ["pin", "unpin"]


def pin(path: str | os.PathLike[str] | Storage, step: int | str = "latest") -> int:
    """Keep a step whatever retention says.

    Args:
        path: the store.
        step: number of the step, or "latest".

    Returns:
        The number of the step.

    Raises:
        MissingStepError: there is no such step, or it is being removed just now.
    """
    storage = open_storage(path)
    entry = find(storage, step)
    storage.put(step_path(entry.folder, PIN), json.dumps({"pinned": time.time()}).encode())
    # A collection writes its mark, then looks for a pin; here it is the other way round, so one sees the other.
    after = look(storage, entry.folder)
    if after.removed or after.commit is None:
        storage.remove(step_path(entry.folder, PIN))
        raise MissingStepError(
            f"{storage.url}: step {entry.step} ({entry.folder}) is being removed: it cannot be pinned."
        )
    return entry.step


def unpin(path: str | os.PathLike[str] | Storage, step: int | str = "latest") -> int:
    """Let retention remove a step again; one that has no pin is fine.

    Args:
        path: the store.
        step: number of the step, or "latest".

    Returns:
        The number of the step.

    Raises:
        MissingStepError: there is no such step.
    """
    storage = open_storage(path)
    entry = find(storage, step)
    storage.remove(step_path(entry.folder, PIN))
    storage.sync(step_path(entry.folder))
    return entry.step
