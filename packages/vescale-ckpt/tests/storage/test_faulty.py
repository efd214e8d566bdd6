"""Faults at a named operation, and what a dead process or a loss of power leaves behind."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vescale_ckpt._storage.interface import leftovers
from vescale_ckpt._storage.local import LocalStorage
from vescale_ckpt.errors import StorageError
from vescale_ckpt.testing import Fail, FaultyStorage, Kill, Killed, MemoryStorage, Operation, Slow, Tear, at, matching


def files(folder: Path) -> dict[str, bytes]:
    """Read a folder with plain tools."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def program(storage: Any) -> None:
    """Save a step in the order that survives: data, their names, then the small file that says so."""
    sink = storage.create("s/data/w0")
    sink.write(0, [b"0123", b"4567"])
    sink.write(8, [b"89"])
    sink.close()
    storage.sync("s/data")
    storage.put("s/COMMIT", b"ten bytes!")


def test_operations_are_counted_and_recorded() -> None:
    storage = FaultyStorage(MemoryStorage())
    program(storage)
    source = storage.open("s/data/w0")
    source.read_into(3, [memoryview(bytearray(4))])
    source.close()
    storage.list("s")
    storage.get("s/COMMIT", 99)
    storage.remove("s/COMMIT")
    storage.remove_folder("s")
    sink = storage.create("x")
    sink.abort()
    assert [(o.kind, o.path, o.nbytes) for o in storage.operations] == [
        ("create", "s/data/w0", 0),
        ("write", "s/data/w0", 8),
        ("write", "s/data/w0", 2),
        ("close", "s/data/w0", 0),
        ("sync", "s/data", 0),
        ("put", "s/COMMIT", 10),
        ("open", "s/data/w0", 0),
        ("read", "s/data/w0", 4),
        ("list", "s", 0),
        ("get", "s/COMMIT", 0),
        ("remove", "s/COMMIT", 0),
        ("remove_folder", "s", 0),
        ("create", "x", 0),
        ("abort", "x", 0),
    ]
    assert [o.number for o in storage.operations] == list(range(storage.count))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("number", range(6))
def test_each_operation_can_fail_and_does_nothing_then(number: int, code: int) -> None:
    inner = MemoryStorage()
    storage = FaultyStorage(inner, at({number: Fail(code)}))
    with pytest.raises(StorageError) as caught:
        program(storage)
    assert caught.value.errno == code
    assert ("disk is full" in str(caught.value)) == (code == errno.ENOSPC)
    assert storage.count == number + 1
    assert "s/COMMIT" not in inner.files()
    assert len(inner.files().get("s/data/w0", b"")) == [0, 0, 8, 10, 10, 10][number]
    storage.put("after", b"the process goes on")
    assert inner.files()["after"] == b"the process goes on"


def test_a_write_can_fail_half_way() -> None:
    inner = MemoryStorage()
    with pytest.raises(StorageError, match=r"cannot write 's/data/w0'.* 2 more bytes"):
        program(FaultyStorage(inner, at({1: Fail(errno.ENOSPC, part=0.75)})))
    assert inner.files() == {"s/data/w0": b"012345"}


def test_a_torn_write_reports_success() -> None:
    inner = MemoryStorage()
    program(FaultyStorage(inner, at({1: Tear(0.25)})))
    assert inner.files() == {"s/data/w0": b"01\0\0\0\0\0\x0089", "s/COMMIT": b"ten bytes!"}


@pytest.mark.parametrize("method", ["get", "open", "list", "remove", "remove_folder"])
def test_reading_and_removing_can_fail(method: str) -> None:
    inner = MemoryStorage(files={"a/b": b"1"})
    storage = FaultyStorage(inner, matching(Fail(), kind=method))
    argument = "a" if method in ("list", "remove_folder") else "a/b"
    arguments = (argument, 9) if method == "get" else (argument,)
    with pytest.raises(StorageError, match=f"cannot {method} '{argument}'"):
        getattr(storage, method)(*arguments)
    assert inner.files() == {"a/b": b"1"}
    getattr(storage, method)(*arguments)


def test_a_read_can_fail() -> None:
    source = FaultyStorage(MemoryStorage(files={"a": b"1"}), matching(Fail(), kind="read")).open("a")
    buffer = bytearray(1)
    with pytest.raises(StorageError):
        source.read_into(0, [memoryview(buffer)])
    assert buffer == b"\0"
    source.read_into(0, [memoryview(buffer)])
    assert buffer == b"1"


def test_the_dead_do_nothing() -> None:
    inner = MemoryStorage()
    storage = FaultyStorage(inner, matching(Kill(), kind="sync"))
    with pytest.raises(Killed):
        program(storage)
    assert storage.dead
    left = inner.files()
    sink: Any = storage.operations
    for method in (
        lambda: storage.put("a", b""),
        lambda: storage.create("a"),
        lambda: storage.remove("s/data/w0"),
        lambda: storage.remove_folder("s"),
        lambda: storage.list(""),
        lambda: storage.get("s/data/w0", 99),
        lambda: storage.open("s/data/w0"),
        lambda: storage.sync("s"),
    ):
        with pytest.raises(Killed, match="after the process died"):
            method()
    assert inner.files() == left
    assert len(sink) == 5
    assert not issubclass(Killed, Exception)


