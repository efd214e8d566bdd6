"""Plans and reads against checkpoints that the test writes byte by byte; the oracle is torch indexing."""

import hashlib
import itertools
import random
import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_ckpt._format import (
    ChunkTable,
    Commit,
    Committed,
    FileRecord,
    Index,
    Manifest,
    PieceRecord,
    TensorRecord,
    WriterRecord,
)
from vescale_ckpt._geometry import Box, Mesh, Piece, Rule
from vescale_ckpt._load import Checkpoint, Request
from vescale_ckpt._load.plan import run_of
from vescale_ckpt.errors import CorruptionError, FormatError
from vescale_ckpt.testing import MemoryStorage

FOLDER = "00000003-01234567"
PACK = f"steps/{FOLDER}/data/w00000-0.pack"
ALONE = Rule(Mesh((1,), range(1)), ("R",))


def raw(tensor):
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


def write(tensors, pieces, chunk=64, inline=None, seed=0):
    """Return an open checkpoint of one writer.

    tensors: {name: tensor}. pieces: [(number, Piece)], each cut into chunks of `chunk` elements that lie in the pack in
    any order, with gaps. Everything here is done by the test itself.
    """
    order = random.Random(seed)
    wholes = list(tensors.values())
    cut = []
    for number, piece in pieces:
        flat = torch.cat(
            [wholes[number][b.slices(Box.whole(tuple(wholes[number].shape)))].reshape(-1) for b in piece.boxes()]
        )
        cut.append((number, piece, [raw(part) for part in flat.split(chunk)]))
    flat_chunks = [data for _, _, datas in cut for data in datas]
    places, pack = {}, b""
    for row in order.sample(range(len(flat_chunks)), len(flat_chunks)):
        pack += bytes(order.randrange(0, 9))
        places[row] = len(pack)
        pack += flat_chunks[row]
    table = ChunkTable()
    for row, data in enumerate(flat_chunks):
        table.append(0, places[row], len(data), len(data), 0, zlib.crc32(data))
    records, row = [], 0
    for number, piece, datas in cut:
        records.append(PieceRecord(number, piece, row, len(datas)))
        row += len(datas)
    files = [FileRecord(PACK, len(pack))] if pack else []
    index = Index(0, [], files, records, table, {n: raw(wholes[n]) for n in inline or ()}, [], []).to_bytes()
    manifest = Manifest(
        "0123456789abcdef",
        3,
        0.0,
        1,
        (ALONE,),
        tuple(TensorRecord(n, str(t.dtype).removeprefix("torch."), tuple(t.shape), 0) for n, t in tensors.items()),
        {name: {"$tensor": number} for number, name in enumerate(tensors)},
        None,
        (WriterRecord(hashlib.sha256(index).hexdigest(), len(index), len(pack), len(table)),),
    ).to_bytes()
    digest = hashlib.sha256(manifest).hexdigest()
    commit = Commit("0123456789abcdef", 3, 0, digest, len(manifest), len(pack), len(table))
    storage = MemoryStorage(
        files={
            PACK: pack,
            f"steps/{FOLDER}/manifest.json": manifest,
            f"steps/{FOLDER}/index/w00000.json": index,
        }
    )
    return Checkpoint(storage, Committed(f"steps/{FOLDER}", commit)), storage, table


def whole(tensor):
    return Piece(Box.whole(tuple(tensor.shape)), 0, tensor.numel())


