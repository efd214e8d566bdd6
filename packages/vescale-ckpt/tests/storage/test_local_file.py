"""Loops around pwritev and preadv, and descriptors that several threads use."""

import errno
import itertools
import os
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_ckpt._storage.local import LocalStorage
from vescale_ckpt._storage.local_file import IOV_MAX, SLICE_BYTES, transfer_all, write_all
from vescale_ckpt.errors import CorruptionError, StorageError


@given(
    sizes=st.lists(st.integers(1, 50), max_size=30),
    takes=st.lists(st.integers(1, 70), min_size=1, max_size=20),
    offset=st.integers(0, 100),
)
def test_short_writes_are_continued(sizes: list[int], takes: list[int], offset: int) -> None:
    data = os.urandom(sum(sizes))
    file = bytearray(offset + len(data))
    calls = 0

    def pwritev(fd: int, buffers: Sequence[memoryview], at: int) -> int:
        nonlocal calls
        part = b"".join(buffers)[: takes[calls % len(takes)]]
        calls += 1
        file[at : at + len(part)] = part
        return len(part)

    cuts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    buffers = [memoryview(data)[a:b] for a, b in itertools.pairwise(cuts)]
    assert transfer_all(pwritev, 0, offset, buffers) == len(data)
    assert file == bytes(offset) + data


def test_more_buffers_than_a_call_takes_are_read_and_written(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    parts = [i.to_bytes(2, "little") for i in range(2 * IOV_MAX + 3)]
    sink = storage.create("f")
    sink.write(4, parts)
    sink.close()
    assert (tmp_path / "f").read_bytes() == bytes(4) + b"".join(parts)
    back = [bytearray(2) for _ in parts]
    source = storage.open("f")
    source.read_into(4, [memoryview(buffer) for buffer in back])
    source.close()
    assert back == parts


def test_a_write_that_takes_nothing_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = LocalStorage(tmp_path).create("f")
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: 0)
    with pytest.raises(StorageError, match="0 of 5 bytes"):
        sink.write(0, [b"hello"])
    sink.abort()


def test_an_interrupted_call_is_the_systems_business(tmp_path: Path) -> None:
    # A signal in the middle of a write: Python calls again, and what was written already counts.
    import signal

    seen: list[int] = []
    old = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    reader, writer = os.pipe()
    try:
        stop = threading.Event()

        def drain() -> None:
            os.kill(os.getpid(), signal.SIGUSR1)
            while not stop.is_set() and os.read(reader, 1 << 16):
                pass

        thread = threading.Thread(target=drain)
        thread.start()
        moved = transfer_all(lambda fd, buffers, at: os.writev(fd, buffers), writer, 0, [memoryview(bytes(1 << 20))])
        stop.set()
        os.close(writer)
        thread.join()
    finally:
        os.close(reader)
        signal.signal(signal.SIGUSR1, old)
    assert moved == 1 << 20
    assert seen == [signal.SIGUSR1]


def test_a_file_that_shrinks_while_it_is_open_is_told(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    source = LocalStorage(tmp_path).open("f")
    os.truncate(tmp_path / "f", 6)
    buffer = bytearray(4)
    source.read_into(2, [memoryview(buffer)])
    assert buffer == b"2345"
    with pytest.raises(CorruptionError, match="has 6 bytes"):
        source.read_into(4, [memoryview(buffer)])
    source.close()


def test_an_error_of_the_device_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    source = LocalStorage(tmp_path).open("f")

    def preadv(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(StorageError, match="cannot read 'f'") as caught:
        source.read_into(0, [memoryview(bytearray(1))])
    assert caught.value.errno == errno.EIO
    source.close()


def test_a_short_read_of_the_system_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    source = LocalStorage(tmp_path).open("f")
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:3]], at))
    back = [bytearray(4), bytearray(5)]
    source.read_into(1, [memoryview(buffer) for buffer in back])
    source.close()
    assert back == [b"1234", b"56789"]


def test_a_closed_file_takes_nothing(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    sink = storage.create("f")
    sink.close()
    with pytest.raises(ValueError, match="closed"):
        sink.write(0, [b"1"])
    source = storage.open("f")
    source.close()
    source.close()
    with pytest.raises(ValueError, match="closed"):
        source.read_into(0, [memoryview(b"")])


def test_a_negative_offset_is_refused(tmp_path: Path) -> None:
    sink = LocalStorage(tmp_path).create("f")
    with pytest.raises(ValueError, match="offset must not be negative, but is -3"):
        sink.write(-3, [b"1"])
    sink.abort()


@pytest.mark.parametrize("finish", ["close", "abort"])
def test_a_descriptor_lives_until_its_last_write_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finish: str
) -> None:
    # Else its number would be given to the next file, which would get the bytes.
    storage = LocalStorage(tmp_path)
    sink = storage.create("f")
    inside, go_on = threading.Event(), threading.Event()
    pwritev = os.pwritev
    targets: list[str] = []

    def wait_inside(fd: int, buffers: Any, offset: int) -> int:
        inside.set()
        assert go_on.wait(30)
        targets.append(os.readlink(f"/proc/self/fd/{fd}"))
        return pwritev(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", wait_inside)
    writer = threading.Thread(target=sink.write, args=(0, [b"bytes"]))
    writer.start()
    assert inside.wait(30)
    closing = threading.Thread(target=getattr(sink, finish))
    closing.start()
    while True:
        try:
            sink.write(9, [])
        except ValueError:
            break
    other = storage.create("other")
    go_on.set()
    writer.join()
    closing.join()
    other.close()
    assert targets == [str(tmp_path / "f")]
    assert (tmp_path / "other").read_bytes() == b""
    assert (tmp_path / "f").exists() == (finish == "close")


def test_write_all_writes_at_the_offset(tmp_path: Path) -> None:
    with open(tmp_path / "f", "wb") as file:
        write_all(file.fileno(), 3, [memoryview(b"abc"), memoryview(b"de")])
        write_all(file.fileno(), 0, [])
    assert (tmp_path / "f").read_bytes() == b"\0\0\0abcde"


@pytest.mark.parametrize("size", [0, 1, SLICE_BYTES, 2 * SLICE_BYTES + 77])
def test_a_checked_read_returns_the_crc(tmp_path: Path, size: int) -> None:
    data = os.urandom(size + 10)
    (tmp_path / "f").write_bytes(data)
    source = LocalStorage(tmp_path).open("f")
    back = bytearray(size)
    assert source.read_checked(3, memoryview(back)) == zlib.crc32(data[3 : 3 + size])
    assert back == data[3 : 3 + size]
    for offset in (-1, 11):
        with pytest.raises(CorruptionError, match="f"):
            source.read_checked(offset, memoryview(back))
    source.close()


def test_a_checked_read_of_a_file_that_became_shorter(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(3 * SLICE_BYTES))
    source = LocalStorage(tmp_path).open("f")
    os.truncate(tmp_path / "f", SLICE_BYTES + 5)
    with pytest.raises(CorruptionError, match=str(SLICE_BYTES + 5)):
        source.read_checked(0, memoryview(bytearray(3 * SLICE_BYTES)))
    source.close()
