"""The bytes of a tensor as a memoryview and back, without a copy and without NumPy; buffers that threads reuse."""

from __future__ import annotations

import ctypes
import threading

import torch

__all__ = ["as_bytes", "as_tensor", "memory", "scratch"]

_KEPT = 1 << 20
"""Bytes up to which a thread keeps a buffer; longer ones are made anew, so that one large chunk does not stay."""

_local = threading.local()


def memory(tensor: torch.Tensor) -> memoryview:
    r"""Return the bytes of a tensor, writable, without a copy.

    Args:
        tensor: contiguous, on the CPU, any dtype and shape.

    Returns:
        A view of format "B" of all its bytes; the tensor's memory lives as long as the view.

    Raises:
        ValueError: the tensor is not contiguous or not on the CPU.

    Example:
        >>> numbers = torch.tensor([1, 2], dtype=torch.int16)
        >>> view = memory(numbers)
        >>> view[2] = 7
        >>> bytes(view), numbers
        (b'\x01\x00\x07\x00', tensor([1, 7], dtype=torch.int16))
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"tensor: expected contiguous memory on the CPU, got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()} on {tensor.device}; copy it first"
        )
    length = tensor.numel() * tensor.element_size()
    if length == 0:
        return memoryview(bytearray())
    array = (ctypes.c_ubyte * length).from_address(tensor.data_ptr())
    # The view holds the array, and the array the tensor.
    array.keep = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def as_bytes(dense: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor of any dtype, shape and device as 1-D uint8 on the same memory.

    Example:
        >>> as_bytes(torch.tensor([[1, 2]], dtype=torch.int16))
        tensor([1, 0, 2, 0], dtype=torch.uint8)
    """
    flat = dense.detach().view(-1)
    if flat.dtype == torch.complex32:  # cannot be viewed as bytes in one step
        flat = flat.view(torch.int32)
    return flat.view(torch.uint8)


def as_tensor(buffer: memoryview) -> torch.Tensor:
    """Return bytes as a tensor: the same memory, or a copy of memory that must not be written.

    Args:
        buffer: contiguous.

    Returns:
        1-D uint8 on the CPU; keeps the buffer alive.

    Example:
        >>> as_tensor(memoryview(bytearray(b"ab")))
        tensor([97, 98], dtype=torch.uint8)
    """
    if buffer.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    # frombuffer warns of read-only memory, since a tensor can always be written.
    return torch.frombuffer(bytearray(buffer) if buffer.readonly else buffer, dtype=torch.uint8)


def scratch(name: str, length: int) -> torch.Tensor:
    """Return a buffer of this thread: the same memory at every call with the same name, with any content.

    Args:
        name: what the buffer is for.
        length: bytes.

    Returns:
        1-D uint8 on the CPU, aligned for all dtypes.
    """
    if length > _KEPT:
        return torch.empty(length, dtype=torch.uint8, device="cpu")
    buffers: dict[str, torch.Tensor] | None = getattr(_local, "buffers", None)
    if buffers is None:
        buffers = _local.buffers = {}
    kept = buffers.get(name)
    if kept is None or kept.numel() < length:
        kept = buffers[name] = torch.empty(length, dtype=torch.uint8, device="cpu")
    return kept if kept.numel() == length else kept[:length]