def test_files_of_the_dead_are_dead_too() -> None:
    inner = MemoryStorage()
    storage = FaultyStorage(inner, matching(Kill(), kind="put"))
    sink = storage.create("f")
    with pytest.raises(Killed):
        storage.put("a", b"")
    for method in (lambda: sink.write(0, [b"1"]), sink.close, sink.abort):
        with pytest.raises(Killed):
            method()
    assert inner.files() == {"f": b""}


KILLED: list[tuple[int, float, dict[str, bytes]]] = [
    (0, 0.0, {}),
    (0, 1.0, {"s/data/w0": b""}),
    (1, 0.0, {"s/data/w0": b""}),
    (1, 0.5, {"s/data/w0": b"0123"}),
    (1, 1.0, {"s/data/w0": b"01234567"}),
    (3, 0.0, {"s/data/w0": b"0123456789"}),
    (3, 1.0, {"s/data/w0": b"0123456789"}),
    (5, 0.0, {"s/data/w0": b"0123456789"}),
    (5, 1.0, {"s/data/w0": b"0123456789", "s/COMMIT": b"ten bytes!"}),
]


@pytest.mark.parametrize(("number", "part", "left"), KILLED)
@pytest.mark.parametrize("kind", ["memory", "local"])
def test_what_a_kill_leaves(tmp_path: Path, kind: str, number: int, part: float, left: dict[str, bytes]) -> None:
    inner: Any = MemoryStorage() if kind == "memory" else LocalStorage(tmp_path)
    with pytest.raises(Killed):
        program(FaultyStorage(inner, at({number: Kill(part)})))
    assert (inner.files() if kind == "memory" else files(tmp_path)) == left


LOST: list[tuple[int, float, dict[str, bytes]]] = [
    (1, 1.0, {}),
    (3, 0.0, {}),
    (3, 1.0, {}),
    (4, 0.0, {}),
    (4, 1.0, {"s/data/w0": b"0123456789"}),
    (5, 1.0, {"s/data/w0": b"0123456789", "s/COMMIT": b"ten bytes!"}),
]


@pytest.mark.parametrize(("number", "part", "left"), LOST)
@pytest.mark.parametrize("kind", ["memory", "local"])
def test_what_a_loss_of_power_leaves(
    tmp_path: Path, kind: str, number: int, part: float, left: dict[str, bytes]
) -> None:
    inner: Any = MemoryStorage() if kind == "memory" else LocalStorage(tmp_path)
    with pytest.raises(Killed):
        program(FaultyStorage(inner, at({number: Kill(part)}), power_loss=True))
    assert (inner.files() if kind == "memory" else files(tmp_path)) == left


@pytest.mark.parametrize(("number", "part", "left"), KILLED)
def test_an_object_store_loses_only_what_was_not_closed(number: int, part: float, left: dict[str, bytes]) -> None:
    inner = MemoryStorage(random_write=False)
    with pytest.raises(Killed):
        program(FaultyStorage(inner, at({number: Kill(part)}), power_loss=True))
    closed = number > 3 or (number == 3 and part == 1)
    assert inner.files() == (left if closed else {})


def test_what_survives_a_loss_of_power_can_be_chosen() -> None:
    inner = MemoryStorage()
    asked: list[str] = []

    def survives(path: str) -> bool:
        asked.append(path)
        return path in ("open-kept", "kept")

    storage = FaultyStorage(inner, matching(Kill(), kind="put"), power_loss=True, survives=survives)
    for name in ("kept", "lost"):
        sink = storage.create(name)
        sink.write(0, [b"1234"])
        sink.close()
    for name in ("open-kept", "open-lost"):
        storage.create(name).write(0, [b"1234"])
    with pytest.raises(Killed):
        storage.put("a", b"")
    assert inner.files() == {"kept": b"1234", "open-kept": b"1234"}
    assert set(asked) == {"kept", "lost", "open-kept", "open-lost"}


def test_a_file_whose_name_is_durable_but_not_its_bytes_is_cut() -> None:
    inner = MemoryStorage()
    storage = FaultyStorage(inner, matching(Kill(), kind="put"), power_loss=True)
    storage.create("f").write(0, [b"12345678"])
    storage.sync("")
    with pytest.raises(Killed):
        storage.put("a", b"")
    assert inner.files() == {"f": b"1234"}


def test_a_put_that_is_killed_half_way_leaves_an_unfinished_file(tmp_path: Path) -> None:
    for inner in (MemoryStorage(), LocalStorage(tmp_path)):
        with pytest.raises(Killed):
            FaultyStorage(inner, matching(Kill(0.5))).put("a/b", b"12345678")
        assert inner.list("a") == []
        ((path, entry),) = leftovers(inner)
        assert path.startswith("a/.tmp-")
        assert entry.size == 4


def remove_commit(storage: FaultyStorage) -> None:
    storage.remove("s/COMMIT")


def remove_and_sync(storage: FaultyStorage) -> None:
    storage.remove("s/COMMIT")
    storage.sync("s")


