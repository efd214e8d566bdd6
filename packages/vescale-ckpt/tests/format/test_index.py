"""The index of a writer: comes back equal, costs some 60 bytes a chunk, and is held against its manifest."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_ckpt._format import (
    LOCAL,
    ChunkTable,
    FileRecord,
    Index,
    Manifest,
    PieceRecord,
    TensorRecord,
    WriterRecord,
    chunk_path,
)
from vescale_ckpt._geometry import Box, Mesh, Piece, Rule
from vescale_ckpt.errors import FormatError

PACK = "steps/00001000-3f2a9c1b/data/w00001-0.pack"


def manifest_of(*tensors: TensorRecord) -> Manifest:
    layout = Rule(Mesh((4,), range(4)), ("R",))
    writers = (WriterRecord("0" * 64, 1, 0, 0),) * 4
    return Manifest("3f2a9c1b" * 4, 1000, 1.5e9, 4, (layout,), tensors, None, None, writers)


MANIFEST = manifest_of(
    TensorRecord("w", "float32", (6, 4), 0),
    TensorRecord("step", "int64", (), 0),
    TensorRecord("b", "bfloat16", (8,), 0),
)


def example() -> Index:
    chunks = ChunkTable()
    chunks.append(0, 0, 32, 32, 0, 11, bytes(range(16)))
    chunks.append(0, 32, 9, 16, 1, 12)
    chunks.append(1, 0, 16, 16, 0, 13)
    chunks.append(0, 41, 24, 24, 0, 14)
    return Index(
        writer=1,
        codecs=["planes"],
        files=[FileRecord(PACK, 65), FileRecord(chunk_path(bytes(32)), 16)],
        pieces=[
            PieceRecord(0, Piece(Box((0, 2), (6, 2)), 0, 12), 0, 2),
            PieceRecord(2, Piece(Box((0,), (8,)), 0, 8), 2, 1),
            PieceRecord(3, Piece(Box((0,), (3,)), 0, 3), 3, 1),
        ],
        chunks=chunks,
        inline={1: (7).to_bytes(8, "little"), 4: b"\x01\x02"},
        local=[{"$tensor": 3}, "epoch 3"],
        local_tensors=[TensorRecord("rng", "uint64", (3,), LOCAL), TensorRecord("flags", "bool", (2,), LOCAL)],
    )


def test_an_index_comes_back_equal() -> None:
    assert Index.from_bytes(example().to_bytes(), MANIFEST) == example()


def test_an_empty_index_comes_back_equal() -> None:
    assert Index.from_bytes(Index(3).to_bytes(), MANIFEST) == Index(3)


def test_pieces_are_written_in_the_order_of_their_chunks() -> None:
    index = example()
    index.pieces.reverse()
    assert Index.from_bytes(index.to_bytes(), MANIFEST) == example()


def test_pieces_whose_rows_do_not_follow_are_not_written() -> None:
    index = example()
    index.pieces[1] = PieceRecord(2, index.pieces[1].piece, 1, 1)
    with pytest.raises(FormatError, match="should begin at row 2"):
        index.to_bytes()


@given(st.data())
def test_indexes_round_trip(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    manifest = manifest_of(TensorRecord("t", data.draw(st.sampled_from(["uint8", "float32", "complex128"])), shape, 0))
    size = manifest.tensors[0].itemsize
    index = Index(0, files=[FileRecord(PACK, 1 << 40)])
    end = 0
    for _ in range(data.draw(st.integers(0, 4))):
        offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        box = Box(offset, tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True)))
        start = data.draw(st.integers(0, box.numel - 1))
        stop = data.draw(st.integers(start + 1, box.numel))
        cuts = sorted({start, stop, *data.draw(st.lists(st.integers(start, stop), max_size=3))})
        index.pieces.append(PieceRecord(0, Piece(box, start, stop), len(index.chunks), len(cuts) - 1))
        for low, high in itertools.pairwise(cuts):
            index.chunks.append(
                0, end, (high - low) * size, (high - low) * size, 0, data.draw(st.integers(0, 2**32 - 1))
            )
            end += (high - low) * size
    assert Index.from_bytes(index.to_bytes(), manifest) == index


@pytest.mark.parametrize(("per_piece", "limit"), [(16, 62), (1, 75)])
def test_bytes_per_chunk(per_piece: int, limit: int) -> None:
    chunk, count = 1 << 20, 4096
    numel = per_piece * chunk // 4
    tensors = [TensorRecord(f"t{n}", "float32", (8, numel), 0) for n in range(count // per_piece)]
    index = Index(0, codecs=["planes"], files=[FileRecord(PACK, 1 << 50)])
    for row in range(count):
        index.chunks.append(0, row * chunk, chunk - row, chunk, 1, row * 12345, row.to_bytes(16, "big"))
    for number in range(len(tensors)):
        piece = Piece(Box.whole((8, numel)), 3 * numel, 4 * numel)
        index.pieces.append(PieceRecord(number, piece, number * per_piece, per_piece))
    data = index.to_bytes()
    assert len(data) / count <= limit
    assert Index.from_bytes(data, manifest_of(*tensors)) == index


def test_bytes_per_scalar() -> None:
    def size(count: int) -> int:
        return len(Index(0, inline=dict.fromkeys(range(count), b"1234")).to_bytes())

    assert (size(2000) - size(1000)) / 1000 <= 150 - 80  # what the manifest may take


Edit = Callable[[dict[str, Any]], Any]


def put(*path: Any) -> Edit:
    """Return an edit that sets what lies at a path to its last entry."""

    def edit(value: dict[str, Any]) -> None:
        *way, key, new = path
        inner: Any = value
        for step in way:
            inner = inner[step]
        inner[key] = new

    return edit


def path_to(name: str) -> Edit:
    return put("files", "path", 0, name)


PATH = r"files: path\[0\]: must be steps/<folder of a step>/data/<name> or chunks/"
REFUSED: dict[str, tuple[Edit, str]] = {
    "newer": (put("format", 9), "format 9 is newer"),
    "no writer": (lambda value: value.pop("writer"), "the key 'writer' is missing"),
    "unknown key": (put("pickle", ""), "unknown key 'pickle'"),
    "writer beyond world": (put("writer", 4), "writer: must be an integer from 0 to 3, but is 4"),
    "writer is a bool": (put("writer", True), "writer: must be an integer"),
    "codec is a path": (put("codecs", ["../x"]), "codecs: must be at most 255 names"),
    "codec is a number": (put("codecs", [1]), r"codecs\[0\]: must be a string"),
    "codec twice": (put("codecs", ["zstd", "zstd"]), "codecs: 'zstd' stands twice"),
    "many codecs": (put("codecs", [f"c{n}" for n in range(256)]), "codecs: must be at most 255"),
    "codec missing": (put("codecs", []), r"chunks\[1\]: codec: must be 0 or the number of one of 0 codecs"),
    "files is a list": (put("files", []), "files: must be an object"),
    "absolute path": (path_to("/etc/passwd"), PATH),
    "path goes up": (path_to("steps/00001000-3f2a9c1b/data/../../../../etc/passwd"), PATH),
    "path is a manifest": (path_to("steps/00001000-3f2a9c1b/manifest.json"), PATH),
    "path is a url": (path_to("http://x/steps/00001000-3f2a9c1b/data/a"), PATH),
    "path with NUL": (path_to(PACK + "\0"), PATH),
    "hidden name": (path_to("steps/00001000-3f2a9c1b/data/.tmp-1"), PATH),
    "chunk in another folder": (path_to("chunks/ab/" + "0" * 64), PATH),
    "file twice": (put("files", "path", [PACK, PACK]), "files: path: 'steps/.*' stands twice"),
    "file size below 0": (put("files", "bytes", 0, -1), r"files: bytes\[0\]: must be an integer"),
    "file is short": (put("files", "bytes", 0, 64), r"chunks\[3\]: offset: must leave 24 bytes in a file of 64"),
    "file is gone": (
        put("files", {"path": [], "bytes": []}),
        r"chunks\[0\]: file: must be the number of one of 0 files",
    ),
    "sizes of files": (put("files", "bytes", [1]), "files: bytes: must be a list of 2"),
    "tensor number": (put("pieces", "tensor", 0, 5), r"pieces: tensor\[0\]: must be an integer from 0 to 4, but is 5"),
    "tensor of another size": (
        put("pieces", "tensor", 0, 2),
        "piece 0, of tensor 'b': must have a box inside of shape",
    ),
    "tensor is a string": (put("pieces", "tensor", 0, "w"), r"pieces: tensor\[0\]: must be an integer"),
    "box number": (put("pieces", "box", 0, 3), r"pieces: box\[0\]: must be an integer from 0 to 2"),
    "box is an object": (put("pieces", "boxes", 0, {}), r"boxes\[0\]: must be \[offset, shape\]"),
    "box of other dims": (put("pieces", "boxes", 0, [[0], [12]]), r"piece 0, of tensor 'w': must have a box inside"),
    "box offset of other dims": (put("pieces", "boxes", 0, 0, [0]), r"boxes\[0\]: offset: must be a list of 2"),
    "box outside": (put("pieces", "boxes", 0, 0, [0, 3]), "piece 0, of tensor 'w': must have a box inside of shape"),
    "box below 0": (put("pieces", "boxes", 0, 0, [0, -1]), r"boxes\[0\]: offset\[1\]: must be an integer from 0"),
    "box overflows": (put("pieces", "boxes", 0, 1, [2**40, 2**40]), r"boxes\[0\]: shape: must have at most"),
    "start after stop": (put("pieces", "start", 0, 12), "piece 0, of tensor 'w': must be a range of the 12 elements"),
    "stop outside": (put("pieces", "stop", 0, 13), "piece 0, of tensor 'w': must be a range of the 12 elements"),
    "stop is huge": (put("pieces", "stop", 0, 2**80), r"pieces: stop\[0\]: must be an integer"),
    "other bytes": (
        put("pieces", "start", 0, 1),
        "piece 0, of tensor 'w': must have chunks of 44 bytes in all, but is 48",
    ),
    "count 0": (put("pieces", "count", 0, 0), r"pieces: count\[0\]: must be an integer from 1 to 4"),
    "count of other bytes": (put("pieces", "count", 0, 1), "piece 0, of tensor 'w': must have chunks of 48 bytes"),
    "count beyond the table": (put("pieces", "count", 2, 2), "piece 2, of tensor 'rng': must have chunks of 24 bytes"),
    "chunks without a piece": (
        put("pieces", {"tensor": [], "box": [], "start": [], "stop": [], "count": [], "boxes": []}),
        "pieces: count: must be 4 in sum, all chunks, but is 0",
    ),
    "columns of pieces": (put("pieces", "stop", [12, 8]), "pieces: stop: must be a list of 3"),
    "torn elements": (put("local_tensors", 0, ["rng", "complex128", [1]]), "piece 2, of tensor 'rng'"),
    "chunks is a string": (put("chunks", "AAAA"), "chunks: must be an object"),
    "inline number": (put("inline", "tensor", 0, 7), r"inline: tensor\[0\]: must be an integer from 0 to 4"),
    "inline is large": (
        lambda value: (value["local_tensors"].append(["x", "uint8", [257]]), value["inline"]["tensor"].append(5)),
        "inline: tensor 5: must have at most 256 bytes, but is 257",
    ),
    "inline twice": (put("inline", "tensor", [1, 1]), "inline: tensor 1: tensor 'step' is stored twice"),
    "inline and in chunks": (put("inline", "tensor", [1, 2]), "inline: tensor 2: tensor 'b' is stored twice"),
    "inline is short": (
        put("inline", "tensor", [1]),
        "inline: data: must have 8 bytes, those of its tensors, but is 10",
    ),
    "inline is long": (put("inline", "data", "AAAA"), "inline: data: must have 10 bytes"),
    "inline is a list": (put("inline", "data", [1, 2]), "inline: data: must be a string in base64"),
    "local is an object": (put("local", {}), "local: must be a list"),
    "local tensor number": (put("local", [{"$tensor": 5}]), r"local: \$tensor: must be the number of one of 5 tensors"),
    "local tensor is short": (put("local_tensors", 1, ["x"]), r"local_tensors\[1\]: must be \[name, dtype, shape\]"),
    "local name twice": (put("local_tensors", 1, 0, "rng"), r"local_tensors\[1\]: name: must be .* no other one has"),
    "local name is a number": (put("local_tensors", 1, 0, 1), r"local_tensors\[1\]: name: must be a string"),
    "local dtype": (put("local_tensors", 1, 1, "object"), r"local_tensors\[1\]: dtype: must be one of"),
    "local shape": (put("local_tensors", 1, 2, [2**63]), r"local_tensors\[1\]: shape\[0\]: must be an integer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_indexes_are_refused(name: str) -> None:
    edit, message = REFUSED[name]
    value = copy.deepcopy(json.loads(example().to_bytes()))
    edit(value)
    with pytest.raises(FormatError, match=f"^the file: .*{message}|^the file: {message}"):
        Index.from_bytes(json.dumps(value).encode(), MANIFEST, "the file")


def test_chunks_must_hold_whole_elements() -> None:
    index = example()
    index.chunks = ChunkTable()
    for offset, size in ((0, 30), (30, 18), (48, 16), (64, 1)):
        index.chunks.append(0, offset, size, size, 0, 0)
    index.files = [FileRecord(PACK, 65)]
    with pytest.raises(FormatError, match="piece 0, of tensor 'w': must have chunks of elements of 4 bytes"):
        Index.from_bytes(index.to_bytes(), MANIFEST)


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{}", b"[" * 10**6])
def test_what_is_no_index_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"^index: "):
        Index.from_bytes(data, MANIFEST)