def columns(tensor):
    """The pieces of a matrix that was sharded over its second dim in three."""
    rows, cols = tensor.shape
    at = [0, cols // 4, cols // 2, cols]
    return [Piece(Box((0, a), (rows, b - a)), 0, rows * (b - a)) for a, b in itertools.pairwise(at)]


@st.composite
def boxes(draw, shape):
    offset, size = [], []
    for n in shape:
        low = draw(st.integers(0, n))
        offset.append(low)
        size.append(draw(st.integers(0, n - low)))
    return Box(tuple(offset), tuple(size))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_box_of_any_pieces_is_what_indexing_gives(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=0, max_size=4)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.int16, torch.bool, torch.complex128, torch.float8_e4m3fn]))
    tensor = torch.randint(0, 2 if dtype == torch.bool else 99, shape).to(dtype)
    size, cuts = tensor.numel(), data.draw(st.lists(st.integers(0, 9**4), max_size=4))
    ends = sorted({0, size, *(c % size for c in cuts)})
    pieces = [(0, Piece(Box.whole(shape), a, b)) for a, b in itertools.pairwise(ends)]
    checkpoint, _, _ = write({"t": tensor}, pieces, chunk=data.draw(st.integers(1, 40)))
    wanted = [data.draw(boxes(shape)) for _ in range(3)]
    verify = data.draw(st.booleans())
    outs = []
    for box in wanted:
        padded = torch.zeros(tuple(n + 1 for n in box.shape), dtype=dtype)  # strided targets too
        outs.append(
            padded[tuple(slice(0, n) for n in box.shape)]
            if data.draw(st.booleans())
            else torch.zeros(box.shape, dtype=dtype)
        )
    checkpoint.read_many([Request(0, b, o) for b, o in zip(wanted, outs, strict=True)], verify=verify)
    for box, out in zip(wanted, outs, strict=True):
        expected = tensor[box.slices(Box.whole(shape))]
        assert raw(out) == raw(expected)


def test_pieces_that_are_columns():
    tensor = torch.arange(40 * 24).view(40, 24)
    checkpoint, _, _ = write({"t": tensor}, [(0, p) for p in columns(tensor)], chunk=50)
    assert torch.equal(checkpoint.read(0), tensor)
    assert torch.equal(checkpoint.read(0, Box((3, 5), (7, 11))), tensor[3:10, 5:16])
    out = torch.zeros(24, 40, dtype=torch.int64)
    checkpoint.read(0, None, out.t())
    assert torch.equal(out, tensor.t())


def test_only_chunks_that_meet_the_box_are_read():
    tensor = torch.arange(1000)
    checkpoint, _, _ = write({"t": tensor}, [(0, whole(tensor))], chunk=100)
    stats = checkpoint.read_many([Request(0, Box((250,), (20,)), torch.empty(20, dtype=torch.int64))])
    assert (stats.chunks, stats.read, stats.wanted) == (1, 800, 160)
    stats = checkpoint.read_many([Request(0, Box((250,), (20,)), torch.empty(20, dtype=torch.int64))], verify=False)
    assert stats.read == 160
    stats = checkpoint.read_many([Request(0, Box((290,), (20,)), torch.empty(20, dtype=torch.int64))])
    assert (stats.chunks, stats.read) == (2, 1600)


def test_a_narrow_column_of_long_rows_skips_the_chunks_between():
    tensor = torch.arange(8 * 1000).view(8, 1000)
    checkpoint, _, _ = write({"t": tensor}, [(0, whole(tensor))], chunk=100)
    out = torch.empty(8, 3, dtype=torch.int64)
    stats = checkpoint.read_many([Request(0, Box((0, 510), (8, 3)), out)])
    assert stats.chunks == 8  # of 80
    assert torch.equal(out, tensor[:, 510:513])


def test_a_chunk_that_two_targets_want_is_read_once():
    tensor = torch.arange(100)
    checkpoint, _, _ = write({"t": tensor}, [(0, whole(tensor))], chunk=100)
    first, second = torch.empty(60, dtype=torch.int64), torch.empty(70, dtype=torch.int64)
    stats = checkpoint.read_many([Request(0, Box((0,), (60,)), first), Request(0, Box((30,), (70,)), second)])
    assert stats.chunks == 1
    assert torch.equal(first, tensor[:60])
    assert torch.equal(second, tensor[30:])


def test_inline_tensors_are_cut_too():
    tensor = torch.arange(12, dtype=torch.int16).view(3, 4)
    checkpoint, _, _ = write({"t": tensor}, [], inline=[0])
    assert torch.equal(checkpoint.read(0, Box((1, 1), (2, 2))), tensor[1:, 1:3])


