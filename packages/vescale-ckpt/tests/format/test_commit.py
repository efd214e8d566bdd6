"""COMMIT and the manifest that it vouches for: what is damaged or hostile is told, never used."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from vescale_ckpt._format import (
    Commit,
    Committed,
    Manifest,
    WriterRecord,
    bases_of,
    find,
    problems,
    read_manifest,
    step_folder,
)
from vescale_ckpt._geometry import Mesh, Rule
from vescale_ckpt._storage.memory import MemoryStorage
from vescale_ckpt.errors import CorruptionError, FormatError, MissingStepError


def save(storage: MemoryStorage, step: int, save_id: str, generation: int = 0, **options: Any) -> str:
    """Put a step without data into a store and return its folder."""
    layout, writers = Rule(Mesh((1,), range(1)), ("R",)), (WriterRecord("0" * 64, 1, 0, 0),)
    data = Manifest(save_id, step, 0.0, 1, (layout,), (), None, None, writers, options).to_bytes()
    folder = step_folder(step, save_id)
    storage.put(f"{folder}/manifest.json", data)
    record = Commit(save_id, step, generation, hashlib.sha256(data).hexdigest(), len(data), 0, 0)
    storage.put(f"{folder}/COMMIT", record.to_bytes())
    return folder


def test_a_commit_comes_back_equal() -> None:
    record = Commit("3f2a9c1b", 7, 2, "ab" * 32, 100, 2**60, 12)
    assert Commit.from_bytes(record.to_bytes()) == record
    value = json.loads(record.to_bytes())
    digest = value.pop("sha256")
    text = ",".join(f"{json.dumps(key)}:{json.dumps(value[key])}" for key in sorted(value))
    assert digest == hashlib.sha256(f"{{{text}}}".encode()).hexdigest()
    assert value.pop("by").startswith("vescale-ckpt ")
    assert value == {
        "format": 1,
        "save_id": "3f2a9c1b",
        "step": 7,
        "generation": 2,
        "manifest_sha256": "ab" * 32,
        "manifest_bytes": 100,
        "bytes": 2**60,
        "chunks": 12,
    }


REFUSED = {
    "save_id": ("../../x", "save_id: must be 8 to 64 lower-case hex digits"),
    "step": (-1, "step: must be an integer from 0"),
    "generation": (1.5, "generation: must be an integer"),
    "manifest_sha256": ("AB" * 32, "manifest_sha256: must be 64 lower-case hex digits"),
    "manifest_bytes": (2**40, "manifest_bytes: must be an integer from 1 to 1073741824"),
    "bytes": ("12", "bytes: must be an integer"),
    "chunks": (-1, "chunks: must be an integer"),
    "format": (2, "format 2 is newer"),
    "extra": (1, "unknown key 'extra'"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_hostile_commits_are_refused(key: str) -> None:
    new, message = REFUSED[key]
    value = json.loads(Commit("3f2a9c1b", 7, 2, "ab" * 32, 100, 200, 12).to_bytes())
    with pytest.raises(FormatError, match=f"^COMMIT: {message}"):
        Commit.from_bytes(json.dumps({**value, key: new}).encode())


def test_what_no_reader_accepts_is_not_written() -> None:
    with pytest.raises(FormatError, match="step: must be"):
        Commit("3f2a9c1b", -7, 2, "ab" * 32, 100, 200, 12).to_bytes()


def test_a_damaged_manifest_is_told_from_a_step_that_is_not_there() -> None:
    storage = MemoryStorage()
    folder = save(storage, 1, "a" * 32, bases=["steps/00000000-cccccccc"])
    assert read_manifest(storage, folder).step == 1
    assert read_manifest(storage, find(storage, 1)).options == {"bases": ["steps/00000000-cccccccc"]}
    assert bases_of(storage, find(storage, 1)) == ("steps/00000000-cccccccc",)
    for bit in range(0, 8 * len(storage.files()[f"{folder}/manifest.json"]), 37):
        storage.flip(f"{folder}/manifest.json", bit)
        with pytest.raises(CorruptionError, match="but COMMIT says"):
            read_manifest(storage, folder)
        storage.flip(f"{folder}/manifest.json", bit)
    storage.remove(f"{folder}/manifest.json")
    with pytest.raises(CorruptionError, match=r"manifest\.json: missing, though the step is committed"):
        read_manifest(storage, folder)
    assert [problem.kind for problem in problems(storage)] == ["manifest"]
    with pytest.raises(MissingStepError, match="00000009-aaaaaaaa/COMMIT: missing"):
        read_manifest(storage, "steps/00000009-aaaaaaaa")


def test_the_manifest_must_be_of_the_save() -> None:
    storage = MemoryStorage()
    first, second = save(storage, 1, "a" * 32), save(storage, 2, "b" * 32)
    data = storage.files()[f"{second}/manifest.json"]
    storage.put(f"{first}/manifest.json", data)
    record = Commit("a" * 32, 1, 0, hashlib.sha256(data).hexdigest(), len(data), 0, 0)
    with pytest.raises(FormatError, match="save_id, step: must be"):
        read_manifest(storage, Committed(first, record))


@pytest.mark.parametrize("bases", ["x", ["../../x"], [1], {"a": 1}])
def test_bases_are_folders_of_steps(bases: Any) -> None:
    storage = MemoryStorage()
    folder = save(storage, 1, "a" * 32, bases=bases)
    with pytest.raises(FormatError, match="options: bases"):
        bases_of(storage, folder)
