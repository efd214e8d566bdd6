"""Chunks that steps share by content: no collection takes one that a save refers to, whoever waits or dies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import vescale_ckpt as ck
from vescale_ckpt._ops import chunks, references
from vescale_ckpt._save import base, begin, lease
from vescale_ckpt.testing import FaultyStorage, Kill, Killed, MemoryStorage, Operation, Slow, at


def state(step: int, frozen: int) -> dict[str, Any]:
    return {"frozen": torch.arange(frozen, frozen + 3000, dtype=torch.int32), "hot": torch.full((2000,), float(step))}


def save(storage: Any, step: int, frozen: int, **options: Any) -> ck.SaveInfo:
    return ck.save(storage, state(step, frozen), step=step, threads=1, **{"dedup": "content", **options})


def sound(storage: Any, step: int, frozen: int) -> bool:
    loaded, wanted = ck.load_dict(storage, step=step), state(step, frozen)
    return bool(ck.verify(storage, "all")) and all(torch.equal(loaded[key], wanted[key]) for key in wanted)


def collect(storage: Any, **options: Any) -> ck._ops.GcReport:
    references._known.clear()  # so that every collection does the same operations
    return ck.gc(storage, keep=ck.Keep(last=1), **{"grace": 0.0, "clock": lambda: 1000.0, **options})


def marks(storage: MemoryStorage) -> list[str]:
    return [path for path in storage.files() if path.startswith("gc-")]


def shared(storage: MemoryStorage) -> int:
    return len([path for path in storage.files() if path.startswith("chunks/")])


@pytest.fixture
def store() -> MemoryStorage:
    """A collection that keeps one step takes the first one, and the chunk that a save with 7 wants to share."""
    storage = MemoryStorage(clock=lambda: 1000.0)
    save(storage, 1, 7)
    save(storage, 2, 0)
    return storage


def copy(store: MemoryStorage) -> MemoryStorage:
    base.forget()
    return MemoryStorage(files=store.files(), clock=lambda: 1000.0)


def operations(store: MemoryStorage, action: Callable[[FaultyStorage], object]) -> list[Operation]:
    faulty = FaultyStorage(copy(store))
    action(faulty)
    return faulty.operations


def hook(inner: MemoryStorage, number: int, action: Callable[[], object]) -> FaultyStorage:
    """A storage that lets somebody else act just before an operation."""
    return FaultyStorage(inner, at({number: Slow(action)}))


def test_what_no_step_needs_goes_and_no_mark_stays(store: MemoryStorage) -> None:
    assert shared(store) == 4
    report = collect(store)
    assert (shared(store), marks(store), report.steps) == (2, [], [1])
    assert save(store, 3, 7).bytes_reused == 0
    assert save(store, 4, 7).bytes_reused == 12000


def test_the_mark_is_there_before_the_look_and_until_the_last_chunk_is_gone(store: MemoryStorage) -> None:
    done = [(o.kind, o.path) for o in operations(store, collect)]
    put = next(n for n, (kind, path) in enumerate(done) if kind == "put" and path.startswith("gc-chunks-"))
    taken = next(n for n, (kind, path) in enumerate(done) if kind == "remove" and path.startswith("gc-chunks-"))
    removed = [n for n, (kind, path) in enumerate(done) if kind == "remove" and path.startswith("chunks/")]
    looked = [n for n, (kind, path) in enumerate(done) if kind == "list" and path == "steps" and n < removed[0]]
    assert len(removed) == 2
    assert put < looked[-2] < looked[-1] < removed[0] <= removed[-1] < taken
    assert done[put][1] == done[taken][1]


@pytest.mark.parametrize("dedup", ["content", "position"])
def test_a_whole_save_in_between_keeps_its_chunks(store: MemoryStorage, dedup: str) -> None:
    for operation in operations(store, collect):
        inner = copy(store)
        collect(hook(inner, operation.number, lambda inner=inner: save(inner, 3, 7, dedup=dedup)))  # type: ignore[misc]
        assert sound(inner, 3, 7), operation
        collect(inner)
        assert sound(inner, 3, 7), operation
        assert marks(inner) == []


@pytest.mark.parametrize("dedup", ["content", "position"])
def test_a_whole_collection_in_between_takes_no_chunk_of_a_save(store: MemoryStorage, dedup: str) -> None:
    for operation in operations(store, lambda faulty: save(faulty, 3, 7, dedup=dedup)):
        inner = copy(store)
        save(hook(inner, operation.number, lambda inner=inner: collect(inner)), 3, 7, dedup=dedup)  # type: ignore[misc]
        assert sound(inner, 3, 7), operation


def test_a_save_and_a_collection_that_stop_at_any_two_operations(store: MemoryStorage) -> None:
    """The collection stops, the save begins and stops, the collection ends, the save ends."""
    done = operations(store, collect)
    first = next(o.number for o in done if o.path == "chunks")
    of_save = operations(store, lambda faulty: save(faulty, 3, 7))
    packed = 0
    for i in range(first - 2, len(done)):
        for j in range(i % 3, len(of_save), 3):
            inner, stopped, go_on = copy(store), threading.Event(), threading.Event()
            failed: list[BaseException] = []

            def stop(stopped: threading.Event = stopped, go_on: threading.Event = go_on) -> None:
                stopped.set()
                go_on.wait(30)

            def run(
                inner: MemoryStorage = inner,
                j: int = j,
                stop: Callable[[], None] = stop,
                stopped: threading.Event = stopped,
                failed: list[BaseException] = failed,
            ) -> None:
                try:
                    save(hook(inner, j, stop), 3, 7)
                except BaseException as error:
                    failed.append(error)
                stopped.set()

            saver = threading.Thread(target=run)

            def begin_save(saver: threading.Thread = saver, stopped: threading.Event = stopped) -> None:
                saver.start()
                stopped.wait(30)

            collect(hook(inner, i, begin_save))
            go_on.set()
            saver.join(30)
            assert failed == [], (i, j)
            assert sound(inner, 3, 7), (i, j)
            packed += any(path.endswith(".pack") for path in inner.files())
    assert packed > 10, "some saves saw the mark"


# ---- a collection that dies


def test_a_mark_that_stays_costs_sharing_and_nothing_else(store: MemoryStorage) -> None:
    died = 0
    for operation in operations(store, collect):
        inner = copy(store)
        with pytest.raises(Killed):
            collect(FaultyStorage(inner, at({operation.number: Kill()})))
        left = marks(inner)
        died += any(path.startswith("gc-chunks-") for path in left)
        save(inner, 3, 0)
        assert sound(inner, 3, 0), operation
        if any(path.startswith("gc-chunks-") for path in left):
            assert any(path.endswith(".pack") for path in inner.files())
        collect(inner)
        assert marks(inner) == []
        assert sound(inner, 3, 0), operation
        assert save(inner, 4, 0).bytes_reused in (0, 12000)
        assert save(inner, 5, 0).bytes_reused == 12000, "saves share again"
    assert died > 5


def test_the_mark_of_a_collection_that_runs_is_left_alone(store: MemoryStorage) -> None:
    mark = f"{chunks.CHUNKS_GO}1000-0123"
    store.put(mark, b"")
    assert collect(store, grace=60.0).files > 0
    assert marks(store) == [mark]
    store.clock = lambda: 1060.0
    collect(store, grace=60.0, clock=lambda: 1060.0)
    assert marks(store) == []


@pytest.mark.parametrize(
    ("name", "later", "stays"), [("1000-0123", 59.0, True), ("1000-0123", 60.0, False), ("x", 0.0, False)]
)
def test_where_the_storage_keeps_no_time_a_mark_says_when_it_was_put(name: str, later: float, stays: bool) -> None:
    class Timeless(MemoryStorage):
        def list(self, folder: str, *, temporary: bool = False) -> Any:
            entries = super().list(folder, temporary=temporary)
            return [type(entry)(entry.name, entry.is_folder, entry.size, None) for entry in entries]

    store = Timeless()
    save(store, 1, 0)
    store.put(f"{chunks.CHUNKS_GO}{name}", b"")
    collect(store, grace=60.0, clock=lambda: 1000.0 + later)
    assert bool(marks(store)) == stays


def test_a_collection_whose_mark_was_taken_removes_no_more(store: MemoryStorage) -> None:
    """Another one took it for dead; from then on saves share again."""
    done = operations(store, collect)
    removals = [o.number for o in done if o.kind == "remove" and o.path.startswith("chunks/")]
    inner = copy(store)

    def take() -> None:
        for path in marks(inner):
            inner.remove(path)

    collect(hook(inner, removals[0], take))
    assert shared(inner) == 3, "one of two: the second lies in another folder"


def test_a_dry_run_leaves_no_mark_and_counts_the_same(store: MemoryStorage) -> None:
    before = store.files()
    told = collect(store, dry_run=True)
    assert store.files() == before
    done = collect(store)
    assert (told.files, told.bytes, told.steps) == (done.files, done.bytes, done.steps)


# ---- a save that sleeps for longer than its lease


@pytest.mark.parametrize("dedup", ["content", "position", None])
def test_a_save_that_was_taken_for_dead_is_whole_or_nothing(
    store: MemoryStorage, dedup: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sleeps at each of its operations in turn; meanwhile its lease runs out, and a collection comes by."""
    now = [1000.0]
    clocks = SimpleNamespace(time=lambda: now[0], monotonic=lambda: now[0])
    monkeypatch.setattr(lease, "time", clocks)
    monkeypatch.setattr(begin, "time", clocks)
    outcomes = set()
    for operation in operations(store, lambda faulty: save(faulty, 3, 0, dedup=dedup)):
        now[0] = 1000.0
        inner = copy(store)
        inner.clock = lambda: now[0]

        def sleep(inner: MemoryStorage = inner) -> None:
            now[0] += 10_000.0
            collect(inner, clock=lambda: now[0])

        faulty = hook(inner, operation.number, sleep)
        try:
            save(faulty, 3, 0, dedup=dedup)
        except ck.CheckpointError:
            outcomes.add("failed")
            assert ck.verify(inner, "all"), operation
            assert ck.Checkpointer(inner).steps() == [2]
            # No reader saw it, unless it slept after the last look at its lease.
            renewed = max(o.number for o in faulty.operations if o.kind == "put" and o.path.endswith("LEASE"))
            committed = any(o.kind == "put" and o.path.endswith("COMMIT") for o in faulty.operations)
            assert not committed or operation.number > renewed
        else:
            outcomes.add("saved")
            assert sound(inner, 3, 0), operation
        collect(inner, clock=lambda: now[0])
        assert ck.verify(inner, "all"), operation
    assert outcomes == {"failed", "saved"}
