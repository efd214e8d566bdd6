"""The codec "zstd": a chunk as one zstandard frame.

A frame is decoded only if it says that it holds exactly the bytes that the index promised.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import zstandard

from ..errors import CorruptionError
from .interface import check_bytes
from .memory import memory

if TYPE_CHECKING:
    import torch

__all__ = ["LEAST_SAVED", "Zstd", "compress", "decompress"]

LEAST_SAVED = 1 / 64
"""Part of a chunk that must be saved for the encoded form to be kept."""

_local = threading.local()


def plain_parameters() -> zstandard.ZstdCompressionParameters:
    """Return the parameters for bytes of any kind.

    On fp8, bool and integer chunks, level 1 is as small and as fast as any tuned set, and higher levels save nothing.
    """
    return zstandard.ZstdCompressionParameters(compression_level=1, write_checksum=0, write_content_size=1)


def exponent_parameters() -> zstandard.ZstdCompressionParameters:
    """Return the parameters for bytes of exponents: matches are accidents there, so hardly any are looked for."""
    return zstandard.ZstdCompressionParameters(
        compression_level=1,
        strategy=zstandard.STRATEGY_FAST,
        hash_log=6,
        min_match=7,
        window_log=17,
        write_checksum=0,
        write_content_size=1,
    )


_PARAMETERS = {"plain": plain_parameters, "exponents": exponent_parameters}


def compress(data: memoryview, kind: str) -> bytes:
    """Compress bytes to one frame, without a checksum: chunks have their own.

    Args:
        data: what to compress.
        kind: "plain" or "exponents": which parameters to use. Every kind is decoded alike.
    """
    # Compressors must not be used by two threads at a time.
    compressor: zstandard.ZstdCompressor | None = getattr(_local, kind, None)
    if compressor is None:
        compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS[kind]())
        setattr(_local, kind, compressor)
    return compressor.compress(data)


def decompress(frame: memoryview, length: int) -> bytes:
    """Decompress one frame.

    Args:
        frame: not trusted.
        length: bytes that it must give.

    Raises:
        CorruptionError: it is no frame, not whole, followed by something, or does not give `length` bytes.
    """
    try:
        # The decompressor allocates what the frame promises: so that must be what we know.
        promised = zstandard.get_frame_parameters(frame).content_size
        if promised != length:
            raise CorruptionError(
                f"compressed data of {frame.nbytes} bytes promises {promised} bytes where {length} were stored; "
                "the file is damaged"
            )
        decompressor: zstandard.ZstdDecompressor | None = getattr(_local, "decompressor", None)
        if decompressor is None:
            decompressor = _local.decompressor = zstandard.ZstdDecompressor()
        found = decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptionError(
            f"{frame.nbytes} bytes of compressed data cannot be decompressed to {length} bytes ({error}); "
            "the file is damaged"
        ) from error
    if len(found) != length:
        raise CorruptionError(f"compressed data gave {len(found)} bytes where {length} were stored")
    return found


class Zstd:
    """The codec "zstd"."""

    def encode(self, data: torch.Tensor, itemsize: int) -> list[memoryview] | None:
        """Encode one chunk; see `Codec.encode`."""
        check_bytes("data", data)
        frame = compress(memory(data), "plain")
        if len(frame) > data.numel() * (1 - LEAST_SAVED):
            return None
        return [memoryview(frame)]

    def decode(self, stored: memoryview, out: torch.Tensor, itemsize: int) -> None:
        """Decode one chunk; see `Codec.decode`."""
        check_bytes("out", out)
        memory(out)[:] = decompress(stored, out.numel())
