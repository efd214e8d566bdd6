"""Memory of the CPU that is given back and taken again many times in each step.

The C library gives pages of large blocks back to the system at once, and each of them costs a fault when it is taken
anew: of a step of `fully_shard` that was a third of the time.
"""

from __future__ import annotations

import functools

import torch

__all__ = ["keep_freed_memory"]

LARGEST = (32 << 20) - (64 << 10)
"""Bytes of the largest block from which glibc learns: below its limit of 32 MiB with all that is added to a block."""


@functools.cache
def keep_freed_memory() -> None:
    """Let the C library keep up to 64 MiB of freed memory for the next ones who want some, in this process for good.

    glibc takes blocks as large as the largest one freed so far from its heap, not from the system, and keeps twice that
    at the end of the heap (M_MMAP_THRESHOLD in mallopt(3), with its limit on blocks of 32 MiB). So one block is taken
    and freed here, of which no page is touched. Other libraries have their own ways, and it means nothing to them; who
    sets these numbers by mallopt or the environment keeps them.
    """
    torch.empty(LARGEST, dtype=torch.uint8)
