"""Numbers that tell whether bytes changed: CRC-32 for storage, a fingerprint for dedup, SHA-256 for identity.

The fingerprint is the fast one: two sums of products per 8 KiB, modulo 2**64, in the order of the bytes.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import zlib

import torch

from .interface import check_bytes, require_little_endian
from .memory import memory, scratch

__all__ = ["FINGERPRINT_BYTES", "crc32", "fingerprint", "keys", "sha256"]

FINGERPRINT_BYTES = 16
"""Length of a fingerprint."""

WORDS = 1024
"""64-bit words per row; their keys stay in the nearest cache."""
ROW = 8 * WORDS
"""Bytes per row."""
BLOCK_ROWS = 32
"""Rows per block, whose bytes are rotated together."""

_MASK = (1 << 64) - 1


def crc32(data: torch.Tensor | memoryview) -> int:
    """Return zlib's CRC-32.

    Args:
        data: bytes, or a contiguous CPU tensor, of which the bytes are taken.

    Example:
        >>> hex(crc32(memoryview(b"123456789")))
        '0xcbf43926'
    """
    return zlib.crc32(memory(data) if isinstance(data, torch.Tensor) else data)


def sha256(data: torch.Tensor | memoryview) -> bytes:
    """Return the SHA-256 digest, 32 bytes.

    Args:
        data: bytes, or a contiguous CPU tensor, of which the bytes are taken.

    Example:
        >>> sha256(memoryview(b"")).hex()[:8]
        'e3b0c442'
    """
    return hashlib.sha256(memory(data) if isinstance(data, torch.Tensor) else data).digest()


def fingerprint(data: torch.Tensor) -> bytes:
    """Return 16 bytes that differ if the bytes or their number differ, but for accidents.

    Not for identity against an adversary: use `sha256` there. The bytes are cut into rows of 1024 little-endian words
    x and blocks of 32 rows (the last block may be shorter). Of each row the sums of x[i] * r[i] and of y[i] * s[i],
    modulo 2**64, are taken, where y are the words of the block rotated by 4 bytes towards its start, and r, s =
    `keys()`, all odd. So a change within one word always shows in the first sum; a change of top bits alone, of which
    the first sum sees only how many there are modulo 2, is in the middle of a word in the second. The result is the
    first half of the SHA-256 digest of the length (8 bytes), the first sums of all rows, the second sums of all rows,
    and the bytes after the last whole row.

    Args:
        data: 1-D contiguous uint8 on the CPU.

    Example:
        >>> len(fingerprint(torch.zeros(9000, dtype=torch.uint8)))
        16
    """
    check_bytes("data", data)
    require_little_endian()
    length = data.numel()
    rows = length // ROW
    digest = hashlib.sha256(length.to_bytes(8, "little"))
    if rows:
        digest.update(memory(_sums(data[: rows * ROW], rows)))
    if length > rows * ROW:
        digest.update(memory(data[rows * ROW :]))
    return digest.digest()[:FINGERPRINT_BYTES]


def _sums(data: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the sums of a whole number of rows, the first one of every row and then the second one of every row."""
    first, second = _key_tensors()
    sums = scratch("sums", 16 * rows).view(torch.int64)
    address = data.data_ptr()
    direct = address % 8 == 0 and data.storage_offset() % 8 == 0
    if direct:
        # torch's matrix-vector product of integers runs on the calling thread only and wraps around.
        torch.mv(data.view(torch.int64).view(rows, WORDS), first, out=sums[:rows])
    for row in range(0, rows, BLOCK_ROWS):
        count = min(BLOCK_ROWS, rows - row)
        size, start = count * ROW, address + row * ROW
        block = scratch("lanes", size)
        words, moved = block.view(torch.int64).view(count, WORDS), block.data_ptr()
        if not direct:
            ctypes.memmove(moved, start, size)
            torch.mv(words, first, out=sums[row : row + count])
        # A memcpy that is off by 4 bytes brings the high half of each word down faster than a shift does.
        ctypes.memmove(moved, start + 4, size - 4)
        ctypes.memmove(moved + size - 4, start, 4)
        torch.mv(words, second, out=sums[rows + row : rows + row + count])
    return sums


def keys() -> tuple[list[int], list[int]]:
    """Return the factors r and s of `fingerprint`: 2048 outputs of splitmix64 from state 0, each made odd."""
    state, found = 0, []
    for _ in range(2 * WORDS):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        found.append((z ^ (z >> 31)) | 1)
    return found[:WORDS], found[WORDS:]


@functools.cache
def _key_tensors() -> tuple[torch.Tensor, torch.Tensor]:
    first, second = keys()
    return _signed(first), _signed(second)


def _signed(numbers: list[int]) -> torch.Tensor:
    return torch.tensor([n - (1 << 64) if n >> 63 else n for n in numbers], dtype=torch.int64, device="cpu")
