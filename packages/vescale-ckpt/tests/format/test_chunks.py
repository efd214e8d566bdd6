"""The chunk table: columns come back equal, and what they say is held against files and codecs."""

from __future__ import annotations

import base64
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_ckpt._format import Chunk, ChunkTable, FileRecord
from vescale_ckpt.errors import FormatError

FILES = [FileRecord("a", 1000), FileRecord("b", 2**62)]


def table(*rows: tuple[int, ...]) -> ChunkTable:
    made = ChunkTable()
    for row in rows:
        made.append(*row)
    return made


@given(st.lists(st.tuples(st.integers(1, 1 << 26), st.integers(0, 2**32 - 1), st.binary(min_size=16, max_size=16))))
def test_tables_round_trip(rows: list[tuple[int, int, bytes]]) -> None:
    made, offset = ChunkTable(), 2**50
    for number, (raw, crc, fingerprint) in enumerate(rows):
        stored = raw if number % 2 else (raw + 1) // 2
        assert made.append(1, offset, stored, raw, 0 if number % 2 else 1, crc, fingerprint) == number
        offset += stored
    read = ChunkTable.from_json(made.to_json(), FILES, 1, "x")
    assert read == made
    assert [(row.raw, row.crc, row.fingerprint) for row in read] == rows


def test_the_columns_are_little_endian_and_zeros_are_left_out() -> None:
    made = table((1, 5, 7, 9, 2, 0xCBF43926), (1, 12, 3, 3, 0, 1))
    value = made.to_json()
    assert value["count"] == 2
    assert base64.b64decode(value["file"]) == struct.pack("<2I", 1, 1)
    assert base64.b64decode(value["offset"]) == struct.pack("<2Q", 5, 12)
    assert base64.b64decode(value["stored"]) == struct.pack("<2I", 7, 3)
    assert base64.b64decode(value["raw"]) == struct.pack("<2I", 9, 3)
    assert base64.b64decode(value["codec"]) == bytes([2, 0])
    assert base64.b64decode(value["crc"]) == struct.pack("<2I", 0xCBF43926, 1)
    assert value["fingerprint"] == ""
    assert made.row(0) == Chunk(1, 5, 7, 9, 2, 0xCBF43926, bytes(16))
    assert made.row(-1).offset == 12
    with pytest.raises(IndexError):
        made.row(2)


@pytest.mark.parametrize(
    "row",
    [
        (-1, 0, 1, 1, 0, 0),
        (2**32, 0, 1, 1, 0, 0),
        (0, -1, 1, 1, 0, 0),
        (0, 2**63, 1, 1, 0, 0),
        (0, 0, 0, 1, 0, 0),
        (0, 0, 2, 1, 0, 0),
        (0, 0, 1, (64 << 20) + 1, 1, 0),
        (0, 0, 1, 1, 256, 0),
        (0, 0, 1, 1, 0, 2**32),
        (0, 0, 1, 1, 0, 0, b"short"),
    ],
)
def test_rows_that_no_reader_takes_are_not_appended(row: tuple[int, ...]) -> None:
    made = ChunkTable()
    with pytest.raises(ValueError, match="is not a valid row"):
        made.append(*row)
    assert len(made) == 0
    assert made == ChunkTable()


ROWS = {
    "file": ([(2, 0, 1, 1, 0, 0)], r"x\[0\]: file: must be the number of one of 2 files, but is 2"),
    "codec": ([(0, 0, 1, 1, 2, 0)], r"x\[0\]: codec: must be 0 or the number of one of 1 codecs, but is 2"),
    "raw stored otherwise": ([(0, 0, 1, 2, 0, 0)], r"x\[0\]: stored: must be the 2 bytes of raw, but is 1"),
    "end of file": (
        [(1, 0, 1, 1, 0, 0), (0, 990, 11, 11, 0, 0)],
        r"x\[1\]: offset: must leave 11 bytes in a file of 1000",
    ),
    "overlap": ([(0, 0, 100, 100, 0, 0), (0, 99, 10, 10, 0, 0)], "x: chunks 0 and 1 overlap"),
    "overlap in any order": ([(0, 50, 10, 10, 0, 0), (0, 0, 9, 9, 0, 0), (0, 5, 50, 50, 0, 0)], "overlap"),
    "same place, other checksum": ([(0, 0, 9, 9, 0, 1), (0, 0, 9, 9, 0, 2)], "chunks 0 and 1 overlap"),
    "same place, other size": ([(0, 0, 9, 9, 1, 1), (0, 0, 9, 10, 1, 1)], "overlap"),
}


@pytest.mark.parametrize("name", ROWS)
def test_hostile_rows_are_refused(name: str) -> None:
    rows, message = ROWS[name]
    with pytest.raises(FormatError, match=message):
        ChunkTable.from_json(table(*rows).to_json(), FILES, 1, "x")


def test_the_same_chunk_may_stand_twice_and_files_are_apart() -> None:
    made = table((0, 0, 9, 9, 0, 1), (1, 3, 9, 9, 0, 1), (0, 0, 9, 9, 0, 1), (0, 9, 1, 1, 0, 1))
    assert ChunkTable.from_json(made.to_json(), FILES, 0, "x") == made


def edited(**values: object) -> dict[str, object]:
    return table((0, 0, 4, 4, 0, 1), (0, 4, 4, 4, 0, 1)).to_json() | values


def column(form: str, *numbers: int) -> str:
    return base64.b64encode(struct.pack(form, *numbers)).decode()


VALUES = {
    "list": ([], "x: must be an object"),
    "count": (edited(count=3), "x: count: must be the number of values of raw, 2, but is 3"),
    "count is huge": (edited(count=2**62), "x: count: must be"),
    "count is a bool": (edited(count=True), "x: count: must be an integer"),
    "short column": (edited(crc=column("<I", 1)), "x: crc: must have 8 bytes, but is 4"),
    "torn column": (edited(offset=column("<IIH", 0, 0, 0)), "x: offset: must have 16 bytes, but is 10"),
    "no base64": (edited(crc="AAA"), "x: crc: must be a string in base64"),
    "not ascii": (edited(crc="\u00e9" * 8), "x: crc: must be a string in base64"),
    "number": (edited(crc=5), "x: crc: must be a string in base64"),
    "offset beyond 2**63": (edited(offset=column("<2Q", 0, 2**64 - 4)), r"x\[1\]: offset: must leave 4 bytes"),
    "raw 0": (edited(raw=column("<2I", 4, 0)), r"x\[1\]: raw: must be from 1 to 67108864 bytes, but is 0"),
    "raw is huge": (edited(raw=column("<2I", 4, 2**32 - 1)), r"x\[1\]: raw: must be from 1"),
    "fingerprints": (edited(fingerprint="AAAA"), "x: fingerprint: must have 32 bytes"),
    "missing": ({"count": 0}, "the key 'file' is missing"),
    "unknown": (edited(sha=""), "unknown key 'sha'"),
}


@pytest.mark.parametrize("name", VALUES)
def test_hostile_columns_are_refused(name: str) -> None:
    value, message = VALUES[name]
    with pytest.raises(FormatError, match=message):
        ChunkTable.from_json(value, FILES, 1, "x")