def test_conversion_into_another_dtype_and_a_conjugate_view():
    tensor = torch.complex(torch.arange(50.0), torch.ones(50))
    checkpoint, _, _ = write(
        {"t": tensor, "f": torch.arange(90000.0)},
        [(0, whole(tensor)), (1, Piece(Box((0,), (90000,)), 0, 90000))],
        chunk=70000,
    )
    memory = torch.zeros(50, dtype=torch.complex64)
    half = torch.zeros(90000, dtype=torch.float64)
    checkpoint.read_many([Request(0, Box((0,), (50,)), memory.conj()), Request(1, Box((0,), (90000,)), half)])
    assert torch.equal(memory, tensor.conj().resolve_conj())
    assert torch.equal(half, torch.arange(90000.0, dtype=torch.float64))


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([Piece(Box((0,), (100,)), 0, 60)], "hold 60"),
        ([Piece(Box((0,), (100,)), 0, 60), Piece(Box((0,), (100,)), 20, 60)], "overlap"),
        ([Piece(Box((0,), (100,)), 0, 100), Piece(Box((0,), (100,)), 0, 100)], "overlap"),
    ],
)
def test_pieces_must_hold_every_element_once(pieces, text):
    tensor = torch.arange(100)
    checkpoint, _, _ = write({"layer.w": tensor}, [(0, piece) for piece in pieces])
    with pytest.raises(FormatError, match=f"layer.w.*{text}"):
        checkpoint.read(0)


def test_overlapping_columns_are_found():
    tensor = torch.arange(40).view(4, 10)
    pieces = [Piece(Box((0, 0), (4, 6)), 0, 24), Piece(Box((0, 5), (4, 4)), 0, 16)]
    checkpoint, _, _ = write({"t": tensor}, [(0, piece) for piece in pieces])
    with pytest.raises(FormatError, match="overlap"):
        checkpoint.read(0)


def test_a_request_must_fit_its_tensor_and_target():
    tensor = torch.arange(100)
    checkpoint, _, _ = write({"t": tensor}, [(0, whole(tensor))])
    with pytest.raises(ValueError, match="does not lie"):
        checkpoint.read(0, Box((90,), (11,)))
    with pytest.raises(ValueError, match="does not fit"):
        checkpoint.read(0, Box((0,), (5,)), torch.empty(6, dtype=torch.int64))


def test_every_flipped_bit_is_found_and_named():
    tensor = torch.arange(3000.0)
    checkpoint, storage, table = write(
        {"a": tensor[:500], "b": tensor}, [(0, whole(tensor[:500])), (1, whole(tensor))], chunk=200
    )
    good = storage.get(PACK, 1 << 20)
    rng = random.Random(1)
    for row in range(len(table)):
        chunk = table.row(row)
        bad = bytearray(good)
        bad[chunk.offset + rng.randrange(chunk.stored)] ^= 1 << rng.randrange(8)
        storage.put(PACK, bytes(bad))
        fresh = Checkpoint(storage, checkpoint._committed)
        with pytest.raises(CorruptionError) as caught:
            fresh.read_many(
                [Request(0, Box((0,), (500,)), torch.empty(500)), Request(1, Box((0,), (3000,)), torch.empty(3000))]
            )
        assert caught.value.tensors == (("a",) if row < 3 else ("b",))
        assert f"byte {chunk.offset}" in str(caught.value)
        assert PACK in str(caught.value)


def test_a_short_or_missing_file_names_all_its_tensors():
    a, b = torch.arange(100.0), torch.arange(100.0, 200.0)
    checkpoint, storage, _ = write({"a": a, "b": b}, [(0, whole(a)), (1, whole(b))], chunk=100)
    requests = [Request(0, Box((0,), (100,)), torch.empty(100)), Request(1, Box((0,), (100,)), torch.empty(100))]
    storage.put(PACK, storage.get(PACK, 1 << 20)[:-1])
    with pytest.raises(CorruptionError) as caught:
        checkpoint.read_many(requests)
    assert set(caught.value.tensors) <= {"a", "b"}
    assert caught.value.tensors
    storage.remove(PACK)
    with pytest.raises(CorruptionError, match="missing") as caught:
        Checkpoint(storage, checkpoint._committed).read_many(requests)
    assert set(caught.value.tensors) == {"a", "b"}


def test_run_of():
    assert run_of(Box((), ()), Box((), ())) == (0, 1)
    assert run_of(Box((1, 2), (1, 2)), Box((0, 0), (4, 5))) == (7, 9)
    assert run_of(Box((1, 0), (2, 4)), Box((0, 0), (4, 5))) is None
    assert run_of(Box((3, 1, 0), (1, 2, 4)), Box((3, 0, 0), (2, 3, 4))) == (4, 12)
