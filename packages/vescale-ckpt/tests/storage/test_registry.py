"""Which storage a path means."""

import pathlib

import pytest

from vescale_ckpt import StorageError
from vescale_ckpt._storage import open_storage
from vescale_ckpt._storage.registry import Registry
from vescale_ckpt.testing import MemoryStorage


def test_paths_and_file_urls_are_folders(tmp_path):
    assert open_storage(str(tmp_path)).url == str(tmp_path)
    assert open_storage(tmp_path).url == str(tmp_path)
    assert open_storage(f"file://{tmp_path}").url == str(tmp_path)


def test_a_storage_is_taken_as_it_is():
    storage = MemoryStorage()
    assert open_storage(storage) is storage


@pytest.mark.parametrize(
    ("where", "error"),
    [("", ValueError), ("nosuchscheme://x", (ValueError, StorageError)), (3, TypeError), ("file://host/x", ValueError),
     (pathlib.Path("s3://bucket/x"), ValueError)],
)  # fmt: skip
def test_what_is_no_place(where, error):
    with pytest.raises(error):
        open_storage(where)


def test_a_scheme_has_one_owner():
    registry = Registry()
    registry.register("mine", MemoryStorage)
    with pytest.raises(ValueError, match="registered twice"):
        registry.register("mine", dict)
    with pytest.raises(ValueError, match="nothing is registered for other"):
        registry.open("other://x", fsync=True, retries=1)


@pytest.mark.parametrize("scheme", ["", "file", "Upper", "a b", "://"])
def test_bad_schemes(scheme):
    with pytest.raises(ValueError, match="scheme"):
        Registry().register(scheme, MemoryStorage)
