"""The timelines of all ranks put together: one clock, and the two ends of each message."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .align import chains
from .causality import Delays, Transfer, shifts
from .rank_file import RankSpans, read_file
from .recording import Timeline
from .span import Span

if TYPE_CHECKING:
    from .._draw import Bar

__all__ = ["Merged", "MergedRank", "Message", "merge"]


@dataclass(frozen=True, slots=True)
class MergedRank:
    """One rank, by the common clock."""

    rank: int
    """Its number."""
    coordinates: dict[str, int]
    """Where it is on each axis of the mesh."""
    spans: tuple[Span, ...]
    """In the order of their starts; times in nanoseconds from the first start on any rank."""
    tracks: dict[int, str]
    """Names of threads and streams."""
    bound: int
    """Nanoseconds by which its times may be wrong, as its clock was read."""
    shift: int
    """Nanoseconds by which messages have moved them."""
    dropped: int
    """Spans that were lost."""
    unfinished: tuple[str, ...]
    """Spans that never ended."""

    @property
    def name(self) -> str:
        """What it is called in pictures and tables, such as "rank 3 (pp=1, dp=1)"."""
        where = ", ".join(f"{axis}={place}" for axis, place in self.coordinates.items())
        return f"rank {self.rank} ({where})" if where else f"rank {self.rank}"


@dataclass(frozen=True, slots=True)
class Message:
    """A message with both its ends."""

    src: int
    """Rank that sent it."""
    dst: int
    """Rank that got it."""
    send: Span
    """On the rank that sent it."""
    recv: Span
    """On the rank that got it."""

    @property
    def exposed(self) -> int:
        """Nanoseconds from when it was sent and its receiver did nothing but wait, until it was there."""
        blocked: int = self.recv.tags.get("blocked", 0)
        return self.recv.end - max(self.send.start, self.recv.end - blocked)


@dataclass(frozen=True, slots=True)
class Merged:
    """All ranks."""

    ranks: tuple[MergedRank, ...]
    """By number."""
    messages: tuple[Message, ...]
    """Those with both ends."""
    unmatched: int
    """Ends of messages without a certain other end."""
    notes: tuple[str, ...] = field(default=())
    """What a reader should know: spans that were lost, clocks that were not read, and so on."""

    def to_chrome(self) -> dict[str, Any]:
        """Return a trace as Chrome and Perfetto read it: a process per rank, an arrow per message."""
        from .chrome import to_chrome

        return to_chrome(self)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the trace of `to_chrome`; with gzip if the path ends with .gz."""
        text = json.dumps(self.to_chrome(), separators=(",", ":"), default=str)
        target = Path(path)
        if target.suffix == ".gz":
            target.write_bytes(gzip.compress(text.encode()))
        else:
            target.write_text(text, encoding="utf-8")

    def steps(self) -> tuple[int, ...]:
        """Return the numbers of all steps, in order."""
        return tuple(sorted({span.step for rank in self.ranks for span in rank.spans}))

    def bars(self, step: int | None = None) -> list[Bar]:
        """Return the actions of one step to draw with `render`; see `vescale_pipe.timeline.bars`."""
        from .bars import bars

        return bars(self, step)


def merge(what: Iterable[str | PathLike[str] | Timeline] | str | PathLike[str], *, tighten: bool = True) -> Merged:
    """Put the timelines of several ranks together.

    Args:
        what: files that ranks have written, folders of them, or timelines.
        tighten: move the times of ranks, within what is known of their clocks, so that no message is there before
            it left.

    Raises:
        ValueError: a file is no timeline; two are of one rank; there is none; messages contradict each other.
        OSError: a file cannot be read.

    Example:
        >>> from vescale_pipe import timeline
        >>> with timeline.record() as recorded, timeline.span("data", "load"):
        ...     pass
        >>> [event["name"] for event in merge([recorded]).to_chrome()["traceEvents"] if event["ph"] == "X"]
        ['load']
    """
    files: dict[int, RankSpans] = {}
    names: dict[int, str] = {}
    for name, one in _read(what):
        if one.rank in files:
            raise ValueError(
                f"{name} and {names[one.rank]} are both of rank {one.rank}; merge the files of one run, each once."
            )
        files[one.rank], names[one.rank] = one, name
    if not files:
        raise ValueError("no timeline of any rank was given.")
    ranks = sorted(files)
    to_common = chains(files)
    spans: dict[int, list[Span]] = {}
    bounds: dict[int, int] = {}
    for rank in ranks:
        chain = to_common[rank]
        own = files[rank].spans
        spans[rank] = [replace(span, start=chain(span.start), end=chain(span.end)) for span in own]
        ends = (min((span.start for span in own), default=0), max((span.end for span in own), default=0))
        bounds[rank] = max(chain.bound(time) for time in ends)
    pairs, unmatched = _match(spans)
    constant = dict.fromkeys(ranks, 0)
    later = {rank: Delays() for rank in ranks}
    if tighten:
        order = sorted(ranks, key=lambda rank: (bool(files[rank].readings), rank))
        transfers = [Transfer(src, spans[src][a].start, dst, spans[dst][b].end) for (src, a), (dst, b) in pairs]
        constant, later = shifts(order, transfers, bounds)
    zero = min((span.start + constant[rank] for rank in ranks for span in spans[rank]), default=0)
    final: dict[int, list[Span]] = {}
    for rank in ranks:
        more, put_off = constant[rank], later[rank]
        final[rank] = [
            replace(span, start=put_off(span.start) + more - zero, end=put_off(span.end) + more - zero)
            for span in spans[rank]
        ]
    messages = [Message(src, dst, final[src][a], final[dst][b]) for (src, a), (dst, b) in pairs]
    merged = tuple(
        MergedRank(
            rank,
            files[rank].coordinates,
            tuple(sorted(final[rank], key=lambda span: (span.start, -span.end))),
            files[rank].tracks,
            bounds[rank],
            constant[rank] + later[rank].largest,
            files[rank].dropped,
            tuple(files[rank].unfinished),
        )
        for rank in ranks
    )
    unread = [rank for rank in ranks if not to_common[rank].known]
    return Merged(merged, tuple(messages), unmatched, tuple(_notes(merged, files, unread, unmatched)))


