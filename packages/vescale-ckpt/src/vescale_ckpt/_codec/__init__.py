"""How the bytes of a chunk are stored: compressed or raw, and the numbers that tell whether they changed."""

from __future__ import annotations

from .checksum import crc32, fingerprint, sha256
from .choose import choose
from .interface import Codec, number_width
from .memory import as_bytes, as_tensor, memory
from .registry import codec, codec_names

__all__ = [
    "Codec",
    "as_bytes",
    "as_tensor",
    "choose",
    "codec",
    "codec_names",
    "crc32",
    "fingerprint",
    "memory",
    "number_width",
    "sha256",
]
