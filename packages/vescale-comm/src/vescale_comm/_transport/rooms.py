"""Memory for what arrives from other ranks, kept between collectives: fresh pages cost more than the copies."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

__all__ = ["Rooms"]

KEEP = 256 << 20
"""Bytes that are kept while nobody uses them."""


class Rooms:
    """Lends buffers."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        """By size."""
        self._lock = threading.Lock()

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Lend memory that nobody else uses.

        Returns:
            A flat tensor of the dtype, with undefined values, and what to give back.
        """
        nbytes = numel * dtype.itemsize
        room = None
        with self._lock:
            for index, free in enumerate(self._free):
                if free.numel() >= nbytes and free.device == device:
                    room = self._free.pop(index)
                    break
        if room is None:
            room = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return room[:nbytes].view(dtype), room

    def give_back(self, room: Tensor) -> None:
        """Take memory back; its tensors must not be used any more."""
        with self._lock:
            self._free.append(room)
            self._free.sort(key=Tensor.numel)
            while sum(map(Tensor.numel, self._free)) > KEEP:
                self._free.pop(0)

    def clear(self) -> None:
        """Free what is kept."""
        with self._lock:
            self._free.clear()
