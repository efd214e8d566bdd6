"""Small exchanges over a transport: bytes of every rank, and whether all ranks say the same."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from .._transport import Transport
from ..errors import MismatchError

__all__ = ["check_same", "gather_bytes"]


def gather_bytes(transport: Transport, data: bytes, device: torch.device) -> list[bytes]:
    """Return the bytes of every rank; all ranks must call it.

    Args:
        transport: over the ranks.
        data: of this rank, of any length.
        device: on which the transport works.
    """
    lengths = [struct.unpack("<q", one)[0] for one in _gather(transport, struct.pack("<q", len(data)), device)]
    width = max(*lengths, 1)
    parts = _gather(transport, data.ljust(width, b"\0"), device)
    return [part[:length] for part, length in zip(parts, lengths, strict=True)]


def _gather(transport: Transport, data: bytes, device: torch.device) -> list[bytes]:
    """Exchange bytes of the same length on all ranks."""
    rows = torch.zeros(transport.size, len(data), dtype=torch.uint8)
    rows[transport.rank] = _tensor(data)
    rows = rows.to(device)
    transport.all_gather(rows.view(-1)).wait()
    return [bytes(row) for row in rows.tolist()]


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def check_same(transport: Transport, device: torch.device, lines: Sequence[str], what: str, advice: str) -> None:
    """Check that all ranks have the same lines; all ranks must call it.

    Args:
        transport: over the ranks.
        device: on which the transport works.
        lines: of this rank, each begins with the name of a parameter.
        what: of what they tell, for the error.
        advice: what to do, for the error.

    Raises:
        MismatchError: they differ; raised on every rank, with the first difference.
    """
    text = "\n".join(lines)
    digests = _gather(transport, hashlib.sha256(text.encode()).digest(), device)
    if len(set(digests)) == 1:
        return
    texts = [one.decode().split("\n") for one in gather_bytes(transport, text.encode(), device)]
    other = next(rank for rank, one in enumerate(texts) if one != texts[0])
    first, second = texts[0], texts[other]
    at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    said = [f"has {one[at]}" if at < len(one) else f"ends after {len(one)}" for one in (first, second)]
    raise MismatchError(
        f"The ranks disagree on {what}: at number {at}, rank 0 {said[0]}, but rank {other} {said[1]}. {advice}"
    )
