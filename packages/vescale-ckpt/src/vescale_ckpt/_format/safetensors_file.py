"""Headers of safetensors files, written and read: the plain layout's files are ordinary ones that any tool opens.

The header is padded with spaces, which the format allows, so that data begins at a multiple of 4096 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .._geometry import Piece
from ..errors import FormatError
from .fields import Fields, integers, shape_of
from .index import PieceRecord
from .jsonio import dumps, loads, refuse, short
from .limits import ITEMSIZE, UINT63

__all__ = [
    "CODES",
    "READ",
    "Header",
    "StoredTensor",
    "header_bytes",
    "header_length",
    "part_name",
    "plain_header",
    "read_header",
]

ALIGN = 4096
MAX_HEADER = 100_000_000
"""Longest header that safetensors itself accepts."""
CODES = MappingProxyType(
    {
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
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
    }
)
"""safetensors' names of the dtypes that all its versions in use have; others are written as U8, one dim."""
READ = MappingProxyType(
    {code: name for name, code in CODES.items()}
    | {
        "C64": "complex64",
        "F8_E8M0": "float8_e8m0fnu",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
    }
)
"""Torch's names of the dtypes that safetensors files may hold, by safetensors' names."""


@dataclass(frozen=True, slots=True)
class Header:
    """A header to write."""

    data: bytes
    """The first bytes of the file, up to where tensors begin."""
    starts: tuple[int, ...]
    """First byte in the file of each tensor."""
    size: int
    """Bytes of the file."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file."""

    dtype: str
    """torch's name of the dtype."""
    shape: tuple[int, ...]
    """Its shape."""
    start: int
    """First byte in the file."""
    stop: int
    """One past the last byte."""


def part_name(name: str, piece: Piece, shape: tuple[int, ...]) -> str:
    """Return the name that a piece of a tensor has in a file; the whole tensor keeps its own.

    Args:
        name: name of the tensor.
        piece: what is stored.
        shape: shape of the tensor.

    Example:
        >>> from vescale_ckpt._geometry import Box
        >>> part_name("w", Piece(Box((0, 0), (4, 6)), 0, 24), (4, 6))
        'w'
        >>> part_name("w", Piece(Box((0, 0), (4, 6)), 6, 24), (4, 6))
        'w@flat:6:24'
        >>> part_name("w", Piece(Box((0, 2), (4, 2)), 0, 8), (4, 6))
        'w@0,2:4,2'
        >>> part_name("w", Piece(Box((0, 2), (4, 2)), 0, 4), (4, 6))
        'w@0,2:4,2:flat:0:4'
    """
    box = piece.box
    cut = piece.numel != box.numel
    run = f"flat:{piece.start}:{piece.stop}"
    if box.shape == shape:
        reserved = "@whole" if name == "__metadata__" else ""  # the one name that safetensors keeps for itself
        return f"{name}@{run}" if cut else name + reserved
    place = f"{name}@{','.join(map(str, box.offset))}:{','.join(map(str, box.shape))}"
    return f"{place}:{run}" if cut else place


