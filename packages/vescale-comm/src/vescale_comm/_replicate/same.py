"""The same values on all ranks: tensors of one rank are copied to the others, all in one message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from .._gradients import local_of
from .._transport import Transport
from ..errors import CommError

__all__ = ["make_same"]

LIMIT = 32 << 20
"""Bytes of a message."""


def make_same(transport: Transport, tensors: Iterable[tuple[str, Tensor]], source: int = 0) -> None:
    """Copy the values of one rank to all; all ranks must call it with tensors of the same shapes and dtypes.

    Args:
        transport: over the ranks.
        tensors: names and tensors; of a sharded one, the local part.
        source: rank in the group, whose values are taken.

    Raises:
        CommError: a tensor has no memory.
    """
    if transport.size == 1:
        return
    with torch.no_grad():
        for chunk in _chunks(tensors):
            flat = torch.cat([_bytes(one) for one in chunk])
            transport.broadcast(flat, source).wait()
            if transport.rank != source:
                for one, part in zip(chunk, torch.split(flat, [one.nbytes for one in chunk]), strict=True):
                    # A copy, for the part may begin where numbers of this dtype must not.
                    one.copy_(part.clone().view(one.dtype).view(one.shape))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _chunks(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[Tensor]]:
    chunk: list[Tensor] = []
    filled = 0
    for name, tensor in tensors:
        local = local_of(tensor).detach()
        if local.is_meta:
            raise CommError(f"{name} is on the meta device: give it memory before it is replicated (to_empty).")
        if not local.numel():
            continue
        if chunk and (filled + local.nbytes > LIMIT or local.device != chunk[0].device):
            yield chunk
            chunk, filled = [], 0
        chunk.append(local)
        filled += local.nbytes
    if chunk:
        yield chunk
