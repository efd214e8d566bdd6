"""Headers of safetensors files: the safetensors library reads what we write, and we read what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save, save_file

from vescale_ckpt._format import PieceRecord
from vescale_ckpt._format.limits import ITEMSIZE
from vescale_ckpt._format.safetensors_file import (
    CODES,
    StoredTensor,
    header_bytes,
    header_length,
    part_name,
    plain_header,
    read_header,
)
from vescale_ckpt._geometry import Box, Piece
from vescale_ckpt.errors import FormatError


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def values(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    count = ITEMSIZE[dtype] * int(torch.tensor(shape).prod()) if shape else ITEMSIZE[dtype]
    data = (torch.arange(count) % 2).to(torch.uint8)  # 0 and 1 are valid bytes of every dtype
    return data.view(getattr(torch, dtype)).reshape(shape)


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_the_library_reads_every_dtype(dtype: str, tmp_path: Path) -> None:
    tensors = {"a": values(dtype, (3, 4)), "scalar": values(dtype, ()), "none": values(dtype, (0, 2))}
    rows = [(name, dtype, tuple(t.shape), t.nbytes) for name, t in tensors.items()]
    header = header_bytes(rows, {"format": "pt"})
    assert len(header.data) % 4096 == 0
    data = header.data + b"".join(map(raw, tensors.values()))
    assert len(data) == header.size
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        for name, tensor in tensors.items():
            found = file.get_tensor(name)
            assert raw(found) == raw(tensor)
            if dtype in CODES:
                assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            else:
                assert (found.dtype, found.ndim) == (torch.uint8, 1)


@given(st.lists(st.tuples(st.text("abc@:,", max_size=9), st.lists(st.integers(0, 5), max_size=3)), max_size=9))
def test_headers_round_trip(rows: list[tuple[str, list[int]]]) -> None:
    tensors, seen = [], set()
    for number, (name, sizes) in enumerate(rows):
        dtype = sorted(CODES)[number % len(CODES)]
        shape = tuple(sizes)
        if name not in seen:
            tensors.append((name, dtype, shape, int(torch.tensor([1, *shape]).prod()) * ITEMSIZE[dtype]))
        seen.add(name)
    header = header_bytes(tensors)
    assert header_length(header.data[:8], header.size) == len(header.data) - 8
    found, metadata = read_header(header.data[8:], header.size)
    assert metadata == {}
    assert found == {
        name: StoredTensor(dtype, shape, start, start + nbytes)
        for (name, dtype, shape, nbytes), start in zip(tensors, header.starts, strict=True)
    }


def test_files_of_the_library_are_read(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(3, 4), "b": torch.randn(5).bfloat16(), "n": torch.tensor(7), "c": torch.ones(2) * 1j}
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, {"by": "someone"})
    data = path.read_bytes()
    length = header_length(data[:8], len(data))
    found, metadata = read_header(data[8 : 8 + length], len(data))
    assert metadata == {"by": "someone"}
    assert found.keys() == tensors.keys()
    for name, stored in found.items():
        assert data[stored.start : stored.stop] == raw(tensors[name])
        assert (stored.dtype, stored.shape) == (str(tensors[name].dtype)[6:], tuple(tensors[name].shape))


def test_parts_have_names_of_their_own() -> None:
    whole = Box((0, 0), (4, 6))
    names = [
        part_name("w", Piece(whole, 0, 24), (4, 6)),
        part_name("w", Piece(whole, 0, 12), (4, 6)),
        part_name("w", Piece(Box((0, 0), (4, 2)), 0, 8), (4, 6)),
        part_name("w", Piece(Box((0, 0), (4, 2)), 0, 4), (4, 6)),
        part_name("s", Piece(Box((), ()), 0, 1), ()),
    ]
    assert names == ["w", "w@flat:0:12", "w@0,0:4,2", "w@0,0:4,2:flat:0:4", "s"]


def test_the_reserved_name_is_not_used() -> None:
    name = part_name("__metadata__", Piece(Box((0,), (3,)), 0, 3), (3,))
    assert name == "__metadata__@whole"
    with pytest.raises(FormatError, match="stands twice in one file, or is reserved"):
        header_bytes([("__metadata__", "uint8", (3,), 3)])


def test_headers_that_say_something_else_are_not_written() -> None:
    with pytest.raises(FormatError, match="'a': the name stands twice"):
        header_bytes([("a", "uint8", (3,), 3), ("a", "uint8", (3,), 3)])
    with pytest.raises(FormatError, match="'a': bytes: must be 12, those of float32"):
        header_bytes([("a", "float32", (3,), 3)])


@pytest.mark.parametrize(
    ("first", "size"),
    [(b"", 0), (b"\x01\0\0", 3), (b"\xff" * 8, 100), ((93).to_bytes(8, "little"), 100), (bytes(8), 100)],
)
def test_absurd_lengths_are_refused(first: bytes, size: int) -> None:
    with pytest.raises(FormatError, match=r"^file: "):
        header_length(first, size, "file")
    with pytest.raises(FormatError, match="header length: must be from 2 to 100000000"):
        header_length((10**9).to_bytes(8, "little"), 2**40)


A = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
B = {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}
REFUSED = {
    "list": ([], "file: must be an object"),
    "metadata": ({"__metadata__": {"a": 1}, "a": A, "b": B}, "__metadata__: must be an object of strings"),
    "entry": ({"a": 1}, "'a': must be an object"),
    "keys": ({"a": {**A, "code": 1}}, "'a': unknown key 'code'"),
    "dtype": ({"a": {**A, "dtype": "pickle"}, "b": B}, "'a': dtype: must be one of"),
    "dtype list": ({"a": {**A, "dtype": []}, "b": B}, "'a': dtype: must be one of"),
    "shape": ({"a": {**A, "shape": [5]}, "b": B}, "'a': data_offsets: must be a range of 5 bytes"),
    "overflow": ({"a": {**A, "shape": [2**32, 2**32]}, "b": B}, "'a': shape: must have at most"),
    "outside": (
        {"a": A, "b": {**B, "data_offsets": [4, 9]}},
        r"'b': data_offsets\[1\]: must be an integer from 0 to 8",
    ),
    "below 0": ({"a": {**A, "data_offsets": [-4, 0]}, "b": B}, r"'a': data_offsets\[0\]"),
    "three": ({"a": {**A, "data_offsets": [0, 4, 8]}, "b": B}, "'a': data_offsets: must be a list of 2"),
    "backwards": ({"a": {**A, "data_offsets": [4, 0]}, "b": B}, "'a': data_offsets: must be a range of 4 bytes"),
    "overlap": ({"a": A, "b": A, "c": B}, "'b': data: must begin at"),
    "hole": ({"b": B}, "'b': data: must begin at"),
    "end": ({"a": A}, "data: must end with the file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_headers_are_refused(name: str) -> None:
    value, message = REFUSED[name]
    header = json.dumps(value).encode()
    with pytest.raises(FormatError, match=f"^file: .*{message}|^{message}"):
        read_header(header, 8 + len(header) + 8, "file")


@given(st.data())
def test_any_change_of_a_file_is_read_or_refused(data: st.DataObject) -> None:
    content: Any = bytearray(save({"w": torch.ones(3, 4), "b": torch.ones(2).half()}))
    at = data.draw(st.integers(0, 150))
    content[at] = data.draw(st.integers(0, 255))
    try:
        length = header_length(bytes(content[:8]), len(content))
        found, _ = read_header(bytes(content[8 : 8 + length]), len(content))
    except FormatError:
        return
    assert sum(stored.stop - stored.start for stored in found.values()) == len(content) - 8 - length


def test_the_header_of_a_plain_file_is_fixed_byte_by_byte() -> None:
    """`verify` compares it; a change of any byte would be one of the format."""
    tensors = {0: ("w", "float32", (4, 6)), 1: ("h\u00e9", "complex64", (3,)), 2: ("rank 7: own", "bool", ())}
    pieces = [
        PieceRecord(0, Piece(Box((0, 2), (4, 2)), 0, 8), 0, 1),
        PieceRecord(1, Piece(Box((0,), (3,)), 0, 3), 1, 1),
        PieceRecord(2, Piece(Box((), ()), 0, 1), 2, 1),
        PieceRecord(0, Piece(Box((0, 0), (4, 2)), 3, 5), 3, 1),
    ]
    header = plain_header("steps/00000001-0a0b0c0d", 7, pieces, tensors)
    text = (
        '{"__metadata__":{"format":"pt","vescale_ckpt":"steps/00000001-0a0b0c0d writer 7"},'
        '"w@0,2:4,2":{"dtype":"F32","shape":[4,2],"data_offsets":[0,32]},'
        '"h\u00e9":{"dtype":"U8","shape":[24],"data_offsets":[32,56]},'
        '"rank 7: own":{"dtype":"BOOL","shape":[],"data_offsets":[56,57]},'
        '"w@0,0:4,2:flat:3:5":{"dtype":"F32","shape":[2],"data_offsets":[57,65]}}'
    ).encode()
    assert header.data == (4088).to_bytes(8, "little") + text.ljust(4088)
    assert (header.starts, header.size) == ((4096, 4128, 4152, 4153), 4161)
