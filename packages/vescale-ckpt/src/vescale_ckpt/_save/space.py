"""Is there room for a save? Asked before anything is written, since a full disk would show only after minutes."""

from __future__ import annotations

import errno

from .._storage import Storage
from ..errors import StorageError

__all__ = ["check_space"]


def check_space(storage: Storage, step: int, needed: int) -> None:
    """Raise StorageError with ENOSPC if a save cannot succeed.

    Args:
        storage: the store.
        step: that is to be saved.
        needed: bytes that all ranks together write at least. They share the store, so they share its file system.
    """
    if needed <= 0:
        return
    try:
        free = storage.free_bytes()
    except OSError:
        return  # not known; what is wrong with the storage shows when it is written
    # Some file systems say 0 where they do not know; one that is full fails at the first byte.
    if free is None or free <= 0 or free >= needed:
        return
    error = StorageError(
        f"{storage.url}: not enough space for step {step}: {needed} bytes of tensors are to be written there, "
        f"{free} bytes are free. Nothing was written. Free some space (vescale-ckpt gc removes what no step needs), "
        f'or save to another place, or with compress="auto" (layout="packed"), which is tried whatever is free.'
    )
    error.errno = errno.ENOSPC
    raise error
