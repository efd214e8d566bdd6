"""What steps that were removed leave on storage stays small, and steps that are there are referred to as ever."""

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vescale_ckpt as ck
from vescale_ckpt._format import FileRecord
from vescale_ckpt._save import base
from vescale_ckpt._save.begin import Start
from vescale_ckpt.testing import Fail, FaultyStorage, MemoryStorage, matching

SIZE = 5000  # elements of a tensor; 20000 bytes are enough to be referred to


@pytest.fixture(autouse=True)
def nothing_kept():
    base.forget()


def data_bytes(storage):
    return sum(len(data) for path, data in storage.files().items() if "/data/" in path)


def folders(storage):
    return {path.split("/")[1][:8] for path in storage.files() if path.startswith("steps/")}


def save_and_collect(storage, state, step, keep, **options):
    info = ck.save(storage, state, step=step, **options)
    ck.gc(storage, keep=ck.Keep(last=keep), grace=0.0)
    return info


@pytest.mark.parametrize("new_process", [False, True])
def test_parts_that_freeze_one_by_one_do_not_keep_all_the_steps_in_which_they_did(new_process):
    """One tensor of each step is never changed again: it alone keeps the file of that step."""
    storage = MemoryStorage()
    state = {"big": torch.randn(8 * SIZE), "small": [torch.randn(SIZE) for _ in range(20)]}
    whole, most = 28 * 4 * SIZE, 0
    for step in range(20):
        state["big"] = torch.randn(8 * SIZE)
        state["small"] = [old if at < step else torch.randn(SIZE) for at, old in enumerate(state["small"])]
        if new_process:
            base.forget()
        save_and_collect(storage, state, step, 1)
        most = max(most, data_bytes(storage))
    assert most < 3 * whole
    found = ck.load_dict(storage)
    assert torch.equal(found["big"], state["big"])
    assert all(torch.equal(a, b) for a, b in zip(found["small"], state["small"], strict=True))


def test_small_chunks_are_written_again():
    """The state of a generator does not keep the step before."""
    storage = MemoryStorage()
    rng = torch.get_rng_state()
    for step in range(4):
        save_and_collect(storage, {"w": torch.randn(SIZE), "rng": ck.local(rng)}, step, 1)
        assert folders(storage) == {f"{step:08d}"}


@pytest.mark.parametrize(("size", "refers"), [(4095, False), (4096, True)])
def test_how_small(size, refers):
    storage = MemoryStorage()
    for _ in range(2):
        info = ck.save(storage, {"w": torch.ones(size)})
    assert info.bytes_reused == 4 * size * refers


def test_where_chunks_are_small_whole_ones_are_referred_to():
    storage = MemoryStorage()
    for _ in range(2):
        info = ck.save(storage, {"w": torch.ones(5000)}, chunk_bytes=4096)
    assert info.bytes_reused == 4 * 4096  # of 20000


def test_steps_that_are_there_are_referred_to_however_little_of_them():
    """91 % stays as it is and all steps are kept: no step writes any of that again."""
    storage = MemoryStorage()
    frozen = {f"f{at}": torch.randn(SIZE) for at in range(10)}
    for step in range(12):
        info = ck.save(storage, {**frozen, "hot": torch.randn(SIZE)}, step=step)
        assert info.bytes_reused == (40 * SIZE if step else 0)
    assert data_bytes(storage) == 4 * SIZE * (11 + 11)
    # A tenth of each step's file stays as it is from now on, and the files are all there.
    hot = {f"f{at}": torch.randn(SIZE) for at in range(10)}
    for step in range(12, 22):
        hot = {name: old if int(name[1:]) < step - 12 else torch.randn(SIZE) for name, old in hot.items()}
        info = ck.save(storage, hot, step=step)
        assert info.bytes_reused == 4 * SIZE * (step - 12)


def test_what_most_of_is_needed_is_referred_to_though_its_step_is_gone():
    storage = MemoryStorage()
    frozen = {f"f{at}": torch.randn(SIZE) for at in range(10)}
    for step in range(12):
        info = save_and_collect(storage, {**frozen, "hot": torch.randn(SIZE)}, step, 2)
        assert info.bytes_reused == (40 * SIZE if step else 0)


