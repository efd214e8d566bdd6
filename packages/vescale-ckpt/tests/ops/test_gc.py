"""Garbage collection: what goes, what stays, and that neither crashes nor others can make it remove too much."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import vescale_ckpt as ck
from vescale_ckpt._format import Lease, step_folder
from vescale_ckpt._ops import references
from vescale_ckpt.testing import Fail, FaultyStorage, Kill, Killed, MemoryStorage, Operation, Slow, at

ID = "0123456789abcdef"
DEAD = step_folder(900, ID)


def state(step: int, frozen: int = 0) -> dict[str, Any]:
    """A part that stays the same, so that later steps refer to it, and one that does not."""
    return {
        "frozen": torch.arange(frozen, frozen + 5000, dtype=torch.int32),
        "hot": torch.full((2000,), float(step)),
        "step": step,
    }


def save(storage: Any, step: int, frozen: int = 0, **options: Any) -> str:
    options = {"compress": None, "metadata": {"loss": abs(step - 2)}, **options}
    return ck.save(storage, state(step, frozen), step=step, **options).folder


def loads(storage: Any, step: int, frozen: int = 0) -> bool:
    loaded, wanted = ck.load_dict(storage, step=step), state(step, frozen)
    return all(torch.equal(loaded[key], wanted[key]) for key in ("frozen", "hot")) and loaded["step"] == step


def put_lease(storage: Any, folder: str, expires: float, *bases: str) -> None:
    storage.put(f"{folder}/LEASE", Lease(ID, expires, bases).to_bytes())


@pytest.fixture
def store() -> MemoryStorage:
    """Steps 1, 2 and 3; the second and third refer to the first."""
    storage = MemoryStorage(clock=lambda: 1000.0)
    for step in (1, 2, 3):
        save(storage, step)
    return storage


def collect(storage: Any, last: int | None = 1, **options: Any) -> ck._ops.GcReport:
    references._known.clear()  # so that every collection does the same operations
    keep = None if last is None else ck.Keep(last=last)
    return ck.gc(storage, keep=keep, **{"grace": 0.0, "clock": lambda: 1000.0, **options})


def test_a_number_of_steps_to_keep(store: MemoryStorage) -> None:
    report = ck.gc(store, keep=2, grace=0.0, clock=lambda: 1000.0)
    assert (report.steps, report.kept) == ([1], [2, 3])
    for keep in ("2", 2.0, True, 0):
        with pytest.raises(ValueError, match=r"keep: expected a number of steps|last: .* at least 1"):
            ck.gc(store, keep=keep)  # type: ignore[arg-type]


def test_old_steps_go_but_not_what_later_ones_refer_to(store: MemoryStorage) -> None:
    before = store.files()
    report = collect(store)
    assert (report.steps, report.kept, report.problems) == ([1, 2], [3], [])
    assert loads(store, 3)
    assert ck.verify(store, "all")
    with pytest.raises(ck.MissingStepError):
        ck.load_dict(store, step=1)
    after = store.files()
    packs = [path for path in after if path.endswith(".pack")]
    assert len(packs) == 2, "the pack of step 2 had nothing that step 3 needs"
    assert report.retained_bytes == min(
        len(before[path]) for path in before if path.startswith("steps/00000001-") and "/data/" in path
    )
    gone = before.keys() - after.keys()
    assert report.files == len(gone)
    assert report.bytes == sum(len(before[path]) for path in gone)


def test_what_was_kept_for_a_later_step_goes_with_it(store: MemoryStorage) -> None:
    collect(store)
    save(store, 4, frozen=7)
    collect(store)
    assert loads(store, 4, frozen=7)
    assert {path.split("/")[1][:8] for path in store.files() if path.startswith("steps/")} == {"00000004"}


def test_without_a_rule_no_step_goes(store: MemoryStorage) -> None:
    before = store.files()
    report = collect(store, None)
    assert (report.steps, report.files, report.kept) == ([], 0, [1, 2, 3])
    assert store.files() == before


def test_a_dry_run_tells_what_a_run_does_and_touches_nothing(store: MemoryStorage) -> None:
    put_lease(store, DEAD, 999.0)
    store.put(f"{DEAD}/data/w00000-0.pack", b"x" * 50)
    store.leave_temporary("steps")
    store.put("chunks/ab/" + "ab" * 32, b"y" * 20)
    before = store.files()
    told = collect(store, dry_run=True)
    assert store.files() == before
    done = collect(store)
    told.dry_run = False
    assert told == done
    assert done.unfinished == [DEAD]
    assert done.steps == [1, 2]


def test_best_steps_are_found_in_the_metadata(store: MemoryStorage) -> None:
    report = ck.gc(store, keep=ck.Keep(last=1, best=("loss", "min")), grace=0)
    assert (report.steps, report.kept) == ([1], [2, 3])


def test_a_pinned_step_stays_until_it_is_unpinned(store: MemoryStorage) -> None:
    assert ck.pin(store, 2) == 2
    assert collect(store).kept == [2, 3]
    assert loads(store, 2)
    ck.unpin(store, 2)
    assert collect(store).kept == [3]


def test_an_older_save_of_the_same_step_goes_even_without_a_rule(store: MemoryStorage) -> None:
    ck.save(store, state(99), step=3, overwrite=True, compress=None)
    assert collect(store, None).steps == [3]
    assert ck.load_dict(store, step=3)["step"] == 99
    assert ck.verify(store, "all")


@pytest.mark.parametrize("path", ["manifest.json", "COMMIT", "index/w00000.json"])
def test_a_damaged_step_stays_and_so_does_all_that_it_may_need(path: str) -> None:
    """Nobody but step 2 needs the data of step 1."""
    store = MemoryStorage()
    _, damaged, _ = (save(store, step, frozen) for step, frozen in ((1, 0), (2, 0), (3, 7)))
    whole = store.files()[f"{damaged}/{path}"]
    store.flip(f"{damaged}/{path}", 0)
    keep = ck.Keep(last=1, every=2)
    assert ck.gc(store, keep=keep, grace=0).problems or path.startswith("index")
    assert loads(store, 3, 7)
    store.put(f"{damaged}/{path}", whole)
    assert loads(store, 2)
    assert ck.verify(store, "all")
    assert ck.gc(store, keep=ck.Keep(last=1), grace=0).problems == []
    assert {path[:14] for path in store.files() if path.startswith("steps/")} == {"steps/00000003"}


def test_a_step_that_was_marked_but_stays_loses_the_mark(store: MemoryStorage) -> None:
    """A collection crashed after its mark; this one keeps the step."""
    before = store.files()
    folder = next("/".join(path.split("/")[:2]) for path in before if path.startswith("steps/00000002-"))
    store.put(f"{folder}/REMOVED", b"")
    collect(store, None)
    assert store.files() == before


def test_a_damaged_last_step_does_not_count_as_the_last(store: MemoryStorage) -> None:
    path = next(p for p in store.files() if p.startswith("steps/00000003-") and p.endswith("manifest.json"))
    store.flip(path, 0)
    assert collect(store).steps == [1]
    assert loads(store, 2)


# ---- saves that run, and that never finished


def test_the_folder_and_the_bases_of_a_running_save_stay(store: MemoryStorage) -> None:
    base = next("/".join(path.split("/")[:2]) for path in store.files() if path.startswith("steps/00000002-"))
    put_lease(store, DEAD, 1001.0, base)
    store.put(f"{DEAD}/data/w00000-0.pack", b"x")
    chunk = "chunks/ab/" + "ab" * 32
    store.put(chunk, b"x")
    report = collect(store)
    assert (report.steps, report.kept, report.running) == ([1], [2, 3], [DEAD])
    assert {f"{DEAD}/data/w00000-0.pack", f"{DEAD}/LEASE", chunk} <= store.files().keys()
    store.clock = lambda: 1002.0
    report = collect(store, clock=lambda: 1002.0)
    assert (report.steps, report.unfinished) == ([2], [DEAD])
    assert not any(DEAD in path for path in store.files())
    assert chunk not in store.files()


def test_a_lease_that_cannot_be_read_keeps_everything_while_it_may_be_alive(store: MemoryStorage) -> None:
    store.put(f"{DEAD}/LEASE", b"{")
    assert collect(store, grace=10.0).steps == []
    store.clock = lambda: 2000.0
    report = collect(store, grace=10.0, clock=lambda: 2000.0)
    assert (report.steps, report.unfinished) == ([1, 2], [DEAD])


@pytest.mark.parametrize("ahead", [-50_000.0, 50_000.0])
def test_age_is_told_by_the_clock_of_the_storage(ahead: float) -> None:
    """The clock of this machine is wrong by hours: a save whose files are young is no less alive for that."""
    now = 100_000.0
    store = MemoryStorage(clock=lambda: now)
    save(store, 1)
    store.put(f"{DEAD}/index/w00000.json", b"{}")
    assert collect(store, grace=60.0, clock=lambda: now + ahead).unfinished == []
    now += 61
    assert collect(store, grace=60.0, clock=lambda: now + ahead).unfinished == [DEAD]
    assert not any("probe" in path for path in store.files())


@pytest.mark.parametrize("ahead", [-50_000.0, 50_000.0])
def test_a_lease_lives_if_it_does_by_either_clock(ahead: float) -> None:
    store = MemoryStorage(clock=lambda: 100_000.0)
    save(store, 1)
    expires = 100_000.0 + max(0.0, ahead) - 1
    put_lease(store, DEAD, expires)
    report = collect(store, clock=lambda: 100_000.0 + ahead)
    assert report.running == [DEAD]


def test_leases_can_be_broken(store: MemoryStorage) -> None:
    put_lease(store, DEAD, 1e12)
    temporary = store.leave_temporary(f"{DEAD}")
    assert collect(store, grace=1e9, break_leases=True).unfinished == [DEAD]
    assert temporary not in store.files()


def test_a_storage_without_times_goes_by_the_lease() -> None:
    class Timeless(MemoryStorage):
        def list(self, folder: str, *, temporary: bool = False) -> Any:
            entries = super().list(folder, temporary=temporary)
            return [type(entry)(entry.name, entry.is_folder, entry.size, None) for entry in entries]

    store = Timeless()
    save(store, 1)
    put_lease(store, DEAD, 1000.0)
    other = step_folder(901, ID)
    store.put(f"{other}/index/w00000.json", b"x")  # no lease, and nobody knows how old
    assert collect(store, grace=60.0, clock=lambda: 1059.0).unfinished == []
    assert collect(store, grace=60.0, clock=lambda: 1060.0).unfinished == [DEAD]
    assert collect(store, break_leases=True).unfinished == [other]


def test_files_of_puts_that_never_finished_go_when_they_are_old(store: MemoryStorage) -> None:
    path = store.leave_temporary("steps", b"half")
    assert collect(store, None, grace=5.0).files == 0
    store.clock = lambda: 1006.0
    report = collect(store, None, grace=5.0, clock=lambda: 1006.0)
    assert (report.files, report.bytes) == (1, 4)
    assert path not in store.files()


def test_what_is_not_ours_is_left_alone(store: MemoryStorage) -> None:
    mine = {"notes.txt": b"1", "steps/readme": b"2", "steps/latest/COMMIT": b"3", "other/x": b"4"}
    for path, data in mine.items():
        store.put(path, data)
    collect(store)
    assert mine.items() <= store.files().items()


def test_shared_chunks_go_with_the_last_step_that_needs_them() -> None:
    store = MemoryStorage()
    for step in (1, 2, 3):
        save(store, step, dedup="content")
    chunks = {path for path in store.files() if path.startswith("chunks/")}
    report = collect(store)
    left = {path for path in store.files() if path.startswith("chunks/")}
    assert left < chunks
    assert len(chunks) - len(left) == 2, "the hot chunks of steps 1 and 2"
    assert loads(store, 3)
    assert ck.verify(store)
    assert report.problems == []


def test_wrong_arguments() -> None:
    with pytest.raises(ck.MissingStepError):
        ck.gc(MemoryStorage())
    with pytest.raises(ValueError, match="grace"):
        ck.gc(MemoryStorage(), grace=-1)


# ---- crashes


def littered() -> MemoryStorage:
    """A store with all kinds of garbage."""
    store = MemoryStorage(clock=lambda: 1000.0)
    for step in (1, 2, 3):
        save(store, step, dedup="content" if step == 1 else "position")
    save(store, 4)
    put_lease(store, DEAD, 999.0, step_folder(1, ID))
    store.put(f"{DEAD}/data/w00000-0.pack", b"x" * 50)
    store.put(f"{DEAD}/index/w00000.json", b"{}")
    store.leave_temporary(f"{DEAD}")
    store.leave_temporary("")
    store.put("chunks/ab/" + "ab" * 32, b"y" * 20)
    return store


def copy(store: MemoryStorage) -> MemoryStorage:
    return MemoryStorage(files=store.files(), clock=lambda: 1000.0)


def unfinished(path: str) -> bool:
    """Files of unfinished puts come back in no crash: FaultyStorage cannot make any."""
    return path.rpartition("/")[2].startswith(".tmp-")


def crashes(operations: list[Operation]) -> Iterator[tuple[int, Kill, bool]]:
    for operation in operations:
        yield operation.number, Kill(0.0), False
        yield operation.number, Kill(0.0), True
        if operation.kind in ("put", "remove", "remove_folder"):  # half done, or done but not told
            yield operation.number, Kill(0.5), False
            yield operation.number, Kill(1.0), False
            yield operation.number, Kill(1.0), True


def test_a_crash_anywhere_harms_no_step_and_the_next_collection_finishes_the_work() -> None:
    first = littered()
    whole = FaultyStorage(copy(first))
    collect(whole)
    clean = whole.inner.files()
    assert whole.count > 50
    tried = 0
    for number, kill, power_loss in crashes(whole.operations):
        inner = copy(first)
        with pytest.raises(Killed):
            collect(FaultyStorage(inner, at({number: kill}), power_loss=power_loss, survives=unfinished))
        assert ck.verify(inner, "all"), (number, kill, power_loss)
        assert loads(inner, 4)
        collect(inner)
        assert inner.files() == clean, (number, kill, power_loss)
        tried += 1
    assert tried > 2 * whole.count


def test_an_error_anywhere_harms_no_step() -> None:
    first = littered()
    whole = FaultyStorage(copy(first))
    collect(whole)
    clean = whole.inner.files()
    raised = 0
    for number in range(whole.count):
        inner = copy(first)
        try:
            collect(FaultyStorage(inner, at({number: Fail()})))
        except ck.StorageError:
            raised += 1
        assert ck.verify(inner, "all"), number
        collect(inner)
        assert inner.files() == clean, number
    assert raised > whole.count // 2


# ---- others at work


def interrupted(inner: MemoryStorage, number: int, action: Callable[[], object]) -> FaultyStorage:
    """A storage that lets somebody else act just before an operation."""
    return FaultyStorage(inner, at({number: Slow(action)}))


def test_two_collections_at_once_do_what_one_does() -> None:
    first = littered()
    whole = FaultyStorage(copy(first))
    collect(whole)
    for number in range(whole.count):
        inner = copy(first)
        collect(interrupted(inner, number, lambda inner=inner: collect(inner)))  # type: ignore[misc]
        assert inner.files() == whole.inner.files(), number


@pytest.mark.parametrize("frozen", [0, 7])
def test_a_save_in_between_loses_nothing(store: MemoryStorage, frozen: int) -> None:
    """A whole save, which refers to the last step, happens before each operation in turn."""
    whole = FaultyStorage(copy(store))
    collect(whole)
    for number in range(whole.count):
        inner = copy(store)
        collect(interrupted(inner, number, lambda inner=inner: save(inner, 4, frozen)))  # type: ignore[misc]
        assert ck.verify(inner, "all"), number
        there = [info.step for info in ck._ops.steps(inner).steps]
        assert there in ([4], [3, 4]), number
        assert all(loads(inner, step, frozen if step == 4 else 0) for step in there), number


def test_a_save_that_begins_before_and_ends_after_loses_nothing(store: MemoryStorage) -> None:
    """The saver has written its lease and seen that its base is committed; then comes each operation in turn.

    Its base is step 2, which this collection wants to remove.
    """
    base = next("/".join(path.split("/")[:2]) for path in store.files() if path.startswith("steps/00000002-"))
    oldest = next("/".join(path.split("/")[:2]) for path in store.files() if path.startswith("steps/00000001-"))
    whole = FaultyStorage(copy(store))
    collect(whole)
    spared = lost = 0
    for number in range(whole.count):
        inner = copy(store)
        seen = []

        def begin(inner: MemoryStorage = inner, seen: list[bool] = seen) -> None:
            put_lease(inner, DEAD, 2000.0, base, oldest)
            seen.append(f"{base}/COMMIT" in inner.files())

        collect(interrupted(inner, number, begin))
        if seen == [True]:
            spared += 1
            needed = [path for path in store.files() if "/data/" in path and (base in path or oldest in path)]
            assert inner.files().keys() >= set(needed), number
        else:
            lost += 1  # the saver saw that its base had gone, and refers to nothing
    assert spared > 5
    assert lost > 5


def test_a_pin_in_between_either_holds_or_says_that_it_does_not(store: MemoryStorage) -> None:
    whole = FaultyStorage(copy(store))
    collect(whole)
    outcomes = set()
    for number in range(whole.count):
        inner = copy(store)
        held = []

        def pin(inner: MemoryStorage = inner, held: list[bool] = held) -> None:
            try:
                ck.pin(inner, 2)
                held.append(True)
            except ck.MissingStepError:
                held.append(False)

        collect(interrupted(inner, number, pin))
        outcomes.add(held[0])
        assert loads(inner, 3)
        if held[0]:
            assert loads(inner, 2), number
    assert outcomes == {True, False}


def test_a_commit_in_the_last_moment_is_seen(store: MemoryStorage) -> None:
    """A save that was taken for dead commits before each operation in turn: it stays whole, or it can see the mark."""
    folder = next("/".join(path.split("/")[:2]) for path in store.files() if path.startswith("steps/00000003-"))
    late = {path: data for path, data in store.files().items() if path == f"{folder}/COMMIT"}
    store.remove(f"{folder}/COMMIT")
    put_lease(store, folder, 999.0)
    whole = FaultyStorage(copy(store))
    collect(whole)
    whole_folder = {path for path in store.files() if folder in path}
    outcomes = set()
    for number in range(whole.count):
        inner = copy(store)
        withdrawn = []

        def commit(inner: MemoryStorage = inner, withdrawn: list[bool] = withdrawn) -> None:
            inner.put(f"{folder}/COMMIT", late[f"{folder}/COMMIT"])
            files = inner.files().keys()
            if f"{folder}/REMOVED" in files or not files >= whole_folder - {f"{folder}/LEASE"}:
                inner.remove(f"{folder}/COMMIT")
                withdrawn.append(True)

        collect(interrupted(inner, number, commit))
        assert ck.verify(inner, "all"), number
        outcomes.add(bool(withdrawn))
        if not withdrawn:
            assert loads(inner, 3)
    assert outcomes == {True, False}


def test_a_save_that_renews_its_lease_in_time_is_spared_or_can_see_the_mark(store: MemoryStorage) -> None:
    """Its lease had run out. It renews it before each operation in turn, then looks for the mark."""
    put_lease(store, DEAD, 999.0)
    store.put(f"{DEAD}/data/w00000-0.pack", b"x")
    whole = FaultyStorage(copy(store))
    collect(whole)
    outcomes = set()
    for number in range(whole.count):
        inner = copy(store)
        marked = []

        def renew(inner: MemoryStorage = inner, marked: list[bool] = marked) -> None:
            whole_before = f"{DEAD}/data/w00000-0.pack" in inner.files()
            put_lease(inner, DEAD, 2000.0)
            marked.append(f"{DEAD}/REMOVED" in inner.files() or not whole_before)

        collect(interrupted(inner, number, renew))
        outcomes.add(marked[0])
        if not marked[0]:
            assert f"{DEAD}/data/w00000-0.pack" in inner.files(), number
            assert f"{DEAD}/REMOVED" not in inner.files(), number
    assert outcomes == {True, False}


def test_a_lease_that_is_renewed_after_the_mark_takes_it_away(store: MemoryStorage) -> None:
    put_lease(store, DEAD, 999.0)
    done = FaultyStorage(copy(store))
    collect(done)
    mark = next(o.number for o in done.operations if o.kind == "put" and o.path == f"{DEAD}/REMOVED")
    report = collect(interrupted(store, mark + 1, lambda: put_lease(store, DEAD, 2000.0)))
    assert (report.running, report.unfinished) == ([DEAD], [])
    assert [path for path in store.files() if DEAD in path] == [f"{DEAD}/LEASE"]


def test_a_lease_that_runs_out_meanwhile_still_protects_what_it_names(store: MemoryStorage) -> None:
    """Unless the folder is marked, so that its save cannot be committed any more."""
    old = step_folder(800, ID)
    store.put(f"{old}/REMOVED", b"")
    store.put(f"{old}/data/w00000-0.pack", b"x")
    put_lease(store, DEAD, 1000.5, old)
    whole = FaultyStorage(copy(store))
    collect(whole)
    outcomes = set()
    for number in range(whole.count):
        inner = copy(store)
        now = [1000.0]
        inner.clock = lambda now=now: now[0]  # type: ignore[misc]
        hook = interrupted(inner, number, lambda now=now: now.__setitem__(0, 2000.0))  # type: ignore[misc]
        collect(hook, clock=lambda now=now: now[0])  # type: ignore[misc]
        spared = f"{DEAD}/LEASE" in inner.files()
        outcomes.add(spared)
        assert spared == (f"{old}/data/w00000-0.pack" in inner.files()), number
    assert outcomes == {True, False}


def test_no_step_goes_because_of_one_that_is_marked(store: MemoryStorage) -> None:
    """It may be a save that slept, was taken for dead, and takes its commit back in a moment."""
    folder = next("/".join(path.split("/")[:2]) for path in store.files() if path.startswith("steps/00000003-"))
    store.put(f"{folder}/REMOVED", b"")
    assert collect(store).kept == [2, 3]
    assert collect(store).kept == [3], "the first one took the mark away"


def test_threads_that_collect_and_save_for_real(tmp_path: Any) -> None:
    for step in range(3):
        save(tmp_path, step)
    stop, errors = threading.Event(), []

    def again() -> None:
        while not stop.is_set():
            try:
                ck.gc(tmp_path, keep=ck.Keep(last=2), grace=60.0)
            except ck.CheckpointError as error:
                errors.append(error)

    threads = [threading.Thread(target=again) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for step in range(3, 10):
            save(tmp_path, step)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []
    ck.gc(tmp_path, keep=ck.Keep(last=2), grace=0.0)
    assert ck.verify(tmp_path, "all")
    assert [info.step for info in ck._ops.steps(tmp_path).steps] == [8, 9]
    assert loads(tmp_path, 9)


def test_the_kind_of_operations_is_as_expected(store: MemoryStorage) -> None:
    """COMMIT goes and that is durable before any data goes; the mark goes last."""
    faulty = FaultyStorage(copy(store))
    collect(faulty)
    done: list[Operation] = [o for o in faulty.operations if o.kind in ("put", "remove", "remove_folder", "sync")]
    folder = next("/".join(path.split("/")[:2]) for path in store.files() if path.startswith("steps/00000002-"))
    mine = [(o.kind, o.path.partition(folder)[2]) for o in done if folder in o.path]
    assert mine[:3] == [("put", "/REMOVED"), ("remove", "/COMMIT"), ("sync", "")]
    assert mine[-2:] == [("remove", "/REMOVED"), ("remove_folder", "")]


def test_a_lease_that_outlived_the_commit_of_its_save_goes_when_it_has_run_out(store: MemoryStorage) -> None:
    """The saver was killed between its COMMIT and the end of its lease."""
    folder = next(path.rpartition("/")[0] for path in store.files() if path.endswith("COMMIT") and "00000002" in path)
    before = store.files()
    put_lease(store, folder, 1001.0)
    assert collect(store, None).files == 0, "the saver may be about to remove it"
    put_lease(store, folder, 999.0)
    assert collect(store, None, dry_run=True).files == 1
    assert f"{folder}/LEASE" in store.files()
    assert collect(store, None).files == 1
    assert store.files() == before
    put_lease(store, folder, 1001.0)
    collect(store, None, break_leases=True)
    assert store.files() == before
