"""What a rank asks of a transport: one collective, described so that ranks can compare, and its checked arguments."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from .sums import check_sum

__all__ = ["Call", "broadcast_of", "flat_buffer", "flat_equal_parts", "reduction"]


@dataclass(frozen=True, slots=True)
class Call:
    """One collective."""

    operation: str
    """Name of the method."""
    numel: int
    """Elements of the buffer."""
    dtype: torch.dtype
    """Of the buffer."""
    divisor: float = 1
    """By which sums are divided."""
    accumulate: torch.dtype | None = None
    """Dtype of sums; None: that of the buffer."""
    source: int = -1
    """Rank that sends, where one does."""

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        """Spell it as error messages do."""
        text = f"{self.operation} of {self.numel} {str(self.dtype).removeprefix('torch.')}"
        if self.source >= 0:
            text += f" from rank {self.source}"
        if self.accumulate not in (None, self.dtype):
            text += f" summed in {str(self.accumulate).removeprefix('torch.')}"
        return text if self.divisor == 1 else f"{text} divided by {self.divisor:g}"

    @property
    def check(self) -> int:
        """12 bits that are most likely different for another call, and equal on all ranks for this one."""
        text = f"{self.operation}{self.numel}{self.dtype}{self.divisor}{self.accumulate}{self.source}"
        return zlib.crc32(text.encode()) & 0xFFF


def flat_buffer(buffer: Tensor) -> Tensor:
    """Check a buffer of any length, and return it apart from autograd.

    Raises:
        ValueError: it has not one dimension, is not contiguous, or its values are not what memory holds.
    """
    if buffer.dim() != 1 or not buffer.is_contiguous() or buffer.is_conj() or buffer.is_neg():
        raise ValueError(
            f"buffer: needs one dimension and contiguous memory; got shape {tuple(buffer.shape)}, "
            f"strides {buffer.stride()}. Give a flat buffer, such as tensor.contiguous().view(-1)."
        )
    return buffer.detach()


def flat_equal_parts(buffer: Tensor, size: int) -> list[Tensor]:
    """Check a buffer that ranks share equally, and return its parts by rank, apart from autograd.

    Raises:
        ValueError: as `flat_buffer`, or its length is not a multiple of `size`.
    """
    flat = flat_buffer(buffer)
    if flat.numel() % size:
        raise ValueError(
            f"buffer: its length must be a multiple of the number of ranks, {size}; got {flat.numel()} elements. "
            "Pad it."
        )
    return list(flat.tensor_split(size))


def reduction(operation: str, buffer: Tensor, divisor: float, accumulate: torch.dtype | None) -> Call:
    """Describe a sum over ranks.

    Raises:
        ValueError: it cannot be computed.
    """
    check_sum(buffer.dtype, divisor, accumulate)
    return Call(operation, buffer.numel(), buffer.dtype, float(divisor), accumulate)


def broadcast_of(buffer: Tensor, source: int, size: int) -> tuple[Call, Tensor]:
    """Describe a broadcast.

    Returns:
        The call, and the buffer as flat bytes, apart from autograd.

    Raises:
        ValueError: the buffer is not contiguous, or `source` is no rank of the group.
    """
    if not buffer.is_contiguous() or buffer.is_conj() or buffer.is_neg():
        raise ValueError(f"buffer: needs contiguous memory; got strides {buffer.stride()}. Give a contiguous copy.")
    if not 0 <= source < size:
        raise ValueError(f"source: needs a rank of the group, 0 <= source < {size}; got {source}.")
    call = Call("broadcast", buffer.numel(), buffer.dtype, source=source)
    return call, buffer.detach().view(-1).view(torch.uint8)
