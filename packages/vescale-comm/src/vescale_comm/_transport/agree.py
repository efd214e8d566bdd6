"""Short words that every rank of a group tells all others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .interface import Transport

__all__ = ["exchange"]

ROOM = 1024
"""Bytes per rank."""


def exchange(transport: Transport, word: bytes, device: torch.device | None = None) -> list[bytes]:
    """Tell all ranks a word, and return theirs by rank; every rank of the transport calls it at the same place.

    Args:
        transport: that carries them.
        word: what to tell; longer ones are cut to 1022 bytes.
        device: of the memory that the transport can send from; None: the CPU.
    """
    word = word[: ROOM - 2]
    framed = len(word).to_bytes(2, "little") + word
    buffer = torch.zeros(transport.size * ROOM, dtype=torch.uint8)
    start = transport.rank * ROOM
    buffer[start : start + len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
    buffer = buffer.to(device or "cpu")
    transport.all_gather(buffer).wait()
    return [_unframed(bytes(row)) for row in buffer.view(transport.size, ROOM).tolist()]


def _unframed(row: Sequence[int]) -> bytes:
    return bytes(row[2 : 2 + int.from_bytes(bytes(row[:2]), "little")])
