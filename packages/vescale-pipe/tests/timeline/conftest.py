"""Timelines whose truth is known."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vescale_pipe import timeline
from vescale_pipe._timeline.rank_file import RankSpans, lines_of, write_lines
from vescale_pipe._timeline.span import ClockReading, Span

Write = Callable[[Path, RankSpans], Path]


@pytest.fixture(autouse=True)
def _nothing_runs() -> Iterator[None]:
    """Stop what a test left running."""
    yield
    if timeline.current() is not None:
        timeline.stop(sync=False)


@pytest.fixture
def write() -> Write:
    """Write the file of a rank into a folder."""

    def write_one(folder: Path, one: RankSpans) -> Path:
        path = folder / f"timeline.{one.rank}.jsonl"
        with path.open("w") as file:
            write_lines(file, lines_of(one))
        return path

    return write_one


@pytest.fixture
def rank_of() -> Callable[..., RankSpans]:
    """Make what a rank recorded: its clock was read without error, and shows what the common one does."""

    def make(rank: int, spans: list[Span], **coordinates: int) -> RankSpans:
        one = RankSpans(rank, coordinates, spans=spans, complete=True)
        if rank:
            one.readings = [ClockReading(0, 0, 0, 1)]
        return one

    return make


@pytest.fixture
def message() -> Callable[..., Span]:
    """Make an end of a message."""

    def make(direction: str, peer: int, key: Any, start: int, end: int, blocked: int = 0, step: int = 0) -> Span:
        tags = {"direction": direction, "peer": peer, "key": key, "blocked": blocked}
        return Span(start, end, "message", f"message {key}", step, -1, tags)

    return make
