"""Random damage to valid files: a FormatError or a valid value, nothing else; and noticed always by the digests."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from vescale_ckpt._format import Commit, Index, Lease, Manifest, check_cover, find, read_index, read_manifest
from vescale_ckpt._storage.memory import MemoryStorage
from vescale_ckpt.errors import CorruptionError, FormatError, MissingStepError

GOLDEN = Path(__file__).parent / "golden" / "v1"
FOLDER = "steps/00001000-3f2a9c1b"
FILES = {path.relative_to(GOLDEN).as_posix(): path.read_bytes() for path in GOLDEN.rglob("*") if path.is_file()}
MANIFEST = Manifest.from_bytes(FILES[f"{FOLDER}/manifest.json"])
PARSERS: dict[str, Callable[[bytes], object]] = {
    f"{FOLDER}/manifest.json": Manifest.from_bytes,
    f"{FOLDER}/index/w00000.json": lambda data: Index.from_bytes(data, MANIFEST),
    f"{FOLDER}/index/w00001.json": lambda data: Index.from_bytes(data, MANIFEST),
    f"{FOLDER}/COMMIT": Commit.from_bytes,
    "steps/00001001-aabbccdd/LEASE": Lease.from_bytes,
}
TOKENS = [b"null", b"-1", b"1e999", b"9" * 30, b"{}", b"[]", b'""', b"true", b"0.5", b'"x"', b"[[", b"\\ud800", b"\xff"]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return other bytes: bytes changed, cut out, doubled or replaced by what might be a value."""
    new = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at, size = rng.randrange(len(new)), rng.choice([1, 1, 4, 40])
        kind = rng.randrange(6)
        if kind == 0:
            new[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            new[at] = rng.choice(b'0123456789,:[]{}"\\-e.')
        elif kind == 2 and len(new) > 50:
            del new[at : at + size]
        elif kind == 3:
            new[at:at] = new[at : at + size]
        elif kind == 4:
            new[at : at + size] = rng.choice(TOKENS)
        else:  # a number becomes another one
            digits = [i for i, byte in enumerate(new) if 48 <= byte <= 57]
            if digits:
                new[rng.choice(digits)] = rng.choice(b"0123456789")
    return bytes(new)


@pytest.mark.parametrize("path", PARSERS)
def test_damage_is_refused_or_harmless(path: str) -> None:
    rng = random.Random(path)
    refused = 0
    for _ in range(1500):
        data = mutated(FILES[path], rng)
        try:
            value = PARSERS[path](data)
        except FormatError:
            refused += 1
            continue
        if isinstance(value, Index):  # what is accepted can be used
            check_cover(MANIFEST, [value])
        elif isinstance(value, Manifest):
            check_cover(value, [])
    assert refused > 500


def read_all(storage: MemoryStorage) -> None:
    step = find(storage)
    manifest = read_manifest(storage, step)
    for writer in range(manifest.world):
        read_index(storage, step, manifest, writer)


@pytest.mark.parametrize("path", [path for path in PARSERS if path.endswith(".json")])
def test_damage_is_noticed_when_a_step_is_read(path: str) -> None:
    rng = random.Random(path)
    for _ in range(300):
        data = mutated(FILES[path], rng)
        if data == FILES[path]:
            continue
        with pytest.raises(CorruptionError):
            read_all(MemoryStorage(files={**FILES, path: data}))


def test_a_damaged_commit_never_gives_another_manifest() -> None:
    rng = random.Random(0)
    path, read = f"{FOLDER}/COMMIT", 0
    for _ in range(500):
        storage = MemoryStorage(files={**FILES, path: mutated(FILES[path], rng)})
        try:
            manifest = read_manifest(storage, find(storage))
        except (CorruptionError, FormatError, MissingStepError):
            continue
        assert manifest == MANIFEST  # only what has no effect on what is loaded was changed
        read += 1
    assert read < 250
