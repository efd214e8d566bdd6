"""Python objects of all ranks of a group. torch's `all_gather_object` needs numpy, which torch does not bring."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist

from .._bytes import bytes_of


def gather_objects(mine: Any, group: dist.ProcessGroup, device: str) -> list[Any]:
    """Return an object of every rank of a group, in its order; all of its ranks must call this.

    Args:
        mine: this rank's object, which pickle takes.
        group: whose ranks; one of a backend that communicates.
        device: type of the device from which the group sends.
    """
    data = pickle.dumps(mine)
    size = dist.get_world_size(group)
    length = torch.tensor([len(data)], device=device)
    lengths = [torch.empty_like(length) for _ in range(size)]
    dist.all_gather(lengths, length, group=group)
    counts = [int(n) for n in lengths]
    padded = torch.frombuffer(bytearray(data.ljust(max(counts), b"\0")), dtype=torch.uint8).to(device)
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded, group=group)
    return [pickle.loads(bytes_of(part.cpu())[:count]) for part, count in zip(parts, counts, strict=True)]
