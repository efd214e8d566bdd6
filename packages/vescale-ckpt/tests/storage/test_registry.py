"""Which storage a path, a URL or an object means, and what a wrong one is answered."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy
import pytest

from vescale_ckpt import _plugins
from vescale_ckpt._storage import open_storage
from vescale_ckpt._storage.local import LocalStorage
from vescale_ckpt._storage.registry import Registry
from vescale_ckpt.errors import StorageError
from vescale_ckpt.testing import MemoryStorage

hookimpl = pluggy.HookimplMarker("vescale_ckpt")
Provide = Callable[[Callable[..., object]], None]


@pytest.fixture
def provide(monkeypatch: pytest.MonkeyPatch) -> Iterator[Provide]:
    """Register functions as plugins beside this package's own, other plugins off."""
    monkeypatch.setenv(_plugins.OFF, "dtensor,rng,comm,pipe")
    _plugins.reset()

    def register(function: Callable[..., object]) -> None:
        plugin = ModuleType("toy")
        plugin.vescale_register_storage = hookimpl(function)  # type: ignore[attr-defined]
        _plugins.manager().register(plugin, name=f"toy-{len(_plugins.describe())}")

    yield register
    _plugins.reset()


def mine(url: str) -> MemoryStorage:
    return MemoryStorage(url)


def other(url: str) -> MemoryStorage:
    return MemoryStorage(url)


def test_a_path_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for where, path in [
        (tmp_path / "run", "run"),
        (str(tmp_path / "run"), "run"),
        ("run", "run"),
        ("./run/", "run"),
        (".", ""),
        ("a:b", "a:b"),
        ("~/run", "home/run"),
        ((tmp_path / "run 1").as_uri(), "run 1"),
        (f"file://localhost{tmp_path}/a%23b", "a#b"),
        (f"FILE://{tmp_path}/run", "run"),
        (f"file://{tmp_path}/what?", "what?"),
    ]:
        storage = open_storage(where)
        assert isinstance(storage, LocalStorage)
        assert storage.root == str(tmp_path / path)
        assert storage.fsync
    assert not open_storage("run", fsync=False).fsync  # type: ignore[attr-defined]
    assert list(tmp_path.iterdir()) == []


def test_a_storage_is_itself() -> None:
    storage = MemoryStorage()
    assert open_storage(storage) is storage


@pytest.mark.parametrize("where", [None, 3, b"/tmp", object()])
def test_what_is_neither_path_nor_storage_is_refused(where: Any) -> None:
    with pytest.raises(TypeError, match="create, free_bytes, get"):
        open_storage(where)


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("", 'must be the path of a folder or a URL, but is .*"." is the current folder'),
        ("a\0b", "must be the path of a folder"),
        (Path("s3://bucket/run"), "pass the URL as a str"),
        ("file://server/share", "names no other machine"),
        ("file://relative", "names no other machine"),
    ],
)
def test_a_wrong_path_is_told(where: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        open_storage(where)


def test_a_plugin_brings_its_scheme(provide: Provide) -> None:
    provide(lambda registry: registry.register("mine", mine))
    storage = open_storage("mine://bucket/run")
    assert isinstance(storage, MemoryStorage)
    assert storage.url == "mine://bucket/run"
    assert open_storage("MINE://x").url == "MINE://x"


def test_a_factory_gets_the_wishes_that_it_has_arguments_for(provide: Provide) -> None:
    seen: list[tuple[str, int]] = []

    def factory(url: str, *, retries: int) -> MemoryStorage:
        seen.append((url, retries))
        return MemoryStorage(url)

    provide(lambda registry: registry.register("mine", factory))
    open_storage("mine://x", retries=2, fsync=False)
    assert seen == [("mine://x", 2)]


def test_a_scheme_that_is_taken_twice_is_an_error_that_names_both(provide: Provide) -> None:
    provide(lambda registry: registry.register("mine", mine))
    provide(lambda registry: registry.register("mine", other))
    with pytest.raises(ValueError, match=r"'mine' is registered twice.*VESCALE_PLUGINS_OFF") as caught:
        open_storage("mine://x")
    assert "test_registry.mine" in str(caught.value)
    assert "test_registry.other" in str(caught.value)


def test_a_plugin_comes_before_fsspec(provide: Provide) -> None:
    pytest.importorskip("fsspec")
    provide(lambda registry: registry.register("memory", mine))
    assert isinstance(open_storage("memory://x"), MemoryStorage)


def test_fsspec_takes_what_it_knows(provide: Provide) -> None:
    pytest.importorskip("fsspec")
    storage: Any = open_storage("memory://run", retries=7)
    assert type(storage).__name__ == "FsspecStorage"
    assert storage.retry.retries == 7
    with pytest.raises(ValueError, match=r"no storage for 'nobody://x'.*no plugin registered the scheme"):
        open_storage("nobody://x")


def test_a_chain_of_schemes_is_for_fsspec(provide: Provide, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    storage = open_storage("dir::memory://chained")
    storage.put("a", b"1")
    assert storage.get("a", 1) == b"1"


def test_a_client_that_is_not_installed_is_named(provide: Provide, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")

    def url_to_fs(url: str, **options: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", url_to_fs)
    with pytest.raises(ValueError, match="Install s3fs"):
        open_storage("s3://bucket/run")


def test_a_client_that_fails_is_told(provide: Provide, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")

    def url_to_fs(url: str, **options: Any) -> None:
        raise ConnectionRefusedError(111, "no server there")

    monkeypatch.setattr(fsspec.core, "url_to_fs", url_to_fs)
    with pytest.raises(StorageError, match=r"cannot open sftp://host/run.*no server there"):
        open_storage("sftp://host/run")


def test_without_fsspec_the_extra_is_named(provide: Provide, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "fsspec" else find_spec(name))
    provide(lambda registry: registry.register("mine", mine))
    with pytest.raises(ValueError, match=r"only file://, mine://.*vescale-ckpt\[fsspec\]"):
        open_storage("s3://bucket/run")


def test_plugins_are_asked_once(provide: Provide) -> None:
    asked: list[int] = []

    def register(registry: Any) -> None:
        asked.append(1)
        registry.register("mine", mine)

    provide(register)
    open_storage("mine://x")
    open_storage("mine://y")
    assert asked == [1]


def test_what_a_factory_makes_is_checked(provide: Provide) -> None:
    provide(lambda registry: registry.register("mine", lambda url: "no storage"))
    with pytest.raises(TypeError, match=r"the storage that .*made for 'mine://x' must be .*lacks create"):
        open_storage("mine://x")


@pytest.mark.parametrize("scheme", ["", "a b", "a://", "1a", "S3", "file", "a/b", "**"])
def test_a_scheme_is_a_word_in_small_letters(scheme: str) -> None:
    with pytest.raises(ValueError, match="scheme"):
        Registry().register(scheme, mine)


def test_a_factory_is_called() -> None:
    with pytest.raises(ValueError, match="must be callable, but is 7"):
        Registry().register("mine", 7)  # type: ignore[arg-type]
