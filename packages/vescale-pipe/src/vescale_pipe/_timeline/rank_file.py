"""The file of one rank: JSON, one object a line, so that it can grow while the rank runs and survive its death."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import IO, Any

from .span import ClockReading, Span

__all__ = ["RankSpans", "lines_of", "read_file", "spans_line", "write_lines"]

FORMAT = "vescale_pipe timeline"
VERSION = 1
AT_ONCE = 1000


@dataclass(slots=True)
class RankSpans:
    """All that is known of one rank."""

    rank: int
    """Its number in the world."""
    coordinates: dict[str, int] = field(default_factory=dict)
    """Where it is on each axis of the mesh."""
    origin: int = 0
    """`time.perf_counter_ns` from which its times count."""
    wall: int = 0
    """`time.time_ns` then."""
    host: str = ""
    """Name of its machine."""
    process: int = 0
    """Number of its process."""
    spans: list[Span] = field(default_factory=list)
    """In no order; times since `origin`."""
    tracks: dict[int, str] = field(default_factory=dict)
    """Names of threads and streams."""
    readings: list[ClockReading] = field(default_factory=list)
    """Of the clock of another rank; times since `origin`, offsets of the two clocks themselves."""
    dropped: int = 0
    """Spans that were lost for want of room."""
    unfinished: list[str] = field(default_factory=list)
    """Names of spans that never ended."""
    complete: bool = False
    """Whether the recording was ended, and not only cut off."""


def header_line(one: RankSpans) -> dict[str, Any]:
    """Return the first line."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "rank": one.rank,
        "coordinates": one.coordinates,
        "origin": one.origin,
        "wall": one.wall,
        "host": one.host,
        "process": one.process,
    }


def spans_line(spans: Iterable[Span]) -> dict[str, Any]:
    """Return a line with spans."""
    return {"spans": [[s.start, s.end, s.category, s.name, s.step, s.track, s.tags] for s in spans]}


def reading_line(reading: ClockReading) -> dict[str, Any]:
    """Return a line with a reading of a clock."""
    return {"clock": [reading.time, reading.parent, reading.offset, reading.bound]}


def end_line(one: RankSpans) -> dict[str, Any]:
    """Return the last line."""
    tracks = {str(number): name for number, name in one.tracks.items()}
    return {"end": {"dropped": one.dropped, "unfinished": one.unfinished}, "tracks": tracks}


def lines_of(one: RankSpans) -> Iterator[dict[str, Any]]:
    """Return all lines of a rank."""
    yield header_line(one)
    for reading in one.readings:
        yield reading_line(reading)
    for first in range(0, len(one.spans), AT_ONCE):
        yield spans_line(one.spans[first : first + AT_ONCE])
    if one.complete:
        yield end_line(one)


def write_lines(file: IO[str], lines: Iterable[Mapping[str, Any]]) -> None:
    """Write lines; what JSON does not know in tags is written as text."""
    for line in lines:
        file.write(json.dumps(line, separators=(",", ":"), default=str) + "\n")
    file.flush()


def read_file(path: str | PathLike[str]) -> RankSpans:
    """Read the file of a rank.

    A last line that was cut off is left out; `complete` is then False.

    Raises:
        ValueError: it is no such file, or of a later version.
    """
    with Path(path).open(encoding="utf-8") as file:
        lines = file.read().split("\n")
    try:
        head = json.loads(lines[0])
    except ValueError:
        head = None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise ValueError(f"{path}: this is not the timeline of a rank; give files that a recording wrote.")
    if head["version"] > VERSION:
        raise ValueError(f"{path}: version {head['version']} of the format; this release reads up to {VERSION}.")
    one = RankSpans(head["rank"], head["coordinates"], head["origin"], head["wall"], head["host"], head["process"])
    for number, text in enumerate(lines[1:], 2):
        if not text:
            continue
        try:
            line = json.loads(text)
        except ValueError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: it is not JSON ({error}); the file is damaged.") from error
        _take(one, line)
    return one


def _take(one: RankSpans, line: dict[str, Any]) -> None:
    if "spans" in line:
        one.spans += [Span(*row) for row in line["spans"]]
    if "clock" in line:
        one.readings.append(ClockReading(*line["clock"]))
    if "tracks" in line:
        one.tracks = {int(number): name for number, name in line["tracks"].items()}
    if "end" in line:
        one.dropped, one.unfinished = line["end"]["dropped"], line["end"]["unfinished"]
        one.complete = True
