"""Python objects of all ranks of a group. torch's `all_gather_object` needs numpy, which torch does not bring."""

from __future__ import annotations

import ctypes
import pickle
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["gather_objects"]


def gather_objects(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return an object of every rank, by rank; all ranks of the group must call it.

    Args:
        mine: of this rank; whatever pickle takes.
        group: None: the default group.
    """
    data = pickle.dumps(mine)
    served = [pair.split(":")[0] for pair in dist.get_backend_config(group).split(",")]
    device = "cpu" if "cpu" in served else served[0]
    length = torch.tensor([len(data)], device=device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    counts = [int(n) for n in lengths]
    padded = torch.frombuffer(bytearray(data.ljust(max(counts), b"\0")), dtype=torch.uint8).to(device)
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group=group)
    held = [part.cpu() for part in parts]
    return [pickle.loads(ctypes.string_at(t.data_ptr(), n)) for t, n in zip(held, counts, strict=True)]
