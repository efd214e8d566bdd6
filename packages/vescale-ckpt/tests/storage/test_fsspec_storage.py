"""Object stores through fsspec: what the backend sees, what is tried again, and what never is."""

import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

fsspec = pytest.importorskip("fsspec")

from vescale_ckpt._storage import identity_of  # noqa: E402
from vescale_ckpt._storage.fsspec_storage import READ_BLOCK, FsspecStorage, _modified  # noqa: E402
from vescale_ckpt._storage.retry import Retry  # noqa: E402
from vescale_ckpt.errors import CorruptionError, StorageError  # noqa: E402


@pytest.fixture
def waits() -> list[float]:
    """Seconds that were waited between tries."""
    return []


@pytest.fixture
def storage(waits: list[float]) -> Iterator[FsspecStorage]:
    made = FsspecStorage(f"memory://{uuid.uuid4()}/run", retries=Retry(3, sleep=waits.append))
    yield made
    made.fs.store.clear()


def failing(monkeypatch: pytest.MonkeyPatch, target: Any, name: str, *errors: Exception, after: bool = False) -> None:
    """Let the first calls of a method fail: before it does its work, or after, when the answer is lost."""
    original: Callable[..., Any] = getattr(target, name)
    left = list(errors)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not left:
            return original(*args, **kwargs)
        if after:
            original(*args, **kwargs)
        raise left.pop(0)

    call.__wrapped__ = original  # type: ignore[attr-defined]
    monkeypatch.setattr(target, name, call)


def test_the_backend_holds_the_plain_bytes(storage: FsspecStorage) -> None:
    storage.put("steps/1/COMMIT", b"{}")
    sink = storage.create("steps/1/data/w0")
    sink.write(0, [b"ab", b"c"])
    sink.close()
    with fsspec.open(f"{storage.url}/steps/1/data/w0", "rb") as file:
        assert file.read() == b"abc"
    assert storage.fs.cat_file(f"{storage.root}/steps/1/COMMIT") == b"{}"


@pytest.mark.parametrize(
    ("method", "backend"),
    [
        (lambda s: s.get("f", 9), "cat_file"),
        (lambda s: s.get("f", 9), "info"),
        (lambda s: s.list(""), "ls"),
        (lambda s: s.put("g", b"2"), "pipe_file"),
        (lambda s: s.put("g", b"2", exclusive=True), "exists"),
        (lambda s: s.open("f").read_into(0, [memoryview(bytearray(1))]), "cat_file"),
        (lambda s: s.remove("f"), "rm_file"),
        (lambda s: s.remove_folder("d"), "rm"),
        (lambda s: s.create("g").abort(), "open"),
    ],
)
def test_a_transient_error_is_tried_again(
    storage: FsspecStorage, waits: list[float], monkeypatch: pytest.MonkeyPatch, method: Any, backend: str
) -> None:
    storage.put("f", b"1")
    storage.put("d/f", b"1")
    failing(monkeypatch, storage.fs, backend, TimeoutError(), ConnectionResetError())
    method(storage)
    assert len(waits) == 2


def test_tries_end_with_an_error_that_tells_all(
    storage: FsspecStorage, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, storage.fs, "pipe_file", *[ConnectionResetError(104, "reset by peer")] * 9)
    with pytest.raises(StorageError) as caught:
        storage.put("f", b"1")
    text = str(caught.value)
    assert "cannot write 'f' in memory://" in text
    assert "reset by peer" in text
    assert "tried 4 times" in text
    assert caught.value.errno == 104
    assert len(waits) == 3


