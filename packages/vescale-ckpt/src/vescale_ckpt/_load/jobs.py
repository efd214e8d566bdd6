"""Chunks that lie near each other in a file become one read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .plan import Part

__all__ = ["Extent", "Job", "jobs_of"]

JOB_BYTES = 4 << 20
"""One read has at most so many bytes, unless a single chunk is larger: all threads get something to do."""
GAP_BYTES = 64 << 10
"""Bytes between two chunks that are rather read and dropped than skipped."""
JOB_PARTS = 256
"""One read has at most so many chunks."""


class Extent(NamedTuple):
    """What is read of a chunk."""

    part: Part
    """The chunk."""
    offset: int
    """First byte in the file."""
    size: int
    """Bytes."""
    low: int
    """First element; not 0 only where a raw chunk is read in part."""
    high: int
    """One past the last element."""


class Job(NamedTuple):
    """One read."""

    path: str
    """File."""
    extents: list[Extent]
    """In the order of the file; none overlaps the next."""


def jobs_of(parts: Iterable[Part], *, whole: bool, most: int = JOB_BYTES) -> list[Job]:
    """Group chunks into reads.

    Args:
        parts: in any order.
        whole: read whole chunks, so that checksums can be checked; else only what is wanted of raw ones.
        most: bytes of one read, unless a single chunk has more.

    Returns:
        Reads, in the order of the files.
    """
    by_path: dict[str, list[Extent]] = {}
    for part in parts:
        path = part.index.files[part.index.chunks.file[part.row]].path
        by_path.setdefault(path, []).append(_extent(part, whole))
    jobs: list[Job] = []
    for path, extents in by_path.items():
        extents.sort(key=lambda extent: extent.offset)
        first = end = 0
        group: list[Extent] = []
        for extent in extents:
            gap = extent.offset - end
            near = 0 <= gap <= GAP_BYTES and extent.offset + extent.size - first <= most
            if group and near and len(group) < JOB_PARTS:
                group.append(extent)
                end = extent.offset + extent.size
                continue
            group = [extent]
            jobs.append(Job(path, group))
            first, end = extent.offset, extent.offset + extent.size
    return jobs


def _extent(part: Part, whole: bool) -> Extent:
    chunks = part.index.chunks
    if whole or chunks.codec[part.row] or not part.wants:
        return Extent(part, chunks.offset[part.row], chunks.stored[part.row], 0, part.count)
    low = min(want.start for want in part.wants)
    high = max(want.stop for want in part.wants)
    return Extent(part, chunks.offset[part.row] + low * part.itemsize, (high - low) * part.itemsize, low, high)
