"""Which codec a tensor gets: the one that pays on a sample of it, the same for the same bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .interface import check_bytes, check_width
from .registry import codec, codec_names

if TYPE_CHECKING:
    import torch

__all__ = ["choose"]

LEAST_SAVED = 0.05
"""Part of the bytes that must be saved for compression to pay: below, a disk writes faster than a core compresses."""
LEAST_SAMPLE = 4096
"""Bytes below which the few saved ones are not worth a frame."""
PLANES_PREFERRED = 0.9
"""Zstandard on everything is several times slower than on one plane: it must be smaller by this factor."""


def choose(sample: torch.Tensor, itemsize: int, is_float: bool, mode: str | None) -> str:
    """Choose how the chunks of a tensor are stored.

    Args:
        sample: a few blocks of the tensor, for example of 64 KiB, whole numbers each; 1-D contiguous uint8, CPU.
        itemsize: bytes of one number, see `number_width`.
        is_float: whether the numbers have exponents.
        mode: None or "raw" for no compression, "auto" for what pays, or the name of a codec, which is then taken.

    Returns:
        "raw" or the name of a codec.

    Raises:
        ValueError: `mode` is none of these.

    Example:
        >>> import torch
        >>> weights = (torch.arange(65536) / 65536).to(torch.bfloat16)
        >>> choose(weights.view(torch.uint8), 2, True, "auto"), choose(weights.view(torch.uint8), 2, True, None)
        ('zstd', 'raw')
    """
    if mode is None or mode == "raw":
        return "raw"
    if mode != "auto":
        if mode not in codec_names():
            raise ValueError(
                f'compress = {mode!r}: expected None, "auto", "raw" or the name of a codec: {", ".join(codec_names())}'
            )
        return mode
    check_bytes("sample", sample)
    check_width(itemsize)
    length = sample.numel()
    if length < LEAST_SAMPLE:
        return "raw"
    zstd = _encoded(sample, itemsize, "zstd")
    planes = _encoded(sample, itemsize, "planes") if is_float and itemsize > 1 else length
    name, smallest = ("zstd", zstd) if zstd < PLANES_PREFERRED * planes else ("planes", planes)
    if itemsize == 1 or not is_float:
        name, smallest = "zstd", zstd
    return name if smallest <= (1 - LEAST_SAVED) * length else "raw"


def _encoded(sample: torch.Tensor, itemsize: int, name: str) -> int:
    """Bytes that a codec makes of the sample."""
    parts = codec(name).encode(sample, itemsize)
    return sample.numel() if parts is None else sum(part.nbytes for part in parts)
