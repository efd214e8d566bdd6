"""Numbers, sizes and tables for people."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from vescale_ckpt._cli.tables import number, plain, printable, size, table, when


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1 << 20, "1.0 MiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 63, "8192.0 PiB"),
    ],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


def test_times_that_no_calendar_has() -> None:
    assert when(None) == "?"
    assert when(1e30) == "?"
    assert len(when(0.0)) == len("1970-01-01 00:00:00")


def test_columns_are_aligned_and_lines_have_no_blank_ends() -> None:
    text = table(["a", "long"], [["1", "x"], ["200", ""]], right="a")
    assert text.splitlines() == ["  a  long", "  1  x", "200"]


@dataclass
class Thing:
    x: tuple[float, ...]
    y: complex


def test_json_holds_what_it_can() -> None:
    assert plain(Thing((1.0, math.inf, math.nan), 1 + 2j)) == {"x": [1.0, "inf", "nan"], "y": [1.0, 2.0]}
    assert plain({1: {2}, "b": None, "c": True}) == {"1": [2], "b": None, "c": True}


def test_text_from_files_is_harmless() -> None:
    assert printable("a\x1b[31m\r\n\u202eb") == "a\\x1b[31m\\r\\n\\u202eb"
    assert printable("größe") == "größe"
    assert number(-0.5) == "-0.5"
