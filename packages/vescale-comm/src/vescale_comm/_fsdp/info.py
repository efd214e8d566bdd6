"""What a shard parameter knows about the whole parameter."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ProcessGroup

from .._shards import ShardTensor, Whole

__all__ = ["ShardInfo"]


@dataclass(frozen=True, slots=True, eq=False)
class ShardInfo:
    """Which elements of which parameter a shard holds; a shard parameter has it as its attribute `vescale`."""

    name: str
    """Fully qualified name of the parameter."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    whole: Whole
    """What this rank would hold without sharding: all of a plain parameter, the local part of a DTensor."""
    start: int
    """First element of the shard, counted through `whole`."""
    stop: int
    """First element behind it; equal to `start` where this rank has none."""
    groups: tuple[ProcessGroup, ...]
    """The elements are spread over the ranks of these groups, such as data parallel times tensor parallel."""
    copies: tuple[ProcessGroup, ...] = ()
    """The ranks of each of these groups hold the same elements."""

    def label(self, tensor: Tensor) -> ShardTensor:
        """Return a tensor of the shard's elements, such as a gradient, together with its place in the whole.

        Args:
            tensor: one-dimensional, as long as the shard; memory is shared.
        """
        return ShardTensor.make(tensor, self.whole, self.start, self.stop)