def _read(
    what: Iterable[str | PathLike[str] | Timeline] | str | PathLike[str],
) -> Iterable[tuple[str, RankSpans]]:
    some = [what] if isinstance(what, str | PathLike) else what
    for one in some:
        if isinstance(one, Timeline):
            yield f"timeline of rank {one.rank}", one.data()
        elif Path(one).is_dir():
            for path in sorted(Path(one).glob("*.jsonl")):
                yield str(path), read_file(path)
        else:
            yield str(one), read_file(one)


End = tuple[int, int]
"""Rank, and place in its list of spans."""


def _match(spans: dict[int, list[Span]]) -> tuple[list[tuple[End, End]], int]:
    """Return the pairs of send and receive, and how many ends have no certain other end.

    Ends meet by ranks, key and step, and of one step and key the first is for the first. Where their numbers differ,
    some were lost, and any pairing of the rest would be a guess.
    """
    sends: dict[tuple[Any, ...], list[End]] = {}
    receives: dict[tuple[Any, ...], list[End]] = {}
    for rank, some in spans.items():
        for place, span in enumerate(some):
            if span.is_message:
                peer, key = span.tags["peer"], json.dumps(span.tags["key"], default=str)
                if span.tags["direction"] == "send":
                    sends.setdefault((rank, peer, key, span.step), []).append((rank, place))
                else:
                    receives.setdefault((peer, rank, key, span.step), []).append((rank, place))
    pairs: list[tuple[End, End]] = []
    unmatched = 0
    for meeting in sends.keys() | receives.keys():
        out, into = sends.get(meeting, []), receives.get(meeting, [])
        if len(out) != len(into):
            unmatched += len(out) + len(into)
            continue
        # A message is recorded when it is over; what counts is when it was asked for.
        out.sort(key=lambda end: spans[end[0]][end[1]].start)
        into.sort(key=lambda end: spans[end[0]][end[1]].start)
        pairs += zip(out, into, strict=True)
    pairs.sort(key=lambda pair: (spans[pair[0][0]][pair[0][1]].start, pair))
    return pairs, unmatched


def _notes(
    ranks: Sequence[MergedRank], files: dict[int, RankSpans], unread: Sequence[int], unmatched: int
) -> Iterable[str]:
    """Say what a reader should know."""
    for one in ranks:
        if one.dropped:
            yield f"rank {one.rank}: {one.dropped} spans were dropped, the oldest first; record with a larger capacity."
        if one.unfinished:
            some = ", ".join(one.unfinished[:5])
            yield f"rank {one.rank}: {len(one.unfinished)} spans never ended ({some})."
        if not files[one.rank].complete:
            yield f"rank {one.rank}: the recording was cut off; it was killed, or runs still."
        if abs(one.shift) > one.bound + 1:
            yield (
                f"rank {one.rank}: messages moved its times by {abs(one.shift) / 1e3:.0f} us, more than the "
                f"{one.bound / 1e3:.0f} us by which its clock was thought to be wrong."
            )
    if unread:
        some = ", ".join(map(str, unread))
        yield f"ranks {some}: their clocks were not read (mesh= or group= of start); the time of day was used."
    if unmatched:
        yield f"{unmatched} ends of messages have no certain other end, and no arrow."
