"""Strict, bounded JSON: everything that the format does not allow is a FormatError, whatever the bytes are."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_ckpt._format import jsonio
from vescale_ckpt.errors import FormatError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


def encodable(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


@given(VALUES.filter(encodable))
def test_what_is_written_is_read_and_is_plain_json(value: object) -> None:
    data = jsonio.dumps(value, "x")
    assert jsonio.loads(data, "x", 1 << 20) == value
    assert json.loads(data) == value


REFUSED = {
    "empty": (b"", "not valid JSON"),
    "text": (b"hello", "not valid JSON"),
    "two values": (b"{} {}", "not valid JSON"),
    "not utf-8": (b'"\xff"', "not valid JSON"),
    "half a pair": (b'"\\ud800"', "surrogates"),
    "half a pair as key": (b'{"\\uDfff":1}', "surrogates"),
    "NaN": (b"[NaN]", "NaN is not JSON"),
    "infinity": (b"[-Infinity]", "-Infinity is not JSON"),
    "large float": (b"[1e999]", "too large"),
    "long number": (b"[" + b"9" * 5000 + b"]", "more than 4000 digits"),
    "long fraction": (b"[0." + b"9" * 5000 + b"]", "more than 4000 digits"),
    "key twice": (b'{"a":1,"b":{"c":1,"c":2}}', "'c' stands twice"),
    "escaped key twice": (b'{"a":1,"\\u0061":2}', "'a' stands twice"),
    "deep": (b"[" * 201 + b"]" * 201, "deeper than 200"),
    "deep objects": (b'{"a":' * 201 + b"1" + b"}" * 201, "deeper than 200"),
    "very deep": (b"[" * 1_000_000 + b"]" * 1_000_000, "deeper than 200"),
    "never closed": (b"[" * 1_000_000, "brackets that do not match"),
    "wrong way round": (b"]" * 10 + b"[" * 10, "brackets that do not match"),
    "string never closed": (b'["abc]', "not valid JSON|brackets"),
    "control character": (b'["a\nb"]', "not valid JSON"),
    "comma at the end": (b"[1,]", "not valid JSON"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_json_is_refused(name: str) -> None:
    data, message = REFUSED[name]
    with pytest.raises(FormatError, match=message):
        jsonio.loads(data, "the file", 1 << 24)


def test_bounds_are_those_of_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    assert jsonio.loads(b"[" * 200 + b"]" * 200, "x", 1000)
    with pytest.raises(FormatError, match="x: 5 bytes; at most 4"):
        jsonio.loads(b"[1,2]", "x", 4)
    monkeypatch.setattr(jsonio, "VALUES", 10)
    assert jsonio.loads(b"[1,2,3,4]", "x", 1000) == [1, 2, 3, 4]
    with pytest.raises(FormatError, match="values; at most 10"):
        jsonio.loads(b"[" + b"1," * 20 + b"1]", "x", 1000)
    assert jsonio.loads(b'["' + b"[," * 20 + b'\\"]"]', "x", 1000) == ["[," * 20 + '"]']


@pytest.mark.parametrize("value", [{1, 2}, b"x", float("nan"), float("inf"), "\ud800", {(1, 2): 3}])
def test_what_is_not_json_is_not_written(value: object) -> None:
    with pytest.raises(FormatError, match="x: cannot be written as JSON"):
        jsonio.dumps(value, "x")


def test_too_deep_is_not_written() -> None:
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(FormatError, match="x: "):
        jsonio.dumps(value, "x")
    while value:  # taken apart from outside: a deep list must not be freed by recursion
        value = value[0]  # type: ignore[assignment]


@given(st.binary(max_size=200))
def test_any_bytes_are_read_as_the_standard_reader_does_or_refused(data: bytes) -> None:
    try:
        value = jsonio.loads(data, "x", 1000)
    except FormatError:
        return
    assert json.loads(data) == value


def test_many_long_numbers_take_no_longer_than_their_bytes() -> None:
    row = b"1" * 4000
    data = b"[" + b",".join([row] * 500) + b"]"  # hours, were a long number looked for from each of its digits
    assert jsonio.loads(data, "x", 1 << 24) == [int(row)] * 500
