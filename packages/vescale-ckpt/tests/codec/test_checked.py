"""Codecs of plugins are checked: what they take when they are registered, what they return when they are used."""

from typing import Any

import pytest
import torch

from vescale_ckpt._codec import memory
from vescale_ckpt._codec.registry import Registry
from vescale_ckpt._plugins import PluginError
from vescale_ckpt.errors import CorruptionError


class Toy:
    """Answers what it is told to."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer

    def encode(self, data: torch.Tensor, itemsize: int) -> Any:
        return self.answer

    def decode(self, stored: memoryview, out: torch.Tensor, itemsize: int) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def checked(answer: Any) -> Any:
    registry = Registry()
    registry.register("toy", Toy(answer))
    return registry.codecs["toy"]


DATA = torch.arange(8, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (b"xx", "encode returned a bytes"),
        (memoryview(b"xx"), "encode returned a memoryview"),
        (torch.zeros(2), "encode returned a Tensor"),
        (7, "encode returned a int"),
        ([1, 2], "encode returned a list with a int in it"),
        ([], "encode returned 0 bytes for 8"),
        ([memoryview(b"abcd")[::2]], "not C-contiguous"),
    ],
)
def test_an_encoder_that_returns_no_bytes_is_named(answer: Any, text: str) -> None:
    with pytest.raises(PluginError, match=r"codec 'toy' \(.*test_checked\.Toy\): ") as caught:
        checked(answer).encode(DATA, 1)
    assert text in str(caught.value)
    assert "must return None or a list of memoryviews" in str(caught.value)


def test_what_an_encoder_may_return() -> None:
    assert checked(None).encode(DATA, 1) is None
    parts = checked((b"ab", memoryview(b""), memoryview(b"cdef").cast("i"))).encode(DATA, 1)
    assert b"".join(parts) == b"abcdef"
    assert all(part.format == "B" for part in parts)
    assert len(checked([b"12345678"]).encode(DATA, 1)) == 1
    assert checked([b"12345678", b"9"]).encode(DATA, 1) is None, "a chunk never takes more than its own bytes"


def test_a_decoder_that_raises_tells_of_damage() -> None:
    with pytest.raises(CorruptionError, match=r"codec 'toy' \(.*Toy\) cannot decode 8 bytes to 8: KeyError: 'x'"):
        checked(KeyError("x")).decode(memory(DATA), DATA.clone(), 1)
    with pytest.raises(CorruptionError, match=r"^its own words$"):
        checked(CorruptionError("its own words")).decode(memory(DATA), DATA.clone(), 1)
    with pytest.raises(MemoryError):
        checked(MemoryError()).decode(memory(DATA), DATA.clone(), 1)


def test_a_decoder_that_returns_the_bytes_is_named() -> None:
    with pytest.raises(PluginError, match=r"codec 'toy' .*: decode returned a bytes, but it must fill `out`"):
        checked(b"bytes").decode(memory(DATA), DATA.clone(), 1)


class OneArgument:
    def encode(self, data: torch.Tensor) -> None:
        return None

    def decode(self, stored: memoryview, out: torch.Tensor, itemsize: int) -> None: ...


class Keywords:
    def encode(self, data: torch.Tensor, *, itemsize: int) -> None:
        return None

    decode = OneArgument.decode


@pytest.mark.parametrize(
    ("codec", "text"),
    [
        (Toy, r"encode is called with 2 positional arguments \(data, itemsize\), but takes .*not the class"),
        (OneArgument(), r"encode is called with 2 positional arguments \(data, itemsize\), but takes \(data: "),
        (Keywords(), r"encode is called with 2 positional"),
        (object(), r"lacks encode"),
    ],
)
def test_a_codec_that_cannot_be_called_is_refused(codec: Any, text: str) -> None:
    with pytest.raises(TypeError, match=rf"registered as 'toy': {text}"):
        Registry().register("toy", codec)
