"""Local folders: durability, links, errors of the system."""

import errno
import os

import pytest

from vescale_ckpt import StorageError
from vescale_ckpt._storage import open_storage


@pytest.fixture
def calls(monkeypatch):
    """Record what is synced and renamed, in order."""
    seen = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(fd):
        path = os.readlink(f"/proc/self/fd/{fd}")
        seen.append(("sync", "folder" if os.path.isdir(path) else "file", os.path.basename(path)))
        fsync(fd)

    def note_replace(a, b):
        seen.append(("rename", "", os.path.basename(b)))
        replace(a, b)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    return seen


def test_a_put_is_durable_before_it_is_visible(tmp_path, calls):
    open_storage(tmp_path).put("COMMIT", b"x")
    kinds = [(what, kind) for what, kind, _ in calls]
    assert kinds.index(("sync", "file")) < kinds.index(("rename", "")) < len(kinds) - 1
    assert calls[-1] == ("sync", "folder", tmp_path.name)


def test_a_data_file_is_durable_when_it_is_closed(tmp_path, calls):
    sink = open_storage(tmp_path).create("d/f.pack")
    sink.write(0, [b"123"])
    assert ("sync", "file", "f.pack") not in calls
    sink.close()
    assert ("sync", "file", "f.pack") in calls


def test_without_fsync_nothing_is_synced(tmp_path, calls):
    storage = open_storage(tmp_path, fsync=False)
    storage.put("d/a", b"1")
    sink = storage.create("d/f")
    sink.write(0, [b"1"])
    sink.close()
    storage.sync("d")
    assert not [call for call in calls if call[0] == "sync"]


def test_short_writes_are_continued(tmp_path, monkeypatch):
    whole = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, at: whole(fd, [memoryview(buffers[0])[:3]], at))
    sink = open_storage(tmp_path).create("f")
    sink.write(0, [b"abcdefgh", b"ij", b"klmno"])
    sink.close()
    assert (tmp_path / "f").read_bytes() == b"abcdefghijklmno"


def test_short_reads_are_continued(tmp_path, monkeypatch):
    (tmp_path / "f").write_bytes(b"abcdefghij")
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: whole(fd, [memoryview(buffers[0])[:2]], at))
    source, a, b = open_storage(tmp_path).open("f"), bytearray(3), bytearray(6)
    source.read_into(1, [memoryview(a), memoryview(b)])
    assert bytes(a + b) == b"bcdefghij"
    source.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_errors_say_what_happened_where(tmp_path, monkeypatch, code):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwritev", fail)
    sink = open_storage(tmp_path).create("d/w00000-0.pack")
    with pytest.raises(StorageError, match=r"d/w00000-0\.pack") as caught:
        sink.write(0, [b"1234"])
    assert caught.value.errno == code
    sink.abort()
    assert not (tmp_path / "d" / "w00000-0.pack").exists()


def test_a_link_out_of_the_store_is_not_followed(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hidden")
    root = tmp_path / "store"
    root.mkdir()
    (root / "f").symlink_to(secret)
    (root / "d").symlink_to(tmp_path)
    storage = open_storage(root)
    for path in ("f", "d/secret"):
        with pytest.raises((StorageError, ValueError)):
            storage.get(path, 100)


def test_a_file_in_the_place_of_the_store(tmp_path):
    (tmp_path / "f").write_text("x")
    with pytest.raises(StorageError, match="it is a file"):
        open_storage(tmp_path / "f")


def test_a_crashed_put_is_hidden(tmp_path):
    storage = open_storage(tmp_path)
    storage.put("d/a", b"1")
    (tmp_path / "d" / ".tmp-0123456789abcdef").write_bytes(b"half")
    assert [entry.name for entry in storage.list("d")] == ["a"]
    assert len(storage.list("d", temporary=True)) == 2
