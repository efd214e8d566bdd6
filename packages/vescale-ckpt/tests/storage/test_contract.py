"""What every storage promises, on each of them: local folders, memory as files and as objects, fsspec."""

import itertools
import threading

import pytest
import torch

import vescale_ckpt as ck
from vescale_ckpt import CorruptionError, FormatError
from vescale_ckpt._storage import open_storage
from vescale_ckpt.testing import MemoryStorage

_numbers = itertools.count()


@pytest.fixture(params=["local", "local without fsync", "memory", "objects", "fsspec"])
def storage(request, tmp_path):
    if request.param.startswith("local"):
        return open_storage(tmp_path / "store", fsync="without" not in request.param)
    if request.param == "fsspec":
        pytest.importorskip("fsspec")
        return open_storage(f"memory://contract-{next(_numbers)}")
    return MemoryStorage(random_write=request.param == "memory")


def content(storage, path):
    source = storage.open(path)
    try:
        data = bytearray(source.size)
        source.read_into(0, [memoryview(data)])
        return bytes(data)
    finally:
        source.close()


def write(storage, path, *parts):
    sink, at = storage.create(path), 0
    for part in parts:
        sink.write(at, [part])
        at += len(part)
    sink.close()


def test_what_is_put_is_got(storage):
    storage.put("a/b/c.json", b"one")
    assert storage.get("a/b/c.json", 10) == b"one"
    storage.put("a/b/c.json", b"another")
    assert storage.get("a/b/c.json", 10) == b"another"


def test_an_exclusive_put_does_not_replace(storage):
    storage.put("a/x", b"one", exclusive=True)
    with pytest.raises(FileExistsError):
        storage.put("a/x", b"two", exclusive=True)
    assert storage.get("a/x", 10) == b"one"


def test_one_of_many_exclusive_puts_wins(storage):
    storage.put("a/first", b"")
    outcome, start = [], threading.Barrier(4)

    def one(number):
        start.wait()
        try:
            storage.put("a/x", bytes([number]), exclusive=True)
            outcome.append(number)
        except FileExistsError:
            outcome.append(None)

    threads = [threading.Thread(target=one, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [number for number in outcome if number is not None]
    assert len(winners) == 1
    assert storage.get("a/x", 10) == bytes(winners)


def test_a_file_is_what_was_written(storage):
    write(storage, "d/f.pack", b"abc", b"", b"defg")
    assert content(storage, "d/f.pack") == b"abcdefg"
    source = storage.open("d/f.pack")
    first, second = bytearray(2), bytearray(3)
    source.read_into(1, [memoryview(first), memoryview(second)])
    assert (bytes(first), bytes(second), source.size) == (b"bc", b"def", 7)
    source.close()


def test_many_buffers_at_once(storage):
    parts = [bytes([i % 256]) * (i % 7 + 1) for i in range(3000)]
    sink = storage.create("many")
    sink.write(0, parts)
    sink.close()
    assert content(storage, "many") == b"".join(parts)


def test_reading_beyond_the_end_is_corruption(storage):
    write(storage, "short", b"12345")
    source = storage.open("short")
    with pytest.raises(CorruptionError, match="short"):
        source.read_into(3, [memoryview(bytearray(3))])
    source.close()


def test_a_file_is_not_created_twice(storage):
    write(storage, "f", b"1")
    with pytest.raises(FileExistsError):
        write(storage, "f", b"2")
    assert content(storage, "f") == b"1"


def test_an_aborted_file_does_not_exist(storage):
    sink = storage.create("d/f")
    sink.write(0, [b"123"])
    sink.abort()
    with pytest.raises(FileNotFoundError):
        storage.open("d/f")
    assert [entry.name for entry in storage.list("d")] == []


def test_what_is_absent(storage):
    with pytest.raises(FileNotFoundError):
        storage.get("no", 10)
    with pytest.raises(FileNotFoundError):
        storage.open("no/such")
    assert list(storage.list("nowhere")) == []
    storage.remove("no")
    storage.remove_folder("nowhere")


def test_a_file_larger_than_the_limit_is_refused(storage):
    storage.put("f", b"x" * 100)
    with pytest.raises(FormatError, match="100"):
        storage.get("f", 99)


def test_listing(storage):
    storage.put("top", b"1")
    storage.put("d/b", b"22")
    storage.put("d/a", b"")
    storage.put("d/e/deep", b"333")
    entries = {entry.name: (entry.is_folder, entry.size) for entry in storage.list("d") if not entry.is_folder}
    assert entries == {"a": (False, 0), "b": (False, 2)}
    assert [entry.name for entry in storage.list("d")] == ["a", "b", "e"]
    assert next(entry for entry in storage.list("d") if entry.name == "e").is_folder


def test_removal(storage):
    for path in ("d/a", "d/e/b", "d2/c"):
        storage.put(path, b"1")
    storage.remove("d/a")
    assert [entry.name for entry in storage.list("d")] == ["e"]
    storage.remove_folder("d")
    assert list(storage.list("d")) == []
    assert storage.get("d2/c", 10) == b"1"


@pytest.mark.parametrize("path", ["../x", "a/../b", "/etc/passwd", "a//b", "a\\b", "a\0b", "", ".", "a/./b"])
def test_paths_stay_inside(storage, path):
    for use in (lambda: storage.put(path, b""), lambda: storage.get(path, 10), lambda: storage.open(path)):
        with pytest.raises((ValueError, FormatError)):
            use()


def test_a_checkpoint_goes_there_and_back(storage):
    state = {"w": torch.randn(300, 500), "b": torch.randn(40).bfloat16(), "step": 3}
    for value in range(3):
        state["step"] = value
        ck.save(storage, state, chunk_bytes=4096)
    loaded = ck.load_dict(storage)
    assert loaded["step"] == 2
    assert torch.equal(loaded["w"], state["w"])
    assert ck.verify(storage, "all").ok
    ck.gc(storage, keep=ck.Keep(last=1))
    assert torch.equal(ck.load_dict(storage)["w"], state["w"])
