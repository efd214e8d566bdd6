"""The codec "planes": the numbers of a chunk taken apart by significance, and only the top bytes compressed.

In weights, gradients and optimizer states nearly all redundancy is in the exponent, that is in the most significant
byte. The other bytes are close to random: they are stored as they are, which costs a copy instead of a compressor.

Stored form of n bytes with numbers of w bytes, m = n // w: the low planes one after the other (those of `PLANES[w]`
but the last; a plane of v bytes holds those v bytes of all m numbers), then the n % w bytes after the last whole
number, then one zstandard frame with the m most significant bytes. All lengths follow from n and w.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from ..errors import CorruptionError
from .interface import BLOCK, check_bytes, check_width
from .memory import as_tensor, memory, scratch
from .zstd import LEAST_SAVED, compress, decompress

__all__ = ["PLANES", "Planes"]


class Plane(NamedTuple):
    """Some bytes of every number."""

    offset: int
    """First byte, counted from the least significant one."""
    width: int
    """Number of bytes: 1, 2 or 4."""


PLANES = {
    1: (Plane(0, 1),),
    2: (Plane(0, 1), Plane(1, 1)),
    4: (Plane(0, 2), Plane(2, 1), Plane(3, 1)),
    8: (Plane(0, 4), Plane(4, 2), Plane(6, 1), Plane(7, 1)),
}
"""Planes by width of the numbers, least significant first."""

_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


class Planes:
    """The codec "planes"."""

    def encode(self, data: torch.Tensor, itemsize: int) -> list[memoryview] | None:
        """Encode one chunk; see `Codec.encode`."""
        check_bytes("data", data)
        check_width(itemsize)
        length = data.numel()
        count, tail = divmod(length, itemsize)
        if count == 0:
            return None
        low_bytes = length - count
        top = scratch("top", count)
        low = scratch("low", low_bytes)
        _split(data, [*_low_planes(low, count, itemsize), top], itemsize)
        frame = compress(memory(top), "exponents")
        if low_bytes + len(frame) > length * (1 - LEAST_SAVED):
            return None
        if tail:
            low[low_bytes - tail :] = data[length - tail :]
        return [memory(low), memoryview(frame)] if low_bytes else [memoryview(frame)]

    def decode(self, stored: memoryview, out: torch.Tensor, itemsize: int) -> None:
        """Decode one chunk; see `Codec.decode`."""
        check_bytes("out", out)
        check_width(itemsize)
        length = out.numel()
        count, tail = divmod(length, itemsize)
        low_bytes = length - count
        if count == 0 or stored.nbytes <= low_bytes:
            raise CorruptionError(
                f"{stored.nbytes} bytes are stored for a chunk of {length} bytes in numbers of {itemsize} bytes, where "
                f"more than {low_bytes} bytes and one whole number are needed; the file is damaged"
            )
        top = decompress(stored[low_bytes:], count)
        if itemsize == 1:
            memory(out)[:] = top
            return
        low = as_tensor(stored[:low_bytes])
        _merge([*_low_planes(low, count, itemsize), as_tensor(memoryview(top))], out, itemsize)
        if tail:
            out[length - tail :] = low[low_bytes - tail :]


def _low_planes(low: torch.Tensor, count: int, itemsize: int) -> list[torch.Tensor]:
    """Cut the bytes that are stored raw into planes of `count` numbers; the tail is left out."""
    planes, start = [], 0
    for plane in PLANES[itemsize][:-1]:
        planes.append(low[start : start + plane.width * count])
        start += plane.width * count
    return planes


def _split(data: torch.Tensor, planes: list[torch.Tensor], itemsize: int) -> None:
    """Copy the bytes of all whole numbers to their planes, each as bytes at an aligned address."""
    count = planes[-1].numel()
    shape = PLANES[itemsize]
    # Views are made for all blocks at once: one by one they cost as much as the copies. (Tensor.split is Python.)
    targets = [bits.view(_SIGNED[plane.width]).unsafe_split(BLOCK) for bits, plane in zip(planes, shape, strict=True)]
    numbers = _numbers(data, count, itemsize)
    buffer = scratch("lanes", min(count, BLOCK) * itemsize)
    lanes, shifted, address = buffer.view(_SIGNED[itemsize]), buffer.data_ptr(), data.data_ptr()
    for block, start in enumerate(range(0, count, BLOCK)):
        size = min(BLOCK, count - start) * itemsize
        source = lanes if size == buffer.numel() else lanes[: size // itemsize]
        for plane, target in zip(shape, targets, strict=True):
            if plane.offset == 0 and numbers is not None:
                target[block].copy_(numbers[block])
                continue
            # Moving the bytes down does in one memcpy what a shift does more slowly, and aligns them. The bytes of the
            # last number that are not moved would be above the plane.
            ctypes.memmove(shifted, address + start * itemsize + plane.offset, size - plane.offset)
            target[block].copy_(source)


def _merge(planes: list[torch.Tensor], out: torch.Tensor, itemsize: int) -> None:
    """Put numbers together from their planes."""
    count = planes[-1].numel()
    numbers = _numbers(out, count, itemsize)
    whole, part = scratch("lanes", min(count, BLOCK) * itemsize), scratch("shifted", min(count, BLOCK) * itemsize)
    sources = [
        _numbers(bits, count, plane.width, unsigned=True) for bits, plane in zip(planes, PLANES[itemsize], strict=True)
    ]
    added = part.view(_SIGNED[itemsize])
    for block, start in enumerate(range(0, count, BLOCK)):
        length = min(BLOCK, count - start)
        target = whole[: length * itemsize].view(_SIGNED[itemsize]) if numbers is None else numbers[block]
        widened = added if length == added.numel() else added[:length]
        for plane, bits, source in zip(PLANES[itemsize], planes, sources, strict=True):
            if source is None:
                values = _copied(bits[start * plane.width : (start + length) * plane.width], plane.width)
            else:
                values = source[block]
            if plane.offset == 0:
                target.copy_(values)
            else:
                widened.copy_(values)
                target.add_(widened, alpha=1 << (8 * plane.offset))
        if numbers is None:
            ctypes.memmove(out.data_ptr() + start * itemsize, target.data_ptr(), length * itemsize)


def _numbers(data: torch.Tensor, count: int, width: int, unsigned: bool = False) -> tuple[torch.Tensor, ...] | None:
    """View the first `count` numbers in blocks; None where their address does not allow it.

    Unsigned numbers fill with zeros when they are widened.
    """
    if data.data_ptr() % width or data.storage_offset() % width:
        return None
    return data[: count * width].view((_UNSIGNED if unsigned else _SIGNED)[width]).unsafe_split(BLOCK)


def _copied(stored: torch.Tensor, width: int) -> torch.Tensor:
    """Copy a block of unsigned numbers to where it can be viewed as such."""
    aligned = scratch("plane", stored.numel())
    ctypes.memmove(aligned.data_ptr(), stored.data_ptr(), stored.numel())
    return aligned.view(_UNSIGNED[width])
