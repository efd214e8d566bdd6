"""Memory of messages that is kept between steps, for whom the allocator of the device does not keep it.

On a CPU a large buffer that is freed goes back to the system, and its pages are faulted in again in the next step.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

__all__ = ["Pool", "available"]

MOST = 8
"""Buffers that a pool keeps for one size; with more in use at a time, further ones are made anew."""
MOST_BYTES = 8 << 20
"""Bytes that a pool keeps: what it keeps, the rest of a step has to do without."""


LEAST_BYTES = 1 << 17
"""Bytes of the smallest buffer that is worth keeping: the C library keeps smaller blocks by itself."""


def available(device: torch.device, num_bytes: int) -> bool:
    """Whether a buffer is worth keeping; devices other than a CPU have allocators that do, and that know streams."""
    return device.type == "cpu" and num_bytes >= LEAST_BYTES and hasattr(torch._C, "_storage_Use_Count")


class Pool:
    """Buffers that are given again once nobody but the pool holds them."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.dtype], list[tuple[Tensor, int, int]]] = {}
        self._lock = threading.Lock()
        self._num_bytes = 0

    def __deepcopy__(self, memo: object) -> Pool:
        return Pool()

    def take(self, like: Tensor, size: int) -> Tensor:
        """Return a flat buffer whose contents are undefined.

        Args:
            like: of the dtype and device.
            size: number of elements.
        """
        if torch.is_inference_mode_enabled():  # what is made here can be used nowhere else
            return like.new_empty(size)
        with self._lock:
            kept = self._kept.setdefault((size, like.dtype), [])
            for buffer, storage, alone in kept:
                if torch._C._storage_Use_Count(storage) <= alone:
                    return buffer.detach()
            buffer = like.new_empty(size)
            if len(kept) < MOST and self._num_bytes + buffer.nbytes <= MOST_BYTES:
                self._num_bytes += buffer.nbytes
                storage = buffer.untyped_storage()._cdata
                kept.append((buffer, storage, torch._C._storage_Use_Count(storage)))
            return buffer.detach()
