"""The marker of a store, leases, and indexes that are compared with the manifest before they are believed."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from vescale_ckpt._format import (
    Commit,
    Committed,
    Index,
    Lease,
    Manifest,
    WriterRecord,
    ensure_store,
    index_path,
    read_index,
    read_store,
    step_folder,
)
from vescale_ckpt._geometry import Mesh, Rule
from vescale_ckpt._storage.memory import MemoryStorage
from vescale_ckpt.errors import CorruptionError, FormatError, MissingStepError


def marker(**fields: str) -> bytes:
    value = {"format": 1, "by": "x", **fields}
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return json.dumps({**value, "sha256": hashlib.sha256(text.encode()).hexdigest()}).encode()


def test_a_store_keeps_its_id() -> None:
    storage = MemoryStorage("mem://run")
    with pytest.raises(MissingStepError, match=r"^mem://run: no checkpoints here: there is no file vckpt\.json"):
        read_store(storage)
    store = ensure_store(storage)
    assert ensure_store(storage) == store == read_store(storage)
    value = json.loads(storage.files()["vckpt.json"])
    assert (value["format"], value["store"]) == (1, store)
    assert ensure_store(MemoryStorage()) != store


def test_the_first_of_two_savers_names_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage()
    put = storage.put

    def late(path: str, data: bytes, *, exclusive: bool = False) -> None:
        put(path, marker(store="0123456789abcdef"))
        put(path, data, exclusive=exclusive)

    monkeypatch.setattr(storage, "put", late)
    assert ensure_store(storage) == "0123456789abcdef"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not valid JSON"),
        (b"{}", "format: must be a number"),
        (marker(), "the key 'store' is missing"),
        (marker(store="../x"), "store: must be 8 to 64 lower-case hex digits"),
        (b'{"format":1,"by":"x","store":"0123456789abcdef"}', "the key 'sha256' is missing"),
        (marker(store="0123456789abcdef").replace(b'"x"', b'"y"'), "sha256: must be the digest .* damaged: remove it"),
        (b'{"format":7,"by":"x"}', "format 7 is newer"),
        (b" " * 70_000, "65536|limit|longer"),
    ],
)
def test_a_damaged_marker_is_refused_and_not_replaced(data: bytes, message: str) -> None:
    storage = MemoryStorage(files={"vckpt.json": data})
    with pytest.raises(FormatError, match=message):
        ensure_store(storage)
    assert storage.files()["vckpt.json"] == data


def test_any_flipped_bit_of_the_marker_is_found() -> None:
    storage = MemoryStorage()
    store = ensure_store(storage)
    for bit in range(8 * len(storage.files()["vckpt.json"])):
        storage.flip("vckpt.json", bit)
        with pytest.raises(FormatError):
            read_store(storage)
        storage.flip("vckpt.json", bit)
    assert read_store(storage) == store


def test_a_lease_comes_back_equal() -> None:
    lease = Lease("3f2a9c1b", 1.5e9, ("steps/00000001-aaaaaaaa", "steps/00000002-bbbbbbbb"))
    assert Lease.from_bytes(lease.to_bytes()) == lease


@pytest.mark.parametrize(
    ("key", "new", "message"),
    [
        ("expires", float("nan"), "NaN is not JSON"),
        ("expires", "soon", "expires: must be a number"),
        ("expires", 10**400, "expires: must be a number"),
        ("bases", "x", "bases: must be a list"),
        ("bases", ["../x"], r"bases\[0\]: must be the folder of a step"),
        ("bases", ["steps/00000001-aaaaaaaa"] * 2, "bases: .* stands twice"),
        ("save_id", "", "save_id: must be"),
    ],
)
def test_hostile_leases_are_refused(key: str, new: Any, message: str) -> None:
    value = json.loads(Lease("3f2a9c1b", 1.5e9, ()).to_bytes())
    with pytest.raises(FormatError, match=f"^LEASE: {message}"):
        Lease.from_bytes(json.dumps({**value, key: new}).encode())


def step_with(storage: MemoryStorage, data: bytes, chunks: int = 0) -> tuple[Committed, Manifest]:
    record = WriterRecord(hashlib.sha256(data).hexdigest(), len(data), 0, chunks)
    layout = Rule(Mesh((2,), range(2)), ("R",))
    manifest = Manifest("3f2a9c1b", 1, 0.0, 2, (layout,), (), None, None, (record, record))
    folder = step_folder(1, "3f2a9c1b")
    storage.put(index_path(folder, 0), data)
    return Committed(folder, Commit("3f2a9c1b", 1, 0, "0" * 64, 1, 0, 0)), manifest


def test_an_index_is_read_by_step_or_folder() -> None:
    storage = MemoryStorage()
    step, manifest = step_with(storage, Index(0, local=[5]).to_bytes())
    assert read_index(storage, step, manifest, 0).local == [5]
    assert read_index(storage, step.folder, manifest, 0).local == [5]
    with pytest.raises(CorruptionError, match=r"w00001\.json: missing, though the step is committed"):
        read_index(storage, step, manifest, 1)


def test_every_flipped_bit_of_an_index_is_noticed() -> None:
    storage = MemoryStorage()
    data = Index(0, local=[5]).to_bytes()
    step, manifest = step_with(storage, data)
    for bit in range(8 * len(data)):
        storage.flip(index_path(step.folder, 0), bit)
        with pytest.raises(CorruptionError, match=r"but manifest\.json says"):
            read_index(storage, step, manifest, 0)
        storage.flip(index_path(step.folder, 0), bit)


def test_an_index_must_be_that_of_its_writer() -> None:
    storage = MemoryStorage()
    step, manifest = step_with(storage, Index(1).to_bytes())
    with pytest.raises(FormatError, match=r"writer, chunks: must be \(0, 0\) as in the manifest, but are \(1, 0\)"):
        read_index(storage, step, manifest, 0)
    step, manifest = step_with(storage, Index(0).to_bytes(), chunks=3)
    with pytest.raises(FormatError, match=r"must be \(0, 3\) as in the manifest"):
        read_index(storage, step, manifest, 0)
