"""A folder as storage: what is on the disk, in which order it got there, and what does not get in or out."""

import errno
import os
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vescale_ckpt._storage.interface import leftovers
from vescale_ckpt._storage.local import LocalStorage
from vescale_ckpt.errors import StorageError


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Record the calls that decide what survives a loss of power, with the paths they are about."""
    calls: list[str] = []
    root = os.path.realpath(tmp_path)

    def place(what: Any) -> str:
        path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else str(what)
        names = os.path.relpath(path, root).split("/")
        return "/".join("TEMP" if name.startswith(".tmp-") else name for name in names)

    def record(name: str) -> None:
        original: Callable[..., Any] = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            calls.append(" ".join([name, *(place(arg) for arg in args[: 2 if name in ("replace", "link") else 1])]))
            return result

        monkeypatch.setattr(os, name, call)

    for name in ("fsync", "replace", "link", "unlink", "mkdir", "pwritev"):
        record(name)
    return calls


def test_a_put_is_on_the_disk_before_its_name_is(tmp_path: Path, log: list[str]) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("COMMIT", b"1")
    assert log == ["pwritev TEMP", "fsync TEMP", "replace TEMP COMMIT", "fsync ."]
    assert (tmp_path / "COMMIT").read_bytes() == b"1"


def test_an_exclusive_put_takes_the_name_in_one_step(tmp_path: Path, log: list[str]) -> None:
    LocalStorage(tmp_path).put("COMMIT", b"1", exclusive=True)
    assert log == ["pwritev TEMP", "fsync TEMP", "link TEMP COMMIT", "unlink TEMP", "fsync ."]
    assert os.listdir(tmp_path) == ["COMMIT"]


def test_new_folders_are_flushed_from_above_before_they_are_used(tmp_path: Path, log: list[str]) -> None:
    LocalStorage(tmp_path / "run").put("steps/1/LEASE", b"1")
    assert log == [
        "mkdir run",
        "fsync .",
        "mkdir run/steps",
        "fsync run",
        "mkdir run/steps/1",
        "fsync run/steps",
        "pwritev run/steps/1/TEMP",
        "fsync run/steps/1/TEMP",
        "replace run/steps/1/TEMP run/steps/1/LEASE",
        "fsync run/steps/1",
    ]


def test_folders_that_others_made_are_flushed_once(tmp_path: Path, log: list[str]) -> None:
    storage = LocalStorage(tmp_path)
    (tmp_path / "steps" / "1").mkdir(parents=True)
    log.clear()
    storage.sync("steps/1")
    assert log == ["fsync steps/1", "fsync steps", "fsync ."]
    log.clear()
    storage.sync("steps/1")
    assert log == ["fsync steps/1"]
    storage.remove_folder("steps/1")
    (tmp_path / "steps" / "1").mkdir()
    log.clear()
    storage.sync("steps/1")
    assert log == ["fsync steps/1", "fsync steps"]


def test_a_data_file_is_flushed_when_it_is_closed(tmp_path: Path, log: list[str]) -> None:
    sink = LocalStorage(tmp_path).create("data")
    sink.write(0, [b"ab"])
    sink.write(2, [b"c"])
    assert log == ["pwritev data", "pwritev data"]
    sink.close()
    assert log[2:] == ["fsync data"]
    sink.close()
    assert log[3:] == []
    assert (tmp_path / "data").read_bytes() == b"abc"


def test_nothing_is_flushed_without_fsync(tmp_path: Path, log: list[str]) -> None:
    storage = LocalStorage(tmp_path, fsync=False)
    storage.put("a/b", b"1")
    storage.put("a/c", b"1", exclusive=True)
    sink = storage.create("a/d")
    sink.write(0, [b"1"])
    sink.close()
    storage.sync("a")
    assert not [call for call in log if call.startswith("fsync")]
    assert sorted(os.listdir(tmp_path / "a")) == ["b", "c", "d"]


def test_files_have_the_mode_that_the_user_asks_for(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        storage = LocalStorage(tmp_path / "run")
        storage.put("a", b"")
        storage.put("b", b"", exclusive=True)
        storage.create("c").close()
    finally:
        os.umask(old)
    modes = {name: stat.S_IMODE(os.stat(tmp_path / "run" / name).st_mode) for name in ("a", "b", "c", ".")}
    assert modes == {"a": 0o640, "b": 0o640, "c": 0o640, ".": 0o750}


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("call", ["pwritev", "fsync", "replace", "link"])
def test_a_put_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, exclusive: bool
) -> None:
    storage = LocalStorage(tmp_path)
    if not exclusive:
        storage.put("COMMIT", b"old")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, fail)
    if (call, exclusive) in [("replace", True), ("link", False)]:
        storage.put("COMMIT", b"new", exclusive=exclusive)
        return
    with pytest.raises(StorageError, match=r"cannot write 'COMMIT' in .*input/output error") as caught:
        storage.put("COMMIT", b"new", exclusive=exclusive)
    assert caught.value.errno == errno.EIO
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_put_that_is_killed_leaves_a_file_that_can_be_found(tmp_path: Path) -> None:
    script = """
