"""Errors of the operating system told in terms of the checkpoint: what was done, where, and what to do now."""

from __future__ import annotations

import errno

from ..errors import CorruptionError, StorageError

FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}

ADVICE = {
    errno.EACCES: "no permission: check the owner and mode of the folder, or choose another place",
    errno.EPERM: "not permitted: check the owner and mode of the folder, or choose another place",
    errno.EROFS: "the file system is read-only: choose another place",
    errno.ENOTDIR: "a part of the path is a file, not a folder: choose another place, or move that file away",
    errno.EISDIR: "it is a folder where a file was expected",
    errno.ENAMETOOLONG: "the path is too long for this file system: choose a shorter root",
    errno.EIO: "the device reported an input/output error: check it (dmesg, smartctl) before trusting it again",
    errno.EMFILE: "this process has too many open files: raise the limit (ulimit -n)",
    errno.EFBIG: "the file would be larger than allowed: check the limit of the process (ulimit -f) or file system",
    errno.ELOOP: "symbolic links form a circle, or one stands where a file was expected",
}


def storage_error(
    action: str,
    path: str,
    url: str,
    error: BaseException,
    *,
    needed: int | None = None,
) -> StorageError:
    """Make the error for a storage that failed.

    Args:
        action: what was tried: "write", "read", ...
        path: relative to the storage; "" for its root.
        url: root of the storage.
        error: what was raised; its errno is kept.
        needed: bytes that were still to be written. What is free is not told: it changes when the part of the file
            that was written is removed.
    """
    code = getattr(error, "errno", None)
    what = f"cannot {action} {path!r} in {url}" if path else f"cannot {action} {url}"
    if code in FULL:
        numbers = "" if needed is None else f": {needed} more bytes were to be written there"
        text = f"{what}: {FULL[code]}{numbers}. Free some space (vescale-ckpt gc removes what no step needs) and retry"
    elif code in ADVICE:
        text = f"{what}: {ADVICE[code]} ({error})"
    else:
        text = f"{what}: {type(error).__name__}: {error}"
    made = StorageError(text)
    made.errno = code if isinstance(code, int) else None
    return made


def too_short(path: str, url: str, offset: int, wanted: int, size: int) -> CorruptionError:
    """Make the error for a file that ends too soon."""
    return CorruptionError(
        f"{path!r} in {url} is too short: {wanted} bytes are needed from byte {offset} on, but it has {size} bytes; "
        "it was cut off or replaced after it was saved"
    )