def remove_all(storage: FaultyStorage) -> None:
    storage.remove("s/COMMIT")
    storage.remove_folder("s")


def remove_all_and_sync(storage: FaultyStorage) -> None:
    remove_all(storage)
    storage.sync("")


def remove_all_and_sync_it(storage: FaultyStorage) -> None:
    remove_all(storage)
    storage.sync("s")


@pytest.mark.parametrize(
    ("collect", "back"),
    [
        (remove_commit, {"s/COMMIT", "s/data"}),
        (remove_and_sync, {"s/data"}),
        (remove_all, {"s/COMMIT", "s/data"}),
        (remove_all_and_sync, set()),
        (remove_all_and_sync_it, {"s/COMMIT", "s/data"}),
    ],
)
def test_what_was_removed_may_be_back_unless_its_folder_was_synced(
    collect: Callable[[FaultyStorage], None], back: set[str]
) -> None:
    before = {"s/COMMIT": b"1", "s/data": b"2"}
    inner = MemoryStorage(files=before)
    storage = FaultyStorage(inner, matching(Kill(), kind="get"), power_loss=True)
    collect(storage)
    with pytest.raises(Killed):
        storage.get("x", 1)
    assert inner.files() == {path: before[path] for path in back}


def test_a_step_may_come_back_without_its_data() -> None:
    # The worst case: the removal of the data is durable, that of the file that vouches for them is not.
    inner = MemoryStorage(files={"s/COMMIT": b"1", "s/data": b"2"})
    storage = FaultyStorage(
        inner, matching(Kill(), kind="get"), power_loss=True, survives=lambda path: path == "s/data"
    )
    remove_all(storage)
    with pytest.raises(Killed):
        storage.get("x", 1)
    assert inner.files() == {"s/COMMIT": b"1"}


def test_a_new_file_that_was_removed_does_not_come_back() -> None:
    inner = MemoryStorage()
    storage = FaultyStorage(inner, matching(Kill(), kind="get"), power_loss=True)
    storage.create("a").close()
    storage.remove("a")
    storage.create("b").abort()
    sink = storage.create("c")
    sink.write(0, [b"1"])
    storage.remove("c")
    with pytest.raises(Killed):
        storage.get("x", 1)
    assert inner.files() == {}


def test_a_folder_can_be_removed_by_half() -> None:
    inner = MemoryStorage(files={f"s/d/{i}": b"" for i in range(4)} | {"s/a": b""})
    with pytest.raises(Killed):
        FaultyStorage(inner, matching(Kill(0.4))).remove_folder("s")
    assert sorted(inner.files()) == ["s/d/1", "s/d/2", "s/d/3"]
    with pytest.raises(Killed):
        FaultyStorage(inner, matching(Kill(1.0))).remove_folder("s")
    assert inner.files() == {}


def test_other_threads_go_on_while_one_is_slow() -> None:
    inner = MemoryStorage()
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go_on.wait(30)

    storage = FaultyStorage(inner, matching(Slow(wait), name="slow"))
    thread = threading.Thread(target=storage.put, args=("slow", b"1"))
    thread.start()
    assert begun.wait(30)
    storage.put("quick", b"2")
    assert inner.files() == {"quick": b"2"}
    go_on.set()
    thread.join()
    assert inner.files() == {"quick": b"2", "slow": b"1"}


def test_a_slow_operation_that_outlives_the_process_is_not_done() -> None:
    inner = MemoryStorage()
    begun, go_on = threading.Event(), threading.Event()
    ended: list[BaseException] = []

    def wait() -> None:
        begun.set()
        assert go_on.wait(30)

    def plan(operation: Operation) -> Any:
        return Slow(wait) if operation.path == "slow" else Kill() if operation.path == "kill" else None

    storage = FaultyStorage(inner, plan)

    def slow() -> None:
        try:
            storage.put("slow", b"1")
        except Killed as error:
            ended.append(error)

    thread = threading.Thread(target=slow)
    thread.start()
    assert begun.wait(30)
    with pytest.raises(Killed):
        storage.put("kill", b"")
    go_on.set()
    thread.join()
    assert len(ended) == 1
    assert inner.files() == {}


def test_plans_match_by_kind_and_name() -> None:
    fault = Fail(errno.EIO)
    operations = [Operation(i, kind, path, 0) for i, (kind, path) in enumerate([("put", "a/x"), ("get", "b/x")] * 2)]
    assert [matching(fault)(o) for o in operations] == [fault] * 4
    for arguments, hits in [
        ({"kind": "get"}, [1]),
        ({"kind": "get", "times": 2}, [1, 3]),
        ({"name": "x"}, [0]),
        ({"name": "x", "kind": "get", "times": 9}, [1, 3]),
        ({"name": "a/x"}, []),
        ({"times": 3}, [0, 1, 2]),
    ]:
        plan = matching(fault, **arguments)  # type: ignore[arg-type]
        assert [o.number for o in operations if plan(o)] == hits
    plan = at({0: fault, 2: Tear()})
    assert [plan(o) for o in operations] == [fault, None, Tear(0.5), None]
