"""Timelines of ranks put together: clocks, messages, notes."""

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_pipe import timeline
from vescale_pipe._timeline.rank_file import RankSpans, lines_of, write_lines
from vescale_pipe._timeline.span import ClockReading, Span

Write = Callable[[Path, RankSpans], Path]
MakeRank = Callable[..., RankSpans]
MakeMessage = Callable[..., Span]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


def tags(direction: str, peer: int, key: Any) -> dict[str, Any]:
    return {"direction": direction, "peer": peer, "key": key, "blocked": 0}


RANKS = 3
SECOND = 10**9


@settings(max_examples=50)
@given(st.data())
def test_clocks_with_known_offsets_and_drifts_are_put_right(folder: Path, data: st.DataObject) -> None:
    """Three ranks, their clocks read with errors at the start and at the end of a minute, and messages."""
    end, error = 60 * SECOND, 5_000
    rates = [Fraction(1)] + [1 + Fraction(data.draw(st.integers(-100, 100)), 10**6) for _ in range(RANKS - 1)]
    offsets = [data.draw(st.integers(0, 10**14)) for _ in range(RANKS)]

    def shows(rank: int, time: int) -> int:
        return int(time * rates[rank]) + offsets[rank]

    truth: list[list[Span]] = [[] for _ in range(RANKS)]
    for key in range(data.draw(st.integers(0, 12))):
        src = data.draw(st.integers(0, RANKS - 1))
        dst = (src + data.draw(st.integers(1, RANKS - 1))) % RANKS
        sent = data.draw(st.integers(0, end - SECOND))
        got = sent + data.draw(st.integers(1_000, 1_000_000))
        truth[src].append(Span(sent, got + 500, "message", "out", 0, -1, tags("send", dst, key)))
        truth[dst].append(Span(got - 900, got, "message", "in", 0, -1, tags("recv", src, key)))
    for rank in range(RANKS):
        truth[rank].append(Span(rank, end, "user", "all"))
    paths = []
    for rank in range(RANKS):
        origin = shows(rank, 0)
        seen = [replace(s, start=shows(rank, s.start) - origin, end=shows(rank, s.end) - origin) for s in truth[rank]]
        one = RankSpans(rank, {}, origin, 0, spans=seen, complete=True)
        if rank:
            for time in (0, end):
                now, wrong = shows(rank, time), data.draw(st.integers(-error, error))
                one.readings.append(ClockReading(now - origin, 0, shows(0, time) - now + wrong, error))
        path = folder / f"{rank}"
        with path.open("w") as file:
            write_lines(file, lines_of(one))
        paths.append(path)
    merged = timeline.merge(paths)
    for rank in range(RANKS):
        own = merged.ranks[rank]
        assert own.bound == (error if rank else 0)
        (whole,) = [span for span in own.spans if span.category == "user"]
        # Both the zero of the picture and the rank itself may be wrong by the bound; tightening may double it.
        assert abs(whole.length - (end - rank)) <= 2 * error + 10
        assert abs(own.shift) <= error + 1
    first = next(span for span in merged.ranks[0].spans if span.category == "user")
    for rank in range(1, RANKS):
        (whole,) = [span for span in merged.ranks[rank].spans if span.category == "user"]
        assert abs(whole.end - first.end) <= 2 * error + 10
    sends = sum(span.name == "out" for some in truth for span in some)
    assert len(merged.messages) == sends
    for message in merged.messages:
        assert message.send.start <= message.recv.end
        assert message.send.tags["key"] == message.recv.tags["key"]
    assert min(span.start for own in merged.ranks for span in own.spans) == 0
    assert merged.notes == ()


