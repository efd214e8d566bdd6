"""Which paths are taken, and where unfinished files are found."""

import posixpath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_ckpt._storage.interface import as_bytes, check_folder_to_remove, check_path, identity_of, leftovers
from vescale_ckpt.errors import FormatError
from vescale_ckpt.testing import FaultyStorage, MemoryStorage


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("", "a name is empty"),
        ("/a", "absolute"),
        ("a/", "a name is empty"),
        ("a//b", "a name is empty"),
        ("./a", "'.' leads elsewhere"),
        ("a/..", "'..' leads elsewhere"),
        ("a\\..\\b", "backslash"),
        ("a\x00", "control"),
        ("a\nb", "control"),
        ("a\x7f", "control"),
        ("a\udc80", "surrogate"),
        ("é" * 128, "more than 255 bytes"),
        ("/".join(["abc"] * 300), "more than 1024 bytes"),
    ],
)
def test_a_bad_path_is_refused_with_the_reason(path: str, reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        check_path(path)


def test_a_path_is_a_str() -> None:
    with pytest.raises(FormatError, match="is a int"):
        check_path(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["a", "a.b/c-d_e", "...", "a/..b", " ", "é" * 127, "steps/00000001-0f0f0f0f/data/w0"])
def test_a_good_path_is_returned(path: str) -> None:
    assert check_path(path) == path


@given(st.lists(st.sampled_from(["a", "..", ".", "", "b", "\\", "\0"]), min_size=1, max_size=6).map("/".join))
def test_what_is_taken_stays_below_the_root(path: str) -> None:
    try:
        check_path(path)
    except FormatError:
        return
    assert posixpath.normpath(posixpath.join("/root", path)) == "/root/" + path


def test_the_root_is_a_folder_but_never_removed() -> None:
    assert check_path("", folder=True) == ""
    with pytest.raises(FormatError, match="never removed"):
        check_folder_to_remove("")


def test_leftovers_are_found_everywhere() -> None:
    storage = MemoryStorage(clock=lambda: 123.0)
    storage.put("a/b/file", b"")
    left = {storage.leave_temporary("", b"1"), storage.leave_temporary("a/b", b"22"), storage.leave_temporary("c")}
    found = dict(leftovers(storage))
    assert set(found) == left
    assert {entry.modified for entry in found.values()} == {123.0}
    assert set(dict(leftovers(storage, "a"))) == {path for path in left if path.startswith("a/")}
    assert [e.name for e in storage.list("a/b")] == ["file"]
    for path in left:
        storage.remove(path)
    assert storage.files() == {"a/b/file": b""}


def test_buffers_become_bytes_without_a_copy() -> None:
    data = bytearray(12)
    (view,) = as_bytes([b"", memoryview(data).cast("i"), memoryview(bytearray())])
    view[3] = 7
    assert data[3] == 7
    assert view.shape == (12,)
    with pytest.raises(TypeError):
        as_bytes([memoryview(data)[::2]])


def test_storages_are_told_apart_by_what_they_hold_and_not_by_their_url():
    one, other = MemoryStorage("mine://run"), MemoryStorage("mine://run")
    assert identity_of(one) != identity_of(other)
    assert identity_of(FaultyStorage(FaultyStorage(one))) == identity_of(one)
    assert MemoryStorage().url != MemoryStorage().url


def test_a_storage_of_a_plugin_is_told_by_its_url():
    class Theirs:
        url = "theirs://bucket"

    assert identity_of(Theirs()) == "theirs://bucket"
