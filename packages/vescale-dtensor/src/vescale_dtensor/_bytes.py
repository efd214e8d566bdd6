"""The bytes of a tensor and their hash, without numpy: torch does not bring it."""

from __future__ import annotations

import ctypes
import hashlib

from torch import Tensor


def bytes_of(tensor: Tensor) -> bytes:
    """Return the elements of a plain, contiguous tensor on the CPU, as they lie in memory."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def hash_of(tensor: Tensor) -> str:
    """Return a text that equals for plain tensors of the same elements; nothing is copied that lies on the CPU."""
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    num_bytes = data.numel() * data.element_size()
    content = (ctypes.c_char * num_bytes).from_address(data.data_ptr()) if num_bytes else b""
    return hashlib.blake2b(content, digest_size=12).hexdigest()
