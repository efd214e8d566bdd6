"""The bytes of a small tensor, without numpy: torch does not bring it."""

from __future__ import annotations

import ctypes

from torch import Tensor


def bytes_of(tensor: Tensor) -> bytes:
    """Return the elements of a plain, contiguous tensor on the CPU, as they lie in memory."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