def test_messages_of_one_key_meet_in_their_order(
    tmp_path: Path, write: Write, rank_of: MakeRank, message: MakeMessage
) -> None:
    # Sends are let go late and out of order; they were asked for in the order 10, 20.
    sends = [message("send", 1, "x", 20, 25), message("send", 1, "x", 10, 90), message("send", 1, "y", 12, 30)]
    receives = [message("recv", 0, "x", 5, 40), message("recv", 0, "x", 6, 50), message("recv", 0, "y", 0, 35)]
    write(tmp_path, rank_of(0, sends))
    write(tmp_path, rank_of(1, receives))
    merged = timeline.merge(tmp_path)
    assert [(m.send.tags["key"], m.send.start, m.recv.end) for m in merged.messages] == [
        ("x", 10, 40),
        ("y", 12, 35),
        ("x", 20, 50),
    ]


def test_messages_of_which_some_are_lost_are_not_guessed(
    tmp_path: Path, write: Write, rank_of: MakeRank, message: MakeMessage
) -> None:
    sends = [message("send", 1, 7, 10, 12, step=0), message("send", 1, 7, 20, 22, step=1)]
    write(tmp_path, rank_of(0, [*sends, message("send", 1, 8, 30, 31), message("send", 1, 8, 40, 41)]))
    write(tmp_path, rank_of(1, [message("recv", 0, 7, 19, 23, step=1), message("recv", 0, 8, 39, 42)]))
    merged = timeline.merge(tmp_path)
    assert [(m.send.step, m.recv.end - m.send.start) for m in merged.messages] == [(1, 3)]
    assert merged.unmatched == 4
    assert merged.notes == ("4 ends of messages have no certain other end, and no arrow.",)


def test_a_message_that_comes_before_it_leaves_moves_its_rank(
    tmp_path: Path, write: Write, rank_of: MakeRank, message: MakeMessage
) -> None:
    write(tmp_path, rank_of(0, [message("send", 1, 7, 5000, 5100)]))
    write(tmp_path, rank_of(1, [message("recv", 0, 7, 0, 100), Span(200, 300, "a", "later")]))
    loose = timeline.merge(tmp_path, tighten=False)
    assert loose.messages[0].recv.end < loose.messages[0].send.start
    merged = timeline.merge(tmp_path)
    assert merged.messages[0].send.start <= merged.messages[0].recv.end
    assert merged.ranks[1].shift >= 4900
    assert re.match(r"rank 1: messages moved its times by \d us, more than the 0 us", merged.notes[0])
    # The whole rank has moved.
    assert [span.length for span in merged.ranks[1].spans] == [100, 100]


def test_notes_tell_what_is_missing(tmp_path: Path, write: Write) -> None:
    write(tmp_path, RankSpans(0, spans=[Span(0, 1, "a", "b")], dropped=5, complete=True))
    write(tmp_path, RankSpans(1, spans=[Span(0, 1, "a", "b")], unfinished=["save"], complete=False))
    notes = " ".join(timeline.merge(tmp_path).notes)
    for text in ("rank 0: 5 spans were dropped", "rank 1: the recording was cut off", "ranks 1: their clocks were not"):
        assert text in notes


def test_two_files_of_a_rank_and_no_file_are_errors(tmp_path: Path, write: Write) -> None:
    path = write(tmp_path, RankSpans(4))
    with pytest.raises(ValueError, match=r"both of rank 4"):
        timeline.merge([path, path])
    with pytest.raises(ValueError, match="no timeline"):
        timeline.merge([])
    assert timeline.merge(path).ranks[0].spans == ()


def test_a_trace_is_written_plain_or_with_gzip(tmp_path: Path, write: Write, rank_of: MakeRank) -> None:
    merged = timeline.merge(write(tmp_path, rank_of(0, [Span(0, 1500, "a", "b", tags={"x": 1})], pp=2)))
    merged.save(tmp_path / "trace.json")
    merged.save(tmp_path / "trace.json.gz")
    text = (tmp_path / "trace.json").read_text()
    assert gzip.decompress((tmp_path / "trace.json.gz").read_bytes()).decode() == text
    (slice_,) = [event for event in json.loads(text)["traceEvents"] if event["ph"] == "X"]
    assert (slice_["ts"], slice_["dur"], slice_["args"]) == (0, 1.5, {"step": 0, "x": 1})
