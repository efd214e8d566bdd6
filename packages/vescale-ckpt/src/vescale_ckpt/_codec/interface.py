"""The rules that all codecs share; `protocols.Codec` says what one is.

A codec sees the bytes of one chunk and the width of the numbers in them; all numbers are little-endian.
"""

from __future__ import annotations

import sys

import torch

from ..errors import FormatError
from ..protocols import Codec

__all__ = ["BLOCK", "Codec", "check_bytes", "check_width", "number_width", "require_little_endian"]

BLOCK = 32768
"""Elements per call of an elementwise torch operator: with more, torch would wake its intra-op threads."""


def number_width(dtype: torch.dtype) -> int:
    """Return the bytes of one number of `dtype`: a complex element is two numbers.

    Args:
        dtype: any dtype that a dense tensor may have.

    Example:
        >>> number_width(torch.bfloat16), number_width(torch.complex64), number_width(torch.bool)
        (2, 4, 1)
    """
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize


def require_little_endian() -> None:
    """Refuse machines whose numbers are not laid out as the format says.

    Raises:
        FormatError: this machine is big-endian.
    """
    if sys.byteorder != "little":
        raise FormatError(
            f"this machine is {sys.byteorder}-endian, but checkpoints hold little-endian numbers, which are not "
            "converted; save and load on a little-endian machine"
        )


def check_width(itemsize: int) -> None:
    """Refuse widths that no number has.

    Raises:
        ValueError: `itemsize` is not 1, 2, 4 or 8.
    """
    if itemsize not in (1, 2, 4, 8):
        raise ValueError(f"itemsize = {itemsize}: expected 1, 2, 4 or 8; take number_width(dtype)")


def check_bytes(name: str, data: torch.Tensor) -> None:
    """Refuse what is not a run of bytes in host memory.

    Raises:
        ValueError: `data` is not a 1-D contiguous uint8 tensor on the CPU.
    """
    if data.dtype != torch.uint8 or data.ndim != 1 or data.device.type != "cpu" or not data.is_contiguous():
        raise ValueError(
            f"{name}: expected a 1-D contiguous torch.uint8 tensor on the CPU, got {data.dtype} of shape "
            f"{tuple(data.shape)} and strides {data.stride()} on {data.device}"
        )
