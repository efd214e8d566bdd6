"""Places of tensors in flat buffers."""

from __future__ import annotations

from torch import Tensor

from .._plan import Slot

__all__ = ["place_in"]


def place_in(buffer: Tensor, slot: Slot, like: Tensor | None) -> Tensor:
    """Return the part of a buffer for a tensor, with the strides of `like` if those leave no holes.

    Args:
        buffer: flat.
        slot: which part.
        like: a tensor of the shape of the slot; None: the part is contiguous.
    """
    if like is None or like.is_contiguous() or not _is_dense(like):
        return buffer[slot.offset : slot.stop].view(slot.shape)
    return buffer.as_strided(slot.shape, like.stride(), buffer.storage_offset() + slot.offset)


def _is_dense(tensor: Tensor) -> bool:
    """Tell whether a tensor's elements fill their memory, in some order of the dims."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride != expected:
                return False
            expected *= length
    return True
