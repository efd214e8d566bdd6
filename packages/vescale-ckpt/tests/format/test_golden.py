"""Stores that were written once and must stay readable: by this package, and by the reader that FORMAT.md prints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard

from vescale_ckpt import _codec
from vescale_ckpt._format import (
    Commit,
    Index,
    Lease,
    Manifest,
    check_cover,
    committed,
    find,
    index_path,
    problems,
    read_index,
    read_manifest,
    read_store,
)
from vescale_ckpt._storage.memory import MemoryStorage

GOLDEN = Path(__file__).parent / "golden" / "v1"
FORMAT_MD = Path(__file__).parents[2] / "FORMAT.md"
FOLDER = "steps/00001000-3f2a9c1b"
# What was saved.
W = torch.arange(24, dtype=torch.float32).reshape(6, 4)
H = ((torch.arange(1200) % 97 - 48) / 1024).to(torch.bfloat16).reshape(2, 600)
N = torch.arange(300) // 7


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


@pytest.fixture
def storage() -> MemoryStorage:
    files = {path.relative_to(GOLDEN).as_posix(): path.read_bytes() for path in GOLDEN.rglob("*") if path.is_file()}
    return MemoryStorage(files=files)


def test_the_store_is_read(storage: MemoryStorage) -> None:
    assert read_store(storage) == "00112233445566778899aabbccddeeff"
    assert [entry.folder for entry in committed(storage)] == [FOLDER]
    assert [(problem.name, problem.kind) for problem in problems(storage)] == [("00001001-aabbccdd", "unfinished")]
    lease = Lease.from_bytes((GOLDEN / "steps/00001001-aabbccdd/LEASE").read_bytes())
    assert (lease.save_id, lease.expires, lease.bases) == ("aabbccdd" * 4, 1.5e9, (FOLDER,))
    step = find(storage)
    assert (step.step, step.commit.generation, step.commit.bytes, step.commit.chunks) == (1000, 0, 1811, 7)
    manifest = read_manifest(storage, step)
    assert (manifest.world, manifest.created, manifest.metadata) == (2, 1.5e9, {"loss": 0.25})
    assert [(t.name, t.dtype, t.shape) for t in manifest.tensors] == [
        ("model.w", "float32", (6, 4)),
        ("model.h", "bfloat16", (2, 600)),
        ("model.n", "int64", (300,)),
        ("step", "int64", ()),
    ]
    assert manifest.tree["tied"] == {"$tensor": 0}
    indexes = [read_index(storage, step, manifest, writer) for writer in range(2)]
    assert check_cover(manifest, indexes) == []
    assert [index.local for index in indexes] == [[10], [11]]
    assert indexes[0].inline == {3: raw(torch.tensor(1000))}


def test_the_files_are_written_again_byte_for_byte(storage: MemoryStorage) -> None:
    files = storage.files()
    manifest = Manifest.from_bytes(files[f"{FOLDER}/manifest.json"])
    indexes = [index_path(FOLDER, writer) for writer in range(2)]
    assert [Index.from_bytes(files[path], manifest).to_bytes() for path in indexes] == [files[path] for path in indexes]

    def same(new: bytes, old: bytes) -> None:
        value = json.loads(new)
        assert value.pop("by").startswith("vescale-ckpt ")
        assert list(value.items()) == [item for item in json.loads(old).items() if item[0] != "by"]

    same(manifest.to_bytes(), files[f"{FOLDER}/manifest.json"])
    same(Commit.from_bytes(files[f"{FOLDER}/COMMIT"]).to_bytes(), files[f"{FOLDER}/COMMIT"])


def test_the_chunks_decode(storage: MemoryStorage) -> None:
    step = find(storage)
    manifest = read_manifest(storage, step)
    wanted = [
        [raw(W[:3]), raw(H[:, :300])],
        [raw(W[3:]), raw(H[:, 300:]), raw(N)],
    ]
    for writer, pieces in enumerate(wanted):
        index = read_index(storage, step, manifest, writer)
        assert {index.codecs[c.codec - 1] if c.codec else "raw" for c in index.chunks} >= {"raw", "planes"}
        for record, data in zip(index.pieces, pieces, strict=True):
            found = b""
            for number in range(record.first, record.first + record.count):
                chunk = index.chunks.row(number)
                stored = storage.files()[index.files[chunk.file].path][chunk.offset : chunk.offset + chunk.stored]
                out = torch.zeros(chunk.raw, dtype=torch.uint8)
                if chunk.codec:
                    name, size = index.codecs[chunk.codec - 1], manifest.tensors[record.tensor].itemsize
                    _codec.codec(name).decode(memoryview(stored), out, size)
                else:
                    out[:] = torch.frombuffer(bytearray(stored), dtype=torch.uint8)
                assert _codec.crc32(out) == chunk.crc
                assert _codec.fingerprint(out) == chunk.fingerprint
                found += raw(out)
            assert found == data


@pytest.fixture
def printed() -> dict[str, Any]:
    """Run the code of FORMAT.md and return its names."""
    names: dict[str, Any] = {"zstandard": zstandard}
    for block in re.findall(r"```python\n(.*?)```", FORMAT_MD.read_text(), re.DOTALL):
        exec(compile(block, "FORMAT.md", "exec"), names)
    return names


def test_the_reader_in_the_document_reads_it(printed: dict[str, Any]) -> None:
    found = printed["read"](GOLDEN, "00001000-3f2a9c1b")
    assert found == {"model.w": raw(W), "model.h": raw(H), "model.n": raw(N), "step": raw(torch.tensor(1000))}


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("rest", [0, 1])
def test_the_decoder_in_the_document_decodes(printed: dict[str, Any], width: int, rest: int) -> None:
    torch.manual_seed(width)
    low = torch.randint(0, 256, (1000, width), dtype=torch.uint8)
    low[:, -1] = torch.arange(1000) // 100
    data = torch.cat([low.flatten(), torch.full((min(rest, width - 1),), 7, dtype=torch.uint8)])
    stored = _codec.codec("planes").encode(data, width)
    assert stored is not None
    assert printed["planes"](b"".join(map(bytes, stored)), data.numel(), width) == raw(data)