import os, sys
from vescale_ckpt._storage.local import LocalStorage
os.replace = lambda *paths: os._exit(9)
LocalStorage(sys.argv[1]).put("a/COMMIT", b"new")
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 9, done.stderr
    storage = LocalStorage(tmp_path)
    assert storage.list("a") == []
    ((path, entry),) = leftovers(storage)
    assert path.startswith("a/.tmp-")
    assert entry.size == 3
    storage.remove(path)
    assert os.listdir(tmp_path / "a") == []


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_exclusive_puts_work_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def link(*args: Any, **kwargs: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)
    storage = LocalStorage(tmp_path)
    storage.put("COMMIT", b"first", exclusive=True)
    lexists = os.path.lexists
    # The other one comes between the first look and the write.
    monkeypatch.setattr(os.path, "lexists", lambda path: False)
    with pytest.raises(FileExistsError):
        storage.put("COMMIT", b"second", exclusive=True)
    monkeypatch.setattr(os.path, "lexists", lexists)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"COMMIT": b"first"}


def test_a_lost_answer_of_a_network_file_system_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def twice(*args: Any, **kwargs: Any) -> None:
        link(*args, **kwargs)
        link(*args, **kwargs)

    monkeypatch.setattr(os, "link", twice)
    LocalStorage(tmp_path).put("COMMIT", b"mine", exclusive=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"COMMIT": b"mine"}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    storage = LocalStorage(tmp_path)
    monkeypatch.setattr(storage, "free_bytes", lambda: 4096)
    sink = storage.create("data/w.pack")

    def pwritev(*args: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwritev", pwritev)
    with pytest.raises(StorageError) as caught:
        sink.write(0, [b"x" * 7000, b"y" * 3000])
    text = str(caught.value)
    assert "'data/w.pack'" in text
    assert str(tmp_path) in text
    assert "10000 more bytes" in text
    assert "free" not in text.partition("Free some space")[0]  # more is free when the partial file is gone
    assert caught.value.errno == code
    sink.abort()
    assert os.listdir(tmp_path / "data") == []


def test_a_real_limit_on_file_sizes_is_told(tmp_path: Path) -> None:
    sink = LocalStorage(tmp_path).create("f")
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, old[1]))
    try:
        # The kernel writes the first 10,000 bytes and fails at the second call.
        with pytest.raises(StorageError, match="larger than allowed") as caught:
            sink.write(0, [bytes(8000), bytes(8000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert caught.value.errno == errno.EFBIG
    sink.abort()


def test_an_error_of_fsync_is_told_and_the_file_can_be_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = LocalStorage(tmp_path).create("f")
    sink.write(0, [b"1"])

    def fsync(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StorageError, match="cannot flush 'f'"):
        sink.close()
    sink.abort()
    assert os.listdir(tmp_path) == []


def test_a_file_that_vanished_while_it_was_written_is_told(tmp_path: Path) -> None:
    sink = LocalStorage(tmp_path).create("s/f")
    sink.write(0, [b"1"])
    LocalStorage(tmp_path).remove_folder("s")
    with pytest.raises(StorageError, match="somebody removed it"):
        sink.close()


def test_a_folder_that_cannot_be_flushed_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def refuse_folders(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    LocalStorage(tmp_path).put("a/b", b"1")
    assert (tmp_path / "a" / "b").read_bytes() == b"1"


def test_the_root_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StorageError, match=r"is a file"):
            LocalStorage(path)


def test_a_file_in_the_place_of_a_folder_is_told(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("a", b"1")
    for method in (
        lambda: storage.put("a/b", b"1"),
        lambda: storage.put("a/b/c", b"1"),
        lambda: storage.create("a/b"),
        lambda: storage.list("a"),
        lambda: storage.open("a/b"),
        lambda: storage.remove_folder("a"),
    ):
        with pytest.raises(StorageError, match="is a file, not a folder") as caught:
            method()
        assert caught.value.errno == errno.ENOTDIR
    assert (tmp_path / "a").read_bytes() == b"1"


@pytest.mark.parametrize(("code", "text"), [(errno.EACCES, "no permission"), (errno.EROFS, "read-only")])
def test_a_refused_write_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, text: str) -> None:
    storage = LocalStorage(tmp_path)

    def refuse(*args: Any, **kwargs: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", refuse)
    for method in (lambda: storage.put("a", b""), lambda: storage.create("a"), lambda: storage.open("a")):
        with pytest.raises(StorageError, match=text) as caught:
            method()
        assert caught.value.errno == code


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(StorageError, match="no permission"):
            LocalStorage(tmp_path).put("a", b"")
    finally:
        tmp_path.chmod(0o755)


# ---- links


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder beside the store, with a secret."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret").write_bytes(b"secret")
    return folder


def test_links_out_of_the_root_are_followed_by_nothing(tmp_path: Path, outside: Path) -> None:
    store = tmp_path / "store"
    storage = LocalStorage(store)
    storage.put("own", b"1")
    (store / "file").symlink_to(outside / "secret")
    (store / "folder").symlink_to(outside)
    (store / "climb").symlink_to("../outside")
    (store / "absent").symlink_to(outside / "absent")
    assert [entry.name for entry in storage.list("")] == ["own"]
    for method in (
        lambda: storage.get("file", 99),
        lambda: storage.open("folder/secret"),
        lambda: storage.open("climb/secret"),
        lambda: storage.open("absent"),
        lambda: storage.list("folder"),
        lambda: storage.put("folder/new", b""),
        lambda: storage.create("climb/new"),
        lambda: storage.remove("folder/secret"),
        lambda: storage.remove_folder("folder/x"),
        lambda: storage.sync("folder"),
    ):
        with pytest.raises(StorageError, match="symbolic link"):
            method()
    storage.put("file", b"replaces the link")
    storage.remove("climb")
    storage.remove_folder("folder")
    with pytest.raises(FileExistsError):
        storage.create("absent")
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == {"secret": b"secret"}
    assert not (store / "file").is_symlink()


def test_a_root_behind_a_link_and_links_within_are_fine(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    storage = LocalStorage(tmp_path / "link")
    storage.put("steps/1/a", b"1")
    (tmp_path / "real" / "steps" / "best").symlink_to("1")
    assert storage.get("steps/best/a", 1) == b"1"
    assert [(entry.name, entry.is_folder) for entry in storage.list("steps")] == [("1", True), ("best", True)]
    storage.remove_folder("steps/best")
    assert storage.get("steps/1/a", 1) == b"1"


def test_a_removed_folder_leaves_what_its_links_lead_to(tmp_path: Path, outside: Path) -> None:
    storage = LocalStorage(tmp_path / "store")
    storage.put("s/a", b"1")
    (tmp_path / "store" / "s" / "link").symlink_to(outside)
    storage.remove_folder("s")
    assert os.listdir(tmp_path / "store") == []
    assert (outside / "secret").read_bytes() == b"secret"


def test_a_circle_of_links_is_told(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    storage = LocalStorage(tmp_path)
    assert storage.list("") == []
    with pytest.raises(StorageError, match="circle"):
        storage.open("a")


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="a pipe"):
        LocalStorage(tmp_path).open("pipe")


def test_a_root_with_the_name_of_another_as_its_beginning_is_another(tmp_path: Path) -> None:
    (tmp_path / "store-2").mkdir()
    (tmp_path / "store-2" / "f").write_bytes(b"other")
    storage = LocalStorage(tmp_path / "store")
    storage.put("x", b"")
    (tmp_path / "store" / "f").symlink_to("../store-2/f")
    with pytest.raises(StorageError, match="symbolic link"):
        storage.get("f", 9)


def test_free_bytes_are_those_of_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vescale_ckpt._storage.space.MOUNTS", "")  # as if it did not compress
    about = os.statvfs(tmp_path)
    free = LocalStorage(tmp_path / "not" / "there").free_bytes()
    assert free is not None
    assert 0 < free <= about.f_blocks * about.f_frsize
    assert not (tmp_path / "not").exists()


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no folder that takes no folders")
def test_a_folder_that_takes_no_folders_is_an_error() -> None:
    with pytest.raises(StorageError, match="/proc/none"):
        LocalStorage("/proc/none").put("a/b", b"x")


@pytest.mark.parametrize(("call", "exclusive"), [("link", True), ("replace", False), ("open", False), ("open", True)])
def test_a_folder_that_goes_while_a_file_is_put_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, exclusive: bool
) -> None:
    storage = LocalStorage(tmp_path)
    original, left = getattr(os, call), [1]

    def once_too_late(*args: Any, **options: Any) -> Any:
        if left and "a" in os.listdir(tmp_path):
            left.pop()
            shutil.rmtree(tmp_path / "a")
        return original(*args, **options)

    monkeypatch.setattr(os, call, once_too_late)
    storage.put("a/f", b"x", exclusive=exclusive)
    monkeypatch.undo()
    assert not left
    assert (tmp_path / "a" / "f").read_bytes() == b"x"
    assert os.listdir(tmp_path / "a") == ["f"]


def test_a_folder_that_others_keep_removing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **options: Any) -> Any:
        raise FileNotFoundError(errno.ENOENT, "gone")

    monkeypatch.setattr(os, "replace", never)
    with pytest.raises(StorageError, match="others keep removing its folder"):
        LocalStorage(tmp_path).put("a/f", b"x")
