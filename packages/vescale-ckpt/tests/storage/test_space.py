"""Free bytes of local file systems: never less than can be written."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from vescale_ckpt._storage import space
from vescale_ckpt._storage.local import LocalStorage

MOUNTS = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:5 / /data rw,nosuid - zfs pool/data rw
31 30 0:6 / /data/scratch rw - xfs /dev/sdb rw
32 22 0:7 / /my\040disk rw - btrfs /dev/sdc rw,compress=zstd
33 22 0:8 / /over rw - xfs /dev/sdd rw
34 22 0:9 / /over rw shared:7 master:1 - btrfs /dev/sde rw
a line that is none
"""


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTS)
    monkeypatch.setattr(space, "MOUNTS", str(tmp_path / "mountinfo"))


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/", "ext4"),
        ("/dat", "ext4"),
        ("/database", "ext4"),
        ("/data", "zfs"),
        ("/data/run/7", "zfs"),
        ("/data/scratch/x", "xfs"),
        ("/data/scratches", "zfs"),
        ("/my disk/run", "btrfs"),
        ("/over/run", "btrfs"),
    ],
)
@pytest.mark.usefixtures("mounts")
def test_the_file_system_is_that_of_the_longest_mount_point(folder: str, kind: str) -> None:
    assert space.file_system(folder) == kind


def test_where_the_system_does_not_tell_it_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "MOUNTS", "/nowhere/at/all")
    assert space.file_system("/tmp") is None


@pytest.mark.parametrize(
    ("kind", "blocks", "user", "free"),
    [
        ("ext4", 100, 1000, 4096 * 20),
        ("ext4", 100, 0, 4096 * 25),  # root may use what is kept for it
        ("zfs", 100, 1000, None),
        ("btrfs", 100, 1000, None),
        ("fuse.x", 0, 1000, None),
        (None, 100, 1000, 4096 * 20),
    ],
)
def test_free_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str | None, blocks: int, user: int, free: int | None
) -> None:
    asked = []

    def statvfs(path: str) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(f_blocks=blocks, f_bavail=20, f_bfree=25, f_frsize=4096, f_bsize=1 << 20)

    monkeypatch.setattr(space, "file_system", lambda folder: kind)
    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert LocalStorage(tmp_path / "not" / "there").free_bytes() == free
    assert asked in ([], [str(tmp_path)])
