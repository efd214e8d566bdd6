"""A trace keeps to the rules of the Trace Event Format."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from vescale_pipe._timeline.chrome import to_chrome
from vescale_pipe._timeline.merge import Merged, MergedRank, Message
from vescale_pipe._timeline.span import Span

MakeMessage = Callable[..., Span]


@st.composite
def merged_timelines(draw: st.DrawFn) -> Merged:
    spans: list[list[Span]] = [[] for _ in range(3)]
    pair = st.tuples(st.integers(0, 10_000), st.integers(0, 5000))
    for rank in range(3):
        for start, length in draw(st.lists(pair, max_size=12)):
            spans[rank].append(Span(start, start + length, "user", "it", 0, draw(st.integers(0, 2))))
    messages = []
    for _ in range(draw(st.integers(0, 8))):
        src, dst = draw(st.integers(0, 2)), draw(st.integers(0, 2))
        start, length = draw(pair)
        posted, more = draw(pair)
        send = Span(start, start + length, "message", "m", 0, -1)
        recv = Span(posted, max(posted, start) + more, "message", "m", 0, -1)
        spans[src].append(send)
        spans[dst].append(recv)
        messages.append(Message(src, dst, send, recv))
    ranks = tuple(
        MergedRank(
            rank, {"pp": rank}, tuple(sorted(own, key=lambda span: (span.start, -span.end))), {0: "main"}, 0, 0, 0, ()
        )
        for rank, own in enumerate(spans)
    )
    return Merged(ranks, tuple(messages), 0)


def check(trace: dict[str, Any]) -> None:
    """Check the rules that viewers rely on."""
    events = trace["traceEvents"]
    last: dict[tuple[int, int], float] = {}
    stacks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    flows: dict[int, dict[str, tuple[tuple[int, int], float]]] = {}
    names: dict[tuple[str, int, int], Any] = {}
    for event in events:
        track = event["pid"], event["tid"]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["name"]
        if event["ph"] == "M":
            what = event["name"], event["pid"], event["tid"]
            assert what not in names
            names[what] = event["args"]
            continue
        assert event["ts"] >= last.get(track, 0.0)
        last[track] = event["ts"]
        if event["ph"] == "X":
            start, end = event["ts"], round(event["ts"] + event["dur"], 3)
            assert event["dur"] >= 0
            stack = stacks.setdefault(track, [])
            while stack and stack[-1][1] <= start:
                stack.pop()
            assert not stack or end <= stack[-1][1], "spans of a thread cross"
            stack.append((start, end))
            slices.setdefault(track, []).append((start, end))
        else:
            assert event["ph"] in "sf"
            assert event["ph"] not in flows.setdefault(event["id"], {})
            flows[event["id"]][event["ph"]] = track, event["ts"]
            assert event["ph"] == "s" or event["bp"] == "e"
    for ends in flows.values():
        assert ends.keys() == {"s", "f"}
        for track, time in ends.values():
            assert any(start <= time <= end for start, end in slices[track]), "an arrow sticks to no span"
    for track in slices:
        assert ("thread_name", *track) in names
        assert ("process_name", track[0], 0) in names
    json.dumps(trace, allow_nan=False)


@given(merged_timelines())
def test_any_timeline_makes_a_valid_trace(merged: Merged) -> None:
    trace = to_chrome(merged)
    check(trace)
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == sum(len(one.spans) for one in merged.ranks)
    arrows = [event for event in trace["traceEvents"] if event["ph"] == "s"]
    assert len(arrows) == len(merged.messages)
    ends = {event["id"]: event for event in trace["traceEvents"] if event["ph"] == "f"}
    for number, message in enumerate(merged.messages):
        (begin,) = [event for event in arrows if event["id"] == number]
        assert (begin["pid"], ends[number]["pid"]) == (message.src, message.dst)
        assert begin["ts"] == message.send.start / 1000


def test_processes_have_the_places_of_ranks_on_the_mesh() -> None:
    rank = MergedRank(5, {"pp": 1, "dp": 2}, (Span(0, 9, "a", "b", track=3),), {3: "loader"}, 0, 0, 0, ())
    names = {
        event["name"]: event["args"]["name"]
        for event in to_chrome(Merged((rank,), (), 0))["traceEvents"]
        if event["name"] in ("process_name", "thread_name")
    }
    assert names == {"process_name": "rank 5 (pp=1, dp=2)", "thread_name": "loader"}


def test_what_overlaps_gets_threads_of_its_own(tmp_path: Path) -> None:
    some = (Span(0, 10, "a", "x"), Span(5, 15, "a", "y"), Span(6, 7, "a", "z"))
    trace = to_chrome(Merged((MergedRank(0, {}, some, {0: "main"}, 0, 0, 0, ()),), (), 0))
    threads = {event["name"]: event["tid"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert threads == {"x": 0, "y": 1, "z": 0}
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert names == ["main", "main 2"]
