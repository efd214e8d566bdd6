"""Where the elements of a box are to go, and copying that never starts torch's own threads.

A target whose memory is one run of bytes is read into in place; any other one is filled from a scratch buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _codec
from .._geometry import Box

__all__ = ["Request", "Target", "copy"]

SERIAL = 32768
"""Elements that torch copies on the thread that asks; a larger copy would wake the threads of the training."""


class Request(NamedTuple):
    """A box of a tensor that is wanted."""

    number: int
    """Number of the tensor; from the number of the manifest's tensors on, of a writer's own ones."""
    box: Box
    """Which elements."""
    out: Tensor | None
    """Where they go: any strides, device and dtype, of the shape of the box; None: they are only checked."""
    writer: int | None = None
    """The writer to whom the tensor belongs, if it is one's own."""


class Target:
    """Where the elements of one request go."""

    __slots__ = ("box", "bytes", "dtype", "flat", "memory", "name", "out")

    def __init__(self, name: str, request: Request, dtype: torch.dtype) -> None:
        """Take a request, the name of its tensor, and the dtype that is stored."""
        out = request.out
        self.name, self.box, self.out = name, request.box, out
        self.dtype = dtype
        """What is stored; `out` may have another one."""
        self.flat: Tensor | None = None
        """The target in one dimension, where it is one run of memory."""
        self.bytes: Tensor | None = None
        """The same as bytes, where what is stored can be put there as it is."""
        self.memory: memoryview | None = None
        """The same as memory that files can be read into."""
        if out is not None and out.numel() and out.is_contiguous():
            self.flat = out.view(-1)
            if out.device.type == "cpu" and out.dtype == dtype and not out.is_conj() and not out.is_neg():
                self.bytes = _codec.as_bytes(self.flat)
                self.memory = _codec.memory(self.bytes)

    @property
    def device(self) -> torch.device | None:
        """Return the device of a target that copies must be waited for; None on the CPU."""
        return None if self.out is None or self.out.device.type == "cpu" else self.out.device


def copy(destination: Tensor, source: Tensor) -> None:
    """Copy, with conversion of the dtype if need be, on this thread alone.

    Args:
        destination: any strides and device.
        source: of the same shape, on the CPU.
    """
    if destination.is_inference() and not torch.is_inference_mode_enabled():
        with torch.inference_mode():
            copy(destination, source)
        return
    if destination.device.type != "cpu":
        destination.copy_(source, non_blocking=True)
        return
    for into, part in _small(destination, source):
        into.copy_(part)


def _small(destination: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut two tensors of one shape into the same parts of at most SERIAL elements."""
    if destination.numel() <= SERIAL:
        yield destination, source
        return
    dim = next(dim for dim, size in enumerate(destination.shape) if size > 1)
    rows = max(1, SERIAL * destination.shape[dim] // destination.numel())
    for start in range(0, destination.shape[dim], rows):
        count = min(rows, destination.shape[dim] - start)
        yield from _small(destination.narrow(dim, start, count), source.narrow(dim, start, count))
