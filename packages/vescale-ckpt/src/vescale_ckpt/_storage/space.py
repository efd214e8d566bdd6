"""How many bytes can still be written below a local folder.

Less is never told than is true, so that nobody gives up for nothing.
"""

from __future__ import annotations

import os
import re

__all__ = ["free_bytes"]

COMPRESSING = {"bcachefs", "btrfs", "f2fs", "zfs"}
"""File systems that may compress by themselves: more can be written than there are bytes."""
MOUNTS = "/proc/self/mountinfo"


def free_bytes(folder: str) -> int | None:
    """Return the bytes that are free for this user where a folder is, or will be; None where that is not known.

    Args:
        folder: absolute, without links.
    """
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    if file_system(folder) in COMPRESSING:
        return None
    about = os.statvfs(folder)
    if about.f_blocks == 0:  # one that does not count
        return None
    return about.f_frsize * (about.f_bfree if os.geteuid() == 0 else about.f_bavail)


def file_system(folder: str) -> str | None:
    """Return the kind of the file system of a folder, such as "ext4"; None where the system does not tell."""
    try:
        with open(MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    found, longest = None, -1
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        inside = folder == point or folder.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= longest:  # of two on the same place, the later one lies on top
            found, longest = after.split(" ")[0], len(point)
    return found