def header_bytes(
    tensors: Sequence[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str] | None = None
) -> Header:
    """Return the header of a file that holds tensors one after the other.

    Args:
        tensors: (name, dtype, shape, bytes) of each. A dtype that safetensors does not have is written as U8, 1-D.
        metadata: strings for the header.

    Raises:
        FormatError: a name stands twice or is reserved, bytes that are not those of the shape, or too long a header.

    Example:
        >>> header = header_bytes([("w", "float32", (2, 3), 24), ("c", "complex128", (2,), 32)])
        >>> len(header.data), header.starts, header.size
        (4096, (4096, 4120), 4152)
    """
    value: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    starts, end = [], 0
    for name, dtype, shape, nbytes in tensors:
        at = f"safetensors: tensor {short(name)}"
        if name in value or name == "__metadata__":
            raise FormatError(f"{at}: the name stands twice in one file, or is reserved.")
        sizes, numel = shape_of(list(shape), f"{at}: shape", UINT63 // ITEMSIZE[dtype])
        if numel * ITEMSIZE[dtype] != nbytes:
            refuse(f"{at}: bytes", nbytes, f"must be {numel * ITEMSIZE[dtype]}, those of {dtype} {list(sizes)}")
        code = CODES.get(dtype)
        value[name] = {
            "dtype": code or "U8",
            "shape": list(sizes) if code else [nbytes],
            "data_offsets": [end, end + nbytes],
        }
        starts.append(end)
        end += nbytes
    text = dumps(value, "safetensors header")
    text += b" " * (-(8 + len(text)) % ALIGN)
    if len(text) > MAX_HEADER:
        raise FormatError(f"safetensors header: {len(text)} bytes for {len(tensors)} tensors; at most {MAX_HEADER}.")
    begin = 8 + len(text)
    return Header(struct.pack("<Q", len(text)) + text, tuple(begin + start for start in starts), begin + end)


def plain_header(
    folder: str, writer: int, pieces: Sequence[PieceRecord], tensors: Mapping[int, tuple[str, str, tuple[int, ...]]]
) -> Header:
    """Return the header of a writer's file in the plain layout, which follows byte by byte from what its index says.

    Args:
        folder: of the step, relative to the store.
        writer: its number.
        pieces: what the file holds, in this order.
        tensors: per tensor number its name, dtype and shape; names of a writer's own tensors begin with "rank N: ".

    Raises:
        FormatError: as `header_bytes`.
    """
    rows = []
    for record in pieces:
        name, dtype, shape = tensors[record.tensor]
        piece = record.piece
        stored = piece.box.shape if piece.numel == piece.box.numel else (piece.numel,)
        rows.append((part_name(name, piece, shape), dtype, stored, piece.numel * ITEMSIZE[dtype]))
    return header_bytes(rows, {"format": "pt", "vescale_ckpt": f"{folder} writer {writer}"})


def header_length(first: bytes, file_bytes: int, at: str = "safetensors") -> int:
    """Return how many bytes follow the first 8 of a file as its header.

    Args:
        first: the first 8 bytes.
        file_bytes: size of the file.
        at: name of the file, for messages.

    Raises:
        FormatError: the file is too short, or the header longer than safetensors allows.
    """
    if len(first) != 8:
        raise FormatError(f"{at}: {file_bytes} bytes; a safetensors file has at least 8.")
    length = int.from_bytes(first, "little")
    if not 2 <= length <= min(MAX_HEADER, file_bytes - 8):
        refuse(f"{at}: header length", length, f"must be from 2 to {min(MAX_HEADER, file_bytes - 8)}")
    return length


def read_header(
    header: bytes, file_bytes: int, at: str = "safetensors"
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return (tensors by name in the order of their data, metadata) of a file.

    Args:
        header: the bytes after the first 8, as many as `header_length` says.
        file_bytes: size of the file.
        at: name of the file, for messages.

    Raises:
        FormatError: not a header, an unknown dtype, or data that overlaps, has holes or ends too early.
    """
    value = loads(header, at, MAX_HEADER)
    if not isinstance(value, dict):
        refuse(at, value, "must be an object")
    metadata = value.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        refuse(f"{at}: __metadata__", metadata, "must be an object of strings")
    begin, found = 8 + len(header), []
    for name, entry in value.items():
        place = f"{at}: tensor {short(name)}"
        fields = Fields(entry, place, "dtype shape data_offsets")
        code = fields.value("dtype")
        if not isinstance(code, str) or code not in READ:
            refuse(fields.at("dtype"), code, f"must be one of {', '.join(READ)}")
        dtype = READ[code]
        shape, numel = shape_of(fields.value("shape"), fields.at("shape"), UINT63 // ITEMSIZE[dtype])
        start, stop = integers(fields.value("data_offsets"), fields.at("data_offsets"), 0, file_bytes - begin, 2)
        if stop - start != numel * ITEMSIZE[dtype]:
            refuse(fields.at("data_offsets"), f"{start}:{stop}", f"must be a range of {numel * ITEMSIZE[dtype]} bytes")
        found.append((name, StoredTensor(dtype, shape, begin + start, begin + stop)))
    found.sort(key=lambda item: (item[1].start, item[1].stop))
    for name, tensor in found:
        if tensor.start != begin:
            refuse(
                f"{at}: tensor {short(name)}: data", tensor.start, f"must begin at {begin}, where the one before ends"
            )
        begin = tensor.stop
    if begin != file_bytes:
        refuse(f"{at}: data", begin, f"must end with the file, at {file_bytes}")
    return dict(found), metadata
