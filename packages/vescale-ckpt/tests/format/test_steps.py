"""Steps exist by their COMMIT alone: junk, half-written and damaged saves are neither seen nor in the way.

And what is not asked for is not read, for a store may hold thousands of steps.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
import torch

import vescale_ckpt as ck
from vescale_ckpt._format import (
    Commit,
    Manifest,
    WriterRecord,
    committed,
    ensure_store,
    find,
    newest,
    problems,
    read_commit,
    step_folder,
)
from vescale_ckpt._geometry import Mesh, Rule
from vescale_ckpt._storage.memory import MemoryStorage
from vescale_ckpt.errors import FormatError, MissingStepError, StorageError
from vescale_ckpt.testing import FaultyStorage


def save(storage: MemoryStorage, step: int, save_id: str, generation: int = 0, **options: Any) -> str:
    """Put a step without data into a store and return its folder."""
    layout, writers = Rule(Mesh((1,), range(1)), ("R",)), (WriterRecord("0" * 64, 1, 0, 0),)
    data = Manifest(save_id, step, 0.0, 1, (layout,), (), None, None, writers, options).to_bytes()
    folder = step_folder(step, save_id)
    storage.put(f"{folder}/manifest.json", data)
    record = Commit(save_id, step, generation, hashlib.sha256(data).hexdigest(), len(data), 0, 0)
    storage.put(f"{folder}/COMMIT", record.to_bytes())
    return folder


def test_steps_are_sorted_and_the_newest_generation_is_taken() -> None:
    storage = MemoryStorage()
    save(storage, 20, "f" * 32)
    save(storage, 3, "a" * 32)
    save(storage, 3, "0" * 32, generation=1)
    save(storage, 3, "9" * 32)
    save(storage, 10**15, "b" * 32)
    save(storage, 20, "e" * 32)
    found = committed(storage)
    assert [(entry.step, entry.commit.generation, entry.name[-1]) for entry in found] == [
        (3, 0, "9"),
        (3, 0, "a"),
        (3, 1, "0"),
        (20, 0, "e"),
        (20, 0, "f"),
        (10**15, 0, "b"),
    ]
    assert [entry.name[-1] for entry in newest(found)] == ["0", "f", "b"]
    assert find(storage).step == 10**15
    assert find(storage, 3).folder == "steps/00000003-00000000"
    assert find(storage, 20).commit.save_id == "f" * 32
    assert find(storage, "00000003-aaaaaaaa") == find(storage, "steps/00000003-aaaaaaaa")
    assert find(storage, "00000003-aaaaaaaa").commit.generation == 0
    assert read_commit(storage, "steps/00000003-aaaaaaaa") == find(storage, "00000003-aaaaaaaa")
    assert problems(storage) == []


def test_junk_and_unfinished_saves_are_no_steps() -> None:
    storage = MemoryStorage()
    folder = save(storage, 1, "a" * 32)
    good = storage.files()[f"{folder}/COMMIT"]
    storage.put("steps/README", b"hello")
    storage.put("steps/latest/COMMIT", good)
    storage.put("steps/00000002-bbbbbbbb/manifest.json", b"{}")
    storage.put("steps/00000003-cccccccc/COMMIT", good[:-10])
    storage.put("steps/00000004-dddddddd/COMMIT", b"")
    storage.put("steps/00000005-eeeeeeee/COMMIT", good)
    storage.put("steps/00000006-ffffffff/COMMIT", b" " * 100_000)
    storage.put("steps/00000007-00000000/COMMIT/x", b"")
    storage.put("steps/00000008-00000000", good)
    assert [entry.folder for entry in committed(storage)] == [folder]
    assert find(storage).folder == folder
    assert [(problem.name, problem.kind) for problem in problems(storage)] == [
        ("00000002-bbbbbbbb", "unfinished"),
        ("00000003-cccccccc", "commit"),
        ("00000004-dddddddd", "commit"),
        ("00000005-eeeeeeee", "commit"),
        ("00000006-ffffffff", "commit"),
        ("00000007-00000000", "commit" if folder_is_error(storage) else "unfinished"),
        ("00000008-00000000", "junk"),
        ("README", "junk"),
        ("latest", "junk"),
    ]


def folder_is_error(storage: MemoryStorage) -> bool:
    """Tell whether this storage takes a folder in place of a file for an error, or for absence as object stores do."""
    try:
        storage.get("steps/00000007-00000000/COMMIT", 10)
    except FileNotFoundError:
        return False
    except StorageError:
        return True
    raise AssertionError("a folder was read")


def test_a_storage_that_fails_is_not_taken_for_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage()
    save(storage, 1, "a" * 32)

    def get(path: str, limit: int) -> bytes:
        raise StorageError(f"{path}: input/output error")

    monkeypatch.setattr(storage, "get", get)
    with pytest.raises(StorageError, match="COMMIT: input/output error"):
        committed(storage)


def test_a_missing_step_lists_what_there_is() -> None:
    storage = MemoryStorage("mem://run")
    with pytest.raises(MissingStepError, match=r"^mem://run: no committed checkpoint; there is no such folder"):
        find(storage)
    storage.put("notes.txt", b"hello")
    with pytest.raises(MissingStepError, match=r"^mem://run: no committed checkpoint; this is no store"):
        find(storage, 3)
    ensure_store(storage)
    with pytest.raises(MissingStepError, match=r"^mem://run: no committed checkpoint; there are: none\.$"):
        find(storage)
    for step in range(40):
        save(storage, step, f"{step:032x}")
    storage.put("steps/00000050-bbbbbbbb/LEASE", b"{}")
    with pytest.raises(MissingStepError, match=r"of step 50; there are: \.\.\., 24, 25, .*, 39\.") as caught:
        find(storage, 50)
    assert "00000050-bbbbbbbb: no COMMIT" in str(caught.value)
    with pytest.raises(MissingStepError, match="no committed checkpoint of step 00000001-ffffffff"):
        find(storage, "00000001-ffffffff")


def test_a_removed_step_is_called_so() -> None:
    storage = MemoryStorage()
    save(storage, 2, "2" * 32)
    storage.put("steps/00000001-bbbbbbbb/REMOVED", b"")
    storage.put("steps/00000001-cccccccc/LEASE", b"{}")
    with pytest.raises(MissingStepError, match="of step 1; there are: 2") as caught:
        find(storage, 1)
    lines = str(caught.value).splitlines()
    assert "  00000001-bbbbbbbb: removed; what is left of it is data that other steps may need" in lines
    assert "  00000001-cccccccc: no COMMIT: being saved, or never finished" in lines


def test_a_newer_format_is_not_passed_over_silently() -> None:
    storage = MemoryStorage()
    save(storage, 1, "a" * 32)
    newer = json.loads(Commit("b" * 32, 2, 0, "0" * 64, 1, 0, 0).to_bytes()) | {"format": 2, "by": "vescale-ckpt 9.9"}
    storage.put("steps/00000002-bbbbbbbb/COMMIT", json.dumps(newer).encode())
    for step in ("latest", 2, "00000002-bbbbbbbb"):
        with pytest.raises(FormatError, match=r"pip install --upgrade 'vescale-ckpt>=9\.9'"):
            find(storage, step)
    assert find(storage, 1).step == 1
    assert [problem.kind for problem in problems(storage)] == ["newer"]


# ---- what is read


def newer(step: int, save_id: str) -> bytes:
    value = json.loads(Commit(save_id, step, 0, "0" * 64, 1, 0, 0).to_bytes())
    return json.dumps(value | {"format": 2, "by": "vescale-ckpt 9.9"}).encode()


def many(count: int = 300) -> MemoryStorage:
    storage = MemoryStorage()
    for step in range(0, 10 * count, 10):
        save(storage, step, f"{step:08x}" + "0" * 24)
    return storage


def read_by(storage: MemoryStorage, action: Any) -> list[str]:
    """Return the folders whose COMMIT an action reads, in that order; it may list `steps` once only."""
    counting = FaultyStorage(storage)
    action(counting)
    assert [(o.kind, o.path) for o in counting.operations].count(("list", "steps")) == 1
    return [o.path.split("/")[1] for o in counting.operations if o.kind == "get" and o.path.endswith("/COMMIT")]


@pytest.mark.parametrize("step", ["latest", 2990, 1500, "00001500-000005dc", "steps/00001500-000005dc"])
def test_only_the_step_that_is_wanted_is_read(step: int | str) -> None:
    storage, found = many(), []
    assert len(read_by(storage, lambda counting: found.append(find(counting, step)))) == 1
    assert found[0].step == (1500 if "1500" in str(step) else 2990)


def test_all_saves_of_a_step_are_looked_at() -> None:
    storage = many()
    save(storage, 2990, "f" * 32)
    save(storage, 2990, "e" * 32, generation=1)
    assert len(read_by(storage, find)) == 3
    assert find(storage).commit.save_id == "e" * 32


def test_numbers_are_compared_and_not_names() -> None:
    storage = many()
    save(storage, 10**9, "a" * 32)
    assert read_by(storage, find) == ["1000000000-aaaaaaaa"]
    assert find(storage).step == 10**9


def test_what_is_no_step_is_passed_over_down_to_the_first_sound_one() -> None:
    storage = many()
    storage.put("steps/00009000-aaaaaaaa/LEASE", b"{}")
    storage.put("steps/00009001-aaaaaaaa/COMMIT", b"{")
    storage.put("steps/00002985-aaaaaaaa/COMMIT", b"{")
    read = read_by(storage, find)
    assert read == ["00009001-aaaaaaaa", "00009000-aaaaaaaa", "00002990-00000bae"]
    assert find(storage).step == 2990


def test_a_newer_format_counts_where_it_stands() -> None:
    storage = many()
    storage.put("steps/00002985-aaaaaaaa/COMMIT", newer(2985, "a" * 32))
    assert find(storage).step == 2990
    storage.put("steps/00002990-bbbbbbbb/COMMIT", newer(2990, "b" * 32))
    for step in ("latest", 2990, "steps/00002990-bbbbbbbb"):
        with pytest.raises(FormatError, match=r"vescale-ckpt>=9\.9"):
            find(storage, step)
    assert find(storage, "00002990-00000bae").step == 2990


@pytest.mark.parametrize("options", [{}, {"step": 5000}, {"step": 1500, "overwrite": True}, {"dedup": None}])
def test_a_save_reads_the_last_step_and_those_of_its_number(options: dict[str, Any]) -> None:
    storage, saved = many(), []
    read = read_by(storage, lambda counting: saved.append(ck.save(counting, {"w": torch.zeros(9)}, **options)))
    again = options.get("step") == 1500
    assert set(read) == {"00002990-00000bae"} | ({"00001500-000005dc"} if again else set())
    assert len(read) <= 4
    assert saved[0].step == options.get("step", 2991)
    assert find(storage, saved[0].step).folder == saved[0].folder
    assert find(storage, saved[0].step).commit.generation == int(again)


def test_a_save_over_a_step_that_is_there_is_refused_whatever_else_there_is() -> None:
    def refused(counting: FaultyStorage) -> None:
        with pytest.raises(ck.CheckpointError, match="step: 1500 is in"):
            ck.save(counting, {}, step=1500)

    assert read_by(many(), refused) == ["00002990-00000bae", "00001500-000005dc"]


def test_a_damaged_commit_that_is_passed_over_is_told(caplog):
    storage = MemoryStorage()
    for step in (1, 2):
        ck.save(storage, {"w": torch.ones(2)}, step=step)
    folder = find(storage, 2).folder
    storage.put(f"{folder}/COMMIT", b"{}")
    assert find(storage).step == 1
    assert f"{folder.partition('/')[2]} is left out" in caplog.text
