"""The bar is for terminals, and leaves nothing behind."""

from __future__ import annotations

import io

import pytest

from vescale_ckpt._cli import progress
from vescale_ckpt._cli.progress import Bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_it_and_is_left_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 1.0, 1.05, 2.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(ticks))
    terminal = Terminal()
    with Bar("verify", terminal) as bar:
        bar(512, 2048)
        bar(1024, 2048)  # too soon after the last drawing
        bar(2048, 2048)
    drawn = [line for line in terminal.getvalue().split("\r") if line.strip()]
    assert len(drawn) == 2
    assert drawn[0] == "verify [#######.......................]  25% 512 B of 2.0 KiB, 512 B/s"
    assert "100% 2.0 KiB of 2.0 KiB, 1.0 KiB/s" in drawn[1]
    last = terminal.getvalue().split("\r")[-2]
    assert last == " " * max(map(len, drawn))


def test_nobody_looks() -> None:
    stream = io.StringIO()
    with Bar("verify", stream) as bar:
        bar(1, 0)
        bar(1, 2)
    assert stream.getvalue() == ""


def test_nothing_to_do_is_no_division_by_zero() -> None:
    terminal = Terminal()
    with Bar("x", terminal) as bar:
        bar(0, 0)
    assert "0% 0 B of 0 B" in terminal.getvalue()
