"""The storage in memory: the two kinds, its limits, and what tests do with it."""

import errno

import pytest

from vescale_ckpt.errors import CorruptionError, StorageError
from vescale_ckpt.testing import MemoryStorage


def test_a_folder_shows_a_file_while_it_is_written_and_an_object_store_does_not() -> None:
    for random_write in (True, False):
        storage = MemoryStorage(random_write=random_write)
        sink = storage.create("a/f")
        sink.write(0, [b"abc"])
        assert storage.files() == ({"a/f": b"abc"} if random_write else {})
        assert [e.name for e in storage.list("")] == (["a"] if random_write else [])
        sink.close()
        assert storage.files() == {"a/f": b"abc"}
        with pytest.raises(ValueError, match="closed"):
            sink.write(3, [b"d"])


def test_bits_flip_and_files_are_cut() -> None:
    storage = MemoryStorage(files={"f": b"\x00\x0f"})
    storage.flip("f", 0)
    storage.flip("f", 15)
    assert storage.files() == {"f": b"\x01\x8f"}
    storage.flip("f", 15)
    source = storage.open("f")
    storage.truncate("f", 1)
    assert storage.files() == {"f": b"\x01"}
    with pytest.raises(CorruptionError, match="has 1 bytes"):
        source.read_into(0, [memoryview(bytearray(2))])
    with pytest.raises(IndexError):
        storage.flip("f", 8)
    with pytest.raises(FileNotFoundError):
        storage.truncate("g", 1)


@pytest.mark.parametrize("random_write", [True, False])
def test_a_full_store_takes_no_more(random_write: bool) -> None:
    storage = MemoryStorage(random_write=random_write, capacity=10)
    storage.put("a", b"1234")
    storage.put("a", b"123456")
    assert storage.free_bytes() == 4
    for fill in (lambda: storage.put("b", b"12345"), lambda: storage.create("c").write(0, [b"12345"])):
        with pytest.raises(StorageError, match="5 more bytes were to be written there") as caught:
            fill()
        assert caught.value.errno == errno.ENOSPC
    assert storage.files()["a"] == b"123456"
    storage.remove("a")
    assert storage.free_bytes() == 10


def test_objects_that_together_are_too_many_fail_when_they_are_closed() -> None:
    storage = MemoryStorage(random_write=False, capacity=5)
    sinks = [storage.create(name) for name in "ab"]
    for sink in sinks:
        sink.write(0, [b"123"])
    sinks[0].close()
    with pytest.raises(StorageError, match="disk is full"):
        sinks[1].close()
    assert storage.files() == {"a": b"123"}


def test_times_are_those_of_the_clock() -> None:
    now = 5.0
    storage = MemoryStorage(clock=lambda: now)
    storage.put("f/a", b"")
    now = 7.0
    storage.put("f/b", b"")
    assert [e.modified for e in storage.list("f")] == [5.0, 7.0]
    assert [e.modified for e in storage.list("")] == [7.0]


def test_a_file_that_vanished_while_it_was_written_is_told() -> None:
    storage = MemoryStorage()
    sink = storage.create("s/f")
    storage.remove_folder("s")
    with pytest.raises(StorageError, match="removed while"):
        sink.close()


def test_files_and_folders_do_not_mix() -> None:
    storage = MemoryStorage(files={"a/b": b"1"})
    for method in (
        lambda: storage.put("a", b""),
        lambda: storage.put("a/b/c", b""),
        lambda: storage.create("a/b/c"),
        lambda: storage.remove("a"),
        lambda: storage.list("a/b"),
        lambda: storage.remove_folder("a/b"),
    ):
        with pytest.raises(StorageError):
            method()
    assert storage.files() == {"a/b": b"1"}


def test_a_copy_is_another_store() -> None:
    first = MemoryStorage(files={"a": b"1"})
    second = MemoryStorage(files=first.files())
    second.flip("a", 0)
    assert first.files() == {"a": b"1"}
