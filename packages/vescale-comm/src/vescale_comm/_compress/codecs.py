"""Numbers in fewer bytes: bfloat16, and float16 or int8 with a factor per block, as rows of bytes.

A code is a function of the numbers of one block alone, with elementwise operations and a maximum: the same bits on
every device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Bfloat16", "Codec", "Float16", "Int8"]

TINY = 2.0**-110
"""Blocks of smaller numbers are scaled as if this were the largest."""


class Codec(Protocol):
    """Writes rows of numbers as rows of bytes, and reads them."""

    def encode(self, rows: Tensor) -> Tensor:
        """Return the code.

        Args:
            rows: of float32 or float64, in two dims, none of them empty.

        Returns:
            Contiguous rows of uint8, of a length that depends on that of `rows` only.
        """

    def decode(self, code: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return what the code says.

        Args:
            code: from `encode`.
            numel: of numbers in a row.
            dtype: of the result.
        """


class Bfloat16:
    """Half of the bytes of float32, eight bits of precision."""

    def encode(self, rows: Tensor) -> Tensor:
        """Return the code."""
        return rows.to(torch.bfloat16).view(torch.uint8)

    def decode(self, code: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return what the code says."""
        return _copy(code).view(torch.bfloat16).to(dtype)


class _Blocks(ABC):
    """Payloads of a small dtype, with a factor of float32 per block."""

    payload: torch.dtype

    def __init__(self, block: int) -> None:
        if block < 1:
            raise ValueError(f"block: needs a number of elements of at least 1; got {block}.")
        self.block = block

    @abstractmethod
    def _factors(self, blocks: Tensor) -> Tensor:
        """Return the factor of each block, in float32."""

    @abstractmethod
    def _numbers(self, blocks: Tensor, factors: Tensor) -> Tensor:
        """Return what the payload is to hold."""

    def _cut(self, numel: int) -> tuple[int, int]:
        block = max(1, min(self.block, numel))
        return -(-numel // block), block

    def encode(self, rows: Tensor) -> Tensor:
        """Return the code."""
        count, block = self._cut(rows.shape[1])
        padding = count * block - rows.shape[1]
        blocks = torch.nn.functional.pad(rows, (0, padding)) if padding else rows
        blocks = blocks.reshape(len(rows), count, block)
        factors = self._factors(blocks)
        numbers = self._numbers(blocks, factors.unsqueeze(-1)).to(self.payload)
        parts = [numbers.view(len(rows), -1).view(torch.uint8), factors.view(torch.uint8)]
        return torch.cat(parts, dim=1)

    def decode(self, code: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """Return what the code says."""
        count, block = self._cut(numel)
        size = count * block * self.payload.itemsize
        numbers = _copy(code[:, :size]).view(self.payload).view(len(code), count, block).to(dtype)
        factors = _copy(code[:, size:]).view(torch.float32).unsqueeze(-1).to(dtype)
        return numbers.mul_(factors).view(len(code), -1)[:, :numel]


class Float16(_Blocks):
    """Half of the bytes of float32, eleven bits of precision: blocks are scaled by powers of two to fill its range.

    Nothing overflows or vanishes beside numbers of its own size. What is not finite arrives as it was.
    """

    payload = torch.float16

    def _factors(self, blocks: Tensor) -> Tensor:
        largest = torch.where(blocks.isfinite(), blocks, 0).abs().amax(-1).float().clamp_(min=TINY)
        # Exact, since the quotient is a power of two; the largest number becomes 2**14 up to 2**15.
        return largest.mul(2.0**-15).div_(torch.frexp(largest).mantissa)

    def _numbers(self, blocks: Tensor, factors: Tensor) -> Tensor:
        return blocks / factors


class Int8(_Blocks):
    """A quarter of the bytes of float32: multiples of a 127th of the largest number of the block.

    An error is at most a 254th of the largest number. A block in which one is not finite arrives as NaN.
    """

    payload = torch.int8

    def _factors(self, blocks: Tensor) -> Tensor:
        factors = blocks.abs().amax(-1).float().div_(127)
        return torch.where(factors.isfinite(), factors, torch.nan)

    def _numbers(self, blocks: Tensor, factors: Tensor) -> Tensor:
        # Blocks of zeros have the factor 0, and those with NaN have NaN: both send zeros.
        return (blocks / factors).nan_to_num_(0).round_().clamp_(-127, 127)


def _copy(code: Tensor) -> Tensor:
    # Bytes may begin anywhere, numbers may not.
    return code.clone(memory_format=torch.contiguous_format)
