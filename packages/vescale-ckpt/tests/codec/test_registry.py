"""Codecs by name, ours and those of plugins."""

import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pluggy
import pytest
import torch

import vescale_ckpt as ck
from vescale_ckpt import _plugins
from vescale_ckpt._codec import choose, codec, codec_names, registry
from vescale_ckpt._codec.interface import number_width
from vescale_ckpt.errors import FormatError
from vescale_ckpt.testing import MemoryStorage

hookimpl = pluggy.HookimplMarker("vescale_ckpt")


@pytest.fixture
def provide(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Register functions as the only plugin."""
    monkeypatch.setenv(_plugins.OFF, "all")
    _plugins.reset()
    registry.reset()

    def register(function: Callable[..., object]) -> None:
        plugin = ModuleType("toy")
        setattr(plugin, function.__name__, hookimpl(function))
        _plugins.manager().register(plugin, name="toy")

    yield register
    _plugins.reset()
    registry.reset()


class Reverse:
    """Stores bytes backwards."""

    def encode(self, data: torch.Tensor, itemsize: int) -> list[memoryview] | None:
        return [memoryview(bytes(data.flip(0).tolist()))]

    def decode(self, stored: memoryview, out: torch.Tensor, itemsize: int) -> None:
        out.copy_(torch.tensor(list(stored), dtype=torch.uint8).flip(0))


def test_ours_are_there() -> None:
    assert {"planes", "zstd"} <= set(codec_names())
    assert type(codec("zstd")).__name__ == "Zstd"
    assert codec("zstd") is codec("zstd")
    for unknown in ("raw", "auto", "", "lz4", "../zstd"):
        with pytest.raises(FormatError, match=r"not known here \(there are .*planes, zstd"):
            codec(unknown)


def test_plugins_add_theirs_and_are_asked_once(provide: Callable[..., None]) -> None:
    asked = []

    def vescale_register_codecs(registry: Any) -> None:
        asked.append(registry)
        registry.register("reverse", Reverse())

    provide(vescale_register_codecs)
    threads = [threading.Thread(target=codec_names) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codec_names() == ("planes", "reverse", "zstd")
    assert len(asked) == 1
    data = torch.arange(5, dtype=torch.uint8)
    assert choose(data, 1, False, "reverse") == "reverse"
    parts = codec("reverse").encode(data, 1)
    assert parts is not None
    assert bytes(parts[0]) == b"\4\3\2\1\0"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zstd", "taken by vescale_ckpt._codec.zstd.Zstd"),
        ("raw", "not raw or auto"),
        ("auto", "not raw or auto"),
        ("Mine", "a codec is named by"),
        ("../up", "a codec is named by"),
        ("", "a codec is named by"),
        ("a" * 17, "a codec is named by"),
        (7, "name = 7"),
    ],
)
def test_names_that_are_refused(provide: Callable[..., None], name: Any, message: str) -> None:
    def vescale_register_codecs(registry: Any) -> None:
        registry.register(name, Reverse())

    provide(vescale_register_codecs)
    with pytest.raises(ValueError, match=message):
        codec("zstd")


def test_shared_chunks_have_room_for_the_longest_name(provide: Callable[..., None]) -> None:
    def vescale_register_codecs(registry: Any) -> None:
        registry.register("a" * 16, Reverse())

    provide(vescale_register_codecs)
    storage, tensor = MemoryStorage(), torch.arange(3000, dtype=torch.int32)
    ck.save(storage, {"w": tensor}, compress="a" * 16, dedup="content")
    (chunk,) = [data for path, data in storage.files().items() if path.startswith("chunks/")]
    assert chunk == b"a" * 16 + bytes(tensor.view(torch.uint8).tolist())[::-1]
    assert torch.equal(ck.load_dict(storage)["w"], tensor)
    assert ck.verify(storage)


def test_a_codec_that_lacks_something_is_refused() -> None:
    class Half:
        encode = Reverse.encode

    broken: Any = Half()
    with pytest.raises(TypeError, match=r"registered as 'half': lacks decode"):
        registry.Registry().register("half", broken)


def test_big_endian_machines_are_refused(provide: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.byteorder", "big")
    with pytest.raises(FormatError, match=r"this machine is big-endian"):
        codec("zstd")
    monkeypatch.undo()
    registry.reset()
    assert type(codec("zstd")).__name__ == "Zstd"


def test_widths_of_numbers() -> None:
    expected = {torch.complex128: 8, torch.complex64: 4, torch.complex32: 2, torch.float64: 8, torch.bool: 1}
    assert {dtype: number_width(dtype) for dtype in expected} == expected