@pytest.mark.parametrize("needed", [0, 24, 25, 26, 100])
def test_a_quarter_is_enough(needed):
    file, other = FileRecord("steps/00000001-0a0b0c0d/data/w00000-0.pack", 100), "steps/00000002-0a0b0c0d"
    there = FileRecord(f"{other}/data/w00000-0.pack", 10**6)

    def chunk(at, record):
        return ("w", "uint8", (0,), (100,), at, at + 1), base.Stored(1, 0, bytes(16), None, record, at, 1)

    chunks = dict([chunk(at, file) for at in range(needed)] + [chunk(1000, there)])
    whole = base.Base(other, dict(chunks))
    kept = whole.without_waste(("steps/00000001-0a0b0c0d",))
    assert len(kept.chunks) == 1 + (needed if needed >= 25 else 0)
    assert kept.folder == other
    assert whole.chunks == chunks, "what is kept in memory for the next save is whole"
    assert whole.without_waste(()).chunks == chunks


def test_a_commit_that_cannot_be_read_counts_as_a_step():
    inner = MemoryStorage()
    frozen, hot = torch.randn(SIZE), torch.randn(9 * SIZE)
    old = ck.save(inner, {"f": frozen, "hot": hot}, step=1)
    ck.save(inner, {"f": frozen, "hot": hot + 1}, step=2)
    for step, fault in ((3, None), (4, Fail(5))):
        plan = matching(fault, kind="get", name="COMMIT", times=99) if fault else lambda _: None
        storage = FaultyStorage(inner, lambda o, plan=plan: plan(o) if o.path.startswith(old.folder) else None)
        assert ck.save(storage, {"f": frozen, "hot": hot + step}, step=step).bytes_reused == 4 * SIZE
        assert [o for o in storage.operations if o.path == f"{old.folder}/COMMIT"]
    inner.remove(f"{old.folder}/COMMIT")
    assert ck.save(inner, {"f": frozen, "hot": hot + 5}, step=5).bytes_reused == 0


def test_the_others_are_told():
    start = Start(
        "ab" * 8, "cd" * 8, 3, "steps/3", 0, 1.5, "steps/2", ("steps/2", "steps/1"), ((0, 1),), False, ("steps/1",)
    )
    assert Start.from_bytes(start.to_bytes()) == start


def test_a_save_that_fails_while_it_is_planned_leaves_no_folder(monkeypatch):
    storage = MemoryStorage()
    monkeypatch.setattr(importlib.import_module("vescale_ckpt._save.save"), "assign", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ck.save(storage, {"w": torch.ones(3)})
    assert list(storage.files()) == ["vckpt.json"]


@settings(max_examples=40, deadline=None)
@given(
    keep=st.integers(1, 3),
    changes=st.lists(st.sets(st.integers(0, 7)), min_size=4, max_size=16),
    compress=st.sampled_from([None, "auto"]),
    file_bytes=st.sampled_from([1 << 20, 4 << 30]),
)
def test_the_store_stays_within_a_few_times_what_is_kept(keep, changes, compress, file_bytes):
    storage, count = MemoryStorage(), 0
    state, saved = {f"t{at}": torch.zeros(SIZE) for at in range(8)}, {}
    for step, changed in enumerate(changes):
        for at in changed:
            count += 1
            state[f"t{at}"] = torch.arange(count, count + SIZE, dtype=torch.float32)
        saved[step] = dict(state)
        save_and_collect(storage, state, step, keep, compress=compress, file_bytes=file_bytes)
        kept = sorted(saved)[-keep:]
        assert data_bytes(storage) <= 4 * (len(kept) + 1) * 8 * 4 * SIZE
        for one in kept:
            found = ck.load_dict(storage, step=one)
            assert all(torch.equal(found[name], tensor) for name, tensor in saved[one].items())
    assert ck.verify(storage, "all").ok
