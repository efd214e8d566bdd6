"""Sums in the order of ranks, so that nothing but its addends decides the bits of an element's sum.

An all-reduce adds the parts of a message in an order that depends on where in the message they are, and how large it
is: with more than two ranks, gradients that share a message would have other bits than those that travel alone. Here
ranks exchange parts, and add what they got one rank after the other. What is sent is what an all-reduce sends; small
messages go whole to everybody, which takes one exchange in place of two. On gloo that takes less time than its
all-reduce, so there all small sums are made so.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .buffers import Pool

__all__ = ["RankedSum", "all_gather", "goes_whole"]

WHOLE_BYTES = 1 << 20
"""Bytes of a message times ranks, for it to go whole to everybody."""

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


def goes_whole(num_bytes: int, num_ranks: int) -> bool:
    """Whether a message of so many bytes goes whole to everybody."""
    return num_bytes * num_ranks <= WHOLE_BYTES


class RankedSum:
    """A sum over ranks under way, of a tensor where it lies.

    Args:
        out: contiguous; what is added, and, after `wait`, the sum.
        group: of the ranks.
        num_ranks: how many they are.
        pool: where the memory of what others send comes from; None: anew.
    """

    __slots__ = ("_group", "_num", "_out", "_parts", "_whole", "_work")

    def __init__(self, out: Tensor, group: dist.ProcessGroup, num_ranks: int, pool: Pool | None) -> None:
        out = torch.view_as_real(out) if out.is_complex() else out
        self._out, self._group, self._num = out.view(-1), group, num_ranks
        self._whole = goes_whole(out.numel() * out.element_size(), num_ranks)
        length = out.numel() if self._whole else -(-out.numel() // num_ranks)
        size = length * num_ranks
        self._parts = out.new_empty(size) if pool is None else pool.take(out, size)
        if self._whole:
            self._work = all_gather(_bits(self._parts), _bits(self._out), group=group, async_op=True)
        else:
            self._work = dist.all_to_all_single(
                _bits(self._parts), _bits(self._padded(size)), group=group, async_op=True
            )

    def _padded(self, size: int) -> Tensor:
        """What is to be sent, so long that all ranks get equally much."""
        rest = size - self._out.numel()
        return torch.cat([self._out, self._out.new_zeros(rest)]) if rest else self._out

    def is_completed(self) -> bool:
        """Whether all that others send to this rank is there."""
        return bool(self._work.is_completed())

    def wait(self) -> None:
        """Let the sum be there."""
        self._work.wait()
        first, second, *others = self._parts.view(self._num, -1).unbind()
        total = torch.add(first, second, out=self._out if self._whole else first)
        for other in others:
            total += other
        if self._whole:
            return
        even = self._parts.numel() == self._out.numel()
        whole = self._out if even else self._out.new_empty(self._parts.numel())
        all_gather(_bits(whole), _bits(total), group=self._group, async_op=True).wait()
        if not even:
            self._out.copy_(whole[: self._out.numel()])


def _bits(tensor: Tensor) -> Tensor:
    """A view that every backend can send."""
    return tensor.view(torch.uint8)