@pytest.mark.parametrize("error", [PermissionError(13, "AccessDenied"), ValueError("odd request")])
def test_a_final_error_is_raised_at_once(
    storage: FsspecStorage, waits: list[float], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    failing(monkeypatch, storage.fs, "pipe_file", error)
    with pytest.raises(StorageError, match=str(error.args[-1])):
        storage.put("f", b"1")
    assert waits == []


def test_an_exclusive_put_whose_answer_was_lost_has_worked(
    storage: FsspecStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, storage.fs, "pipe_file", TimeoutError(), after=True)
    storage.put("COMMIT", b"mine", exclusive=True)
    assert storage.get("COMMIT", 9) == b"mine"


def test_an_exclusive_put_that_lost_to_another_while_it_was_tried_again_is_told(
    storage: FsspecStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_wins(*args: Any, **kwargs: Any) -> None:
        storage.fs.store[f"{storage.root}/COMMIT"] = fsspec.implementations.memory.MemoryFile(data=b"other")
        raise TimeoutError

    monkeypatch.setattr(storage.fs, "pipe_file", other_wins)
    with pytest.raises(FileExistsError):
        storage.put("COMMIT", b"mine", exclusive=True)
    assert storage.get("COMMIT", 9) == b"other"


def test_exclusive_is_asked_of_the_server_where_the_client_can(
    storage: FsspecStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def pipe_file(path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        seen.append(mode)

    def old_pipe_file(path: str, value: bytes, **kwargs: Any) -> None:
        seen.append(" ".join(kwargs) or "nothing")

    monkeypatch.setattr(storage.fs, "pipe_file", pipe_file)
    storage.put("a", b"", exclusive=True)
    storage.put("a", b"")
    monkeypatch.setattr(storage.fs, "pipe_file", old_pipe_file)
    storage.put("a", b"", exclusive=True)
    assert seen == ["create", "overwrite", "nothing"]


def test_a_large_range_is_read_in_blocks(storage: FsspecStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def cat_file(path: str, start: int, end: int) -> bytes:
        asked.append((start, end))
        return bytes(end - start)

    total = 2 * READ_BLOCK + 5
    monkeypatch.setattr(storage.fs, "info", lambda path: {"size": total + 100, "type": "file"})
    monkeypatch.setattr(storage.fs, "cat_file", cat_file)
    buffers = [bytearray(b"x" * size) for size in (7, READ_BLOCK, READ_BLOCK - 2)]
    storage.open("f").read_into(50, [memoryview(buffer) for buffer in buffers])
    assert asked == [
        (50, 50 + READ_BLOCK),
        (50 + READ_BLOCK, 50 + 2 * READ_BLOCK),
        (50 + 2 * READ_BLOCK, 50 + total),
    ]
    assert not any(any(buffer) for buffer in buffers)


def test_a_range_that_comes_short_is_asked_for_again(
    storage: FsspecStorage, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.put("f", b"0123456789")
    cat_file = storage.fs.cat_file
    answers = [b"", b"234"]
    monkeypatch.setattr(
        storage.fs, "cat_file", lambda *args, **kwargs: answers.pop() if answers else cat_file(*args, **kwargs)
    )
    source = storage.open("f")
    buffer = bytearray(5)
    source.read_into(2, [memoryview(buffer)])
    assert buffer == b"23456"
    assert len(waits) == 2
    storage.put("f", b"012")
    with pytest.raises(CorruptionError, match="too short"):
        source.read_into(2, [memoryview(buffer)])


def test_a_stream_that_failed_is_not_tried_again(
    storage: FsspecStorage, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = storage.create("f")
    failing(monkeypatch, sink._file, "write", ConnectionResetError("cut"))
    with pytest.raises(StorageError, match="cannot write 'f'"):
        sink.write(0, [b"1"])
    assert waits == []
    sink.abort()
    assert storage.list("") == []


def test_a_raw_stream_that_takes_a_part_gets_the_rest(storage: FsspecStorage) -> None:
    class Raw:
        def __init__(self) -> None:
            self.data = b""

        def write(self, view: memoryview) -> int:
            self.data += bytes(view[:3])
            return min(3, view.nbytes)

    sink = storage.create("f")
    sink._file, file = Raw(), sink._file
    sink.write(0, [b"abcdefgh", b"ij"])
    assert sink._file.data == b"abcdefghij"
    file.close()


def test_an_aborted_upload_is_discarded_and_never_finished(storage: FsspecStorage) -> None:
    from fsspec.spec import AbstractBufferedFile

    calls: list[str] = []

    class Upload(AbstractBufferedFile):  # type: ignore[misc]
        def _initiate_upload(self) -> None:
            calls.append("begin")

        def _upload_chunk(self, final: bool = False) -> bool:
            calls.append("finish" if final else "part")
            return True

        def discard(self) -> None:
            calls.append("discard")

    sink = storage.create("f")
    sink._file.close()
    storage.remove("f")
    sink._file = Upload(storage.fs, "f", mode="wb", block_size=4)
    sink.write(0, [b"0123456789"])
    assert calls == ["begin", "part"]
    sink.abort()
    del sink
    assert calls == ["begin", "part", "discard"]


def test_at_most_so_many_requests_run_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = FsspecStorage(f"memory://{uuid.uuid4()}", concurrency=2)
    running, most = 0, 0
    lock = threading.Lock()
    full, go_on = threading.Event(), threading.Event()

    def pipe_file(path: str, data: bytes, **kwargs: Any) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if running == 2:
                full.set()
        assert go_on.wait(30)
        with lock:
            running -= 1

    monkeypatch.setattr(storage.fs, "pipe_file", pipe_file)
    threads = [threading.Thread(target=storage.put, args=(f"f{i}", b"")) for i in range(6)]
    for thread in threads:
        thread.start()
    assert full.wait(30)
    go_on.set()
    for thread in threads:
        thread.join()
    assert most == 2


def test_no_folders_are_made_where_there_are_none(storage: FsspecStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.fs, "makedirs", lambda *args, **kwargs: pytest.fail("would make a bucket"))
    storage.put("a/b", b"1")
    storage.create("a/c").close()


def test_a_local_file_system_gets_its_folders(tmp_path: Path) -> None:
    storage = FsspecStorage(f"local://{tmp_path}/run")
    storage.put("a/b/c", b"1")
    storage.create("a/d/e").close()
    assert (tmp_path / "run/a/b/c").read_bytes() == b"1"
    storage.remove_folder("a")
    assert not (tmp_path / "run/a").exists()


def test_marker_objects_of_folders_are_left_out(storage: FsspecStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    root = storage.root
    found = [
        {"name": f"{root}/a", "type": "file", "size": 0},
        {"name": f"{root}/a/", "type": "directory", "size": 0},
        {"name": f"{root}/a/w", "type": "file", "size": 3, "LastModified": datetime(2024, 1, 2, tzinfo=timezone.utc)},
    ]
    monkeypatch.setattr(storage.fs, "ls", lambda path, detail: found)
    (entry,) = storage.list("a")
    assert (entry.name, entry.size, entry.modified) == ("w", 3, 1704153600.0)


@pytest.mark.parametrize(
    ("about", "seconds"),
    [
        ({"LastModified": datetime(1970, 1, 2, tzinfo=timezone.utc)}, 86400.0),
        ({"last_modified": datetime(1970, 1, 2)}, 86400.0),
        ({"updated": "1970-01-02T00:00:00.500Z"}, 86400.5),
        ({"mtime": 12.5}, 12.5),
        ({"mtime": "yesterday"}, None),
        ({"mtime": None, "created": 7}, 7.0),
        ({}, None),
    ],
)
def test_the_time_is_found_under_the_name_of_each_backend(about: dict[str, Any], seconds: float | None) -> None:
    assert _modified(about) == seconds


def test_listings_are_never_those_of_a_cache(storage: FsspecStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[str] = []
    monkeypatch.setattr(storage.fs, "invalidate_cache", dropped.append)
    storage.list("a")
    with pytest.raises(FileNotFoundError):
        storage.get("b", 1)
    assert dropped == [f"{storage.root}/a", f"{storage.root}/b"]


def test_one_place_is_one_store_however_its_url_is_written() -> None:
    name = uuid.uuid4()
    same = [f"memory://{name}/run", f"memory:///{name}/run", f"memory://{name}/run/"]
    assert len({identity_of(FsspecStorage(url)) for url in same}) == 1
    others = [
        same[0],
        f"memory://{name}/run2",
        f"simplecache::memory://{name}/run",
        f"simplecache::memory://{name}/run2",
    ]
    assert len({identity_of(FsspecStorage(url)) for url in others}) == 4
