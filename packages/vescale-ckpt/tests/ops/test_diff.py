"""Diff: every kind of difference between two steps, and that equal chunks are not read."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

import vescale_ckpt as ck
from vescale_ckpt._ops.diff import _Side
from vescale_ckpt.testing import FaultyStorage, MemoryStorage


def state() -> dict[str, Any]:
    return {
        "same": torch.arange(5000.0),
        "w": torch.arange(3000.0).reshape(3, 1000),
        "tiny": torch.tensor(2),
        "lr": 0.1,
    }


def kinds(report: Any) -> dict[str, str]:
    return {entry.name: entry.kind for entry in report.tensors}


def test_each_kind_of_difference() -> None:
    store = MemoryStorage()
    a = {**state(), "gone": torch.ones(3), "cut": torch.ones(4, 2), "cast": torch.ones(4)}
    b = {**state(), "new": torch.ones(3), "cut": torch.ones(2, 4), "cast": torch.ones(4).half(), "lr": 0.2, "on": True}
    b["w"] = b["w"].clone()
    b["w"][1, 3] += 0.5
    b["w"][2, 999] -= 2.0
    b["tiny"] = torch.tensor(5)
    ck.save(store, a, step=1)
    ck.save(store, b, step=2)
    report = ck.diff((store, 1), (store, 2))
    assert kinds(report) == {
        "cast": "dtype", "cut": "shape", "gone": "only a", "new": "only b", "same": "equal", "tiny": "changed",
        "w": "changed",
    }  # fmt: skip
    (w,) = [entry for entry in report.tensors if entry.name == "w"]
    assert (w.elements, w.different, w.max_abs, w.read) == (3000, 2, 2.0, True)
    assert w.mean_abs == pytest.approx(2.5 / 3000)
    (cut,) = [entry for entry in report.tensors if entry.name == "cut"]
    assert (cut.a, cut.b) == ("float32[4, 2]", "float32[2, 4]")
    assert [(v.name, v.kind, v.a, v.b) for v in report.values] == [
        ("lr", "changed", 0.1, 0.2),
        ("on", "only b", None, True),
    ]
    assert not report.equal
    assert len(report.changes) == 8


def test_equal_steps_are_not_read_unless_asked_to() -> None:
    store = MemoryStorage()
    for step in (1, 2):
        ck.save(store, state(), step=step)
    faulty = FaultyStorage(store)
    report = ck.diff((faulty, 1), (faulty, 2))
    assert report.equal
    assert not any(entry.read for entry in report.tensors)
    assert not any("/data/" in operation.path for operation in faulty.operations)
    report = ck.diff((faulty, 1), (faulty, 2), read=True)
    assert report.equal
    assert all(entry.read for entry in report.tensors)


def test_equal_content_in_two_stores_is_known_by_its_sums(tmp_path: Path) -> None:
    ck.save(tmp_path / "a", state(), step=1, compress=None)
    ck.save(tmp_path / "b", state(), step=9)
    report = ck.diff(tmp_path / "a", tmp_path / "b")
    assert report.equal
    assert (report.a[1], report.b[1]) == (1, 9)
    assert not any(entry.read for entry in report.tensors)


def test_chunks_of_another_size_are_read_and_equal() -> None:
    first, second = MemoryStorage(), MemoryStorage()
    ck.save(first, state(), step=1, chunk_bytes=4096)
    ck.save(second, state(), step=1, chunk_bytes=8192)
    report = ck.diff(first, second)
    assert report.equal
    assert {entry.name for entry in report.tensors if entry.read} == {"same", "w"}


def test_an_equal_crc_alone_proves_nothing() -> None:
    """Without dedup there are no fingerprints. Adding a multiple of its polynomial leaves a CRC-32 as it is."""
    bits = f"{0x104C11DB7:b}"  # the polynomial; a CRC-32 takes the lowest bit of a byte first
    delta = [int(bits[at : at + 8][::-1], 2) for at in range(0, len(bits), 8)]
    first = torch.zeros(1000, dtype=torch.uint8)
    second = first.clone()
    second[100:105] = torch.tensor(delta, dtype=torch.uint8)
    assert zlib.crc32(bytes(first.tolist())) == zlib.crc32(bytes(second.tolist()))
    stores = MemoryStorage(), MemoryStorage("testing://2")
    for store, tensor in zip(stores, (first, second), strict=True):
        ck.save(store, {"w": tensor}, step=1, dedup=None, compress=None)
    (w,) = ck.diff(*stores).tensors
    assert (w.kind, w.read, w.different) == ("changed", True, 5 - delta.count(0))


def test_aliases_are_compared_under_each_of_their_names() -> None:
    store = MemoryStorage()
    shared = torch.arange(2000.0)
    ck.save(store, {"a": shared, "b": shared}, step=1)
    ck.save(store, {"a": shared, "b": shared + 1}, step=2)
    assert kinds(ck.diff((store, 1), (store, 2))) == {"a": "equal", "b": "changed"}


def test_types_of_values_count() -> None:
    store = MemoryStorage()
    ck.save(store, {"x": 1, "y": [1, 2], "z": float("nan")}, step=1)
    ck.save(store, {"x": True, "y": (1, 2), "z": float("nan")}, step=2)
    found = {value.name.split(".")[0]: value.kind for value in ck.diff((store, 1), (store, 2)).values}
    assert found["x"] == "changed"
    assert found["z"] == "equal"
    assert found["y"] != "equal"


def test_values_of_ranks_are_compared() -> None:
    store = MemoryStorage()
    ck.save(store, {"r": ck.local({"at": 1, "t": torch.arange(500)})}, step=1)
    ck.save(store, {"r": ck.local({"at": 2, "t": torch.arange(500) + 1})}, step=2)
    report = ck.diff((store, 1), (store, 2))
    assert len(report.changes) == 2
    assert all(entry.name.startswith("rank 0: ") for entry in report.changes)
    (changed,) = report.tensors
    assert (changed.different, changed.max_abs) == (500, 1.0)


def test_damage_that_has_to_be_read_is_an_error() -> None:
    store = MemoryStorage()
    ck.save(store, {"w": torch.zeros(1000)}, step=1, compress=None)
    ck.save(store, {"w": torch.ones(1000)}, step=2, compress=None)
    path = next(path for path in store.files() if path.startswith("steps/00000002") and "/data/" in path)
    store.flip(path, 8 * 8)
    with pytest.raises(ck.CorruptionError, match=r"\bw\b"):
        ck.diff((store, 1), (store, 2))


def test_progress_and_wrong_use() -> None:
    store = MemoryStorage()
    ck.save(store, state(), step=1)
    ck.save(store, {**state(), "same": torch.zeros(5000)}, step=2)
    seen: list[tuple[int, int]] = []
    ck.diff((store, 1), (store, 2), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (20000 + 12000 + 8,) * 2
    with pytest.raises(ck.MissingStepError):
        ck.diff((store, 1), (store, 3))
    with pytest.raises(ValueError, match="tuple of 3"):
        ck.diff((store, 1, 2), store)  # type: ignore[arg-type]


def test_pieces_that_are_missing_on_both_sides_are_not_equal() -> None:
    store = MemoryStorage()
    for step in (1, 2):
        ck.save(store, {"w": torch.arange(5000.0)}, step=step)
    with ck.open(store, 1) as first, ck.open(store, 2) as second:
        a, b = _Side(first), _Side(second)
        assert a.content((0, None))[0] == b.content((0, None))[0]
        for side in (a, b):
            side.indexes[0].pieces.clear()
        assert a.content((0, None))[0] != b.content((0, None))[0]
        assert a.content((0, None))[1] != b.content((0, None))[1]
