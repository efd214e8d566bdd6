"""Dtypes by name: torch's own names, those of safetensors, and those of numpy.

A name that is not in these tables is refused, so that no name read from a file is ever looked up in a module.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import torch

from ..errors import FormatError, StateError

__all__ = ["DTYPES", "NUMPY_SCALARS", "dtype_name", "dtype_of", "dtype_of_safetensors", "itemsize", "safetensors_name"]

_NAMES = (
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex32",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
)
DTYPES: Final = MappingProxyType({name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)})
"""Name in a manifest -> dtype."""
_BY_DTYPE: Final = {dtype: name for name, dtype in DTYPES.items()}

_SAFETENSORS: Final = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
_FROM_SAFETENSORS: Final = {theirs: ours for ours, theirs in _SAFETENSORS.items()}

NUMPY_SCALARS: Final = MappingProxyType(
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
        "float32": 4,
        "float64": 8,
        "complex64": 8,
        "complex128": 16,
    }
)
"""numpy's name -> bytes, for the dtypes of arrays and scalars that are saved."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a manifest.

    Args:
        dtype: a dtype whose elements are whole bytes.

    Raises:
        StateError: a dtype that no checkpoint holds (quantized, bits, integers below a byte).

    Example:
        >>> dtype_name(torch.half)
        'float16'
    """
    name = _BY_DTYPE.get(dtype)
    if name is None:
        raise StateError(f"dtype: {dtype} cannot be saved. Known are {', '.join(DTYPES)}; view or convert it to one.")
    return name


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype with this name in a manifest.

    Raises:
        FormatError: there is none.

    Example:
        >>> dtype_of("bfloat16")
        torch.bfloat16
    """
    dtype: torch.dtype | None = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise FormatError(f"dtype: {str(name)[:100]!a} is none of {', '.join(DTYPES)}.")
    return dtype


def itemsize(name: str) -> int:
    """Return the bytes per element of the dtype with this name.

    Raises:
        FormatError: there is none.

    Example:
        >>> itemsize("complex64")
        8
    """
    return dtype_of(name).itemsize


def safetensors_name(name: str) -> str | None:
    """Return what safetensors calls a dtype; None if it has no name for it.

    Example:
        >>> safetensors_name("bfloat16")
        'BF16'
    """
    return _SAFETENSORS.get(name)


def dtype_of_safetensors(name: str) -> torch.dtype:
    """Return the dtype that safetensors calls `name`.

    Raises:
        FormatError: there is none.

    Example:
        >>> dtype_of_safetensors("F8_E4M3")
        torch.float8_e4m3fn
    """
    ours = _FROM_SAFETENSORS.get(name) if isinstance(name, str) else None
    if ours is None:
        raise FormatError(f"dtype: {str(name)[:100]!a} is none of {', '.join(_FROM_SAFETENSORS)}.")
    return dtype_of(ours)
