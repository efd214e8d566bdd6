"""Numbers of the format: its version, the sizes that a reader accepts, and the dtypes with their sizes.

Nothing read from a file is used before it was held against these.
"""

from __future__ import annotations

from types import MappingProxyType

__all__ = [
    "CHUNK_BYTES",
    "COMMIT_BYTES",
    "DEPTH",
    "DIGITS",
    "DIMS",
    "FORMAT",
    "INDEX_BYTES",
    "INLINE_BYTES",
    "ITEMSIZE",
    "MANIFEST_BYTES",
    "MAX_STEP",
    "NAME_CHARS",
    "UINT63",
    "VALUES",
]

FORMAT = 1
"""The version that is written, and the newest that is read."""

MANIFEST_BYTES = 1 << 30
INDEX_BYTES = 1 << 30
COMMIT_BYTES = 64 * 1024
"""Also of the marker of a store and of a lease."""

DEPTH = 200
"""Nesting of JSON."""
VALUES = 1 << 25
"""Values in one JSON file: what they take in memory stays a few times the largest file."""
DIGITS = 4000
"""Digits of one number: below the length from which Python refuses to convert it."""

DIMS = 64
UINT63 = (1 << 63) - 1
"""Largest number of elements, of bytes, and largest offset."""
MAX_STEP = 10**15
CHUNK_BYTES = 64 << 20
"""Largest chunk before compression; writers use 1 MiB."""
INLINE_BYTES = 256
"""Tensors up to this size may stand in the index."""
NAME_CHARS = 16384
"""Longest name of a tensor."""

ITEMSIZE = MappingProxyType(
    {
        "bool": 1,
        "uint8": 1,
        "int8": 1,
        "uint16": 2,
        "int16": 2,
        "uint32": 4,
        "int32": 4,
        "uint64": 8,
        "int64": 8,
        "float16": 2,
        "bfloat16": 2,
        "float32": 4,
        "float64": 8,
        "complex32": 4,
        "complex64": 8,
        "complex128": 16,
        "float8_e4m3fn": 1,
        "float8_e4m3fnuz": 1,
        "float8_e5m2": 1,
        "float8_e5m2fnuz": 1,
        "float8_e8m0fnu": 1,
        "float4_e2m1fn_x2": 1,
    }
)
"""Bytes per element of each dtype, by torch's name for it."""
