"""Dtypes by name: torch's own names, those of safetensors, and those of numpy.

A name that is not in these tables is refused, so that no name read from a file is ever looked up in a module.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import torch

from .._format import ITEMSIZE
from .._format.safetensors_file import READ
from ..errors import FormatError, StateError

__all__ = ["DTYPES", "NUMPY_SCALARS", "dtype_name", "dtype_of", "dtype_of_safetensors", "itemsize", "safetensors_name"]

DTYPES: Final = MappingProxyType({name: getattr(torch, name) for name in ITEMSIZE if hasattr(torch, name)})
"""Name in a manifest -> dtype."""
_BY_DTYPE: Final = {dtype: name for name, dtype in DTYPES.items()}

_SAFETENSORS: Final = {ours: theirs for theirs, ours in READ.items()}

_IN_NUMPY = (
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
    "float32",
    "float64",
    "complex64",
    "complex128",
)
NUMPY_SCALARS: Final = MappingProxyType({name: ITEMSIZE[name] for name in _IN_NUMPY})
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
    ours = READ.get(name) if isinstance(name, str) else None
    if ours is None:
        raise FormatError(f"dtype: {str(name)[:100]!a} is none of {', '.join(READ)}.")
    return dtype_of(ours)
