"""A merged timeline in the JSON that chrome://tracing and ui.perfetto.dev read.

See "Trace Event Format" (Duca and Sinclair, 2016): complete events ("X") in microseconds, names of processes and
threads as metadata ("M"), arrows as flows ("s" and "f", which bind to the span around them).
"""

from __future__ import annotations

from typing import Any

from .lanes import lanes
from .merge import Merged
from .recorder import MESSAGES
from .span import Span

__all__ = ["to_chrome"]


def to_chrome(merged: Merged) -> dict[str, Any]:
    """Return the trace: a process per rank, a thread per lane of each track; events of a thread in their order."""
    events: list[dict[str, Any]] = []
    timed: list[tuple[int, int, float, int, dict[str, Any]]] = []
    thread_of: dict[int, tuple[int, int]] = {}
    for order, one in enumerate(merged.ranks):
        events.append(_meta("process_name", one.rank, 0, name=one.name))
        events.append(_meta("process_sort_index", one.rank, 0, sort_index=order))
        thread = 0
        for track in sorted({span.track for span in one.spans}, key=lambda track: (track == MESSAGES, track)):
            name = one.tracks.get(track, "messages" if track == MESSAGES else f"track {track}")
            rows = lanes([span for span in one.spans if span.track == track])
            for number, lane in enumerate(rows, 1):
                events.append(_meta("thread_name", one.rank, thread, name=name if number == 1 else f"{name} {number}"))
                events.append(_meta("thread_sort_index", one.rank, thread, sort_index=thread))
                for span in lane:
                    thread_of[id(span)] = (one.rank, thread)
                    timed.append((one.rank, thread, span.start, 0, _slice(span, one.rank, thread)))
                thread += 1
    for number, message in enumerate(merged.messages):
        same = {"name": message.send.name, "cat": "message", "id": number}
        rank, thread = thread_of[id(message.send)]
        at = message.send.start
        begin = {**same, "ph": "s", "pid": rank, "tid": thread, "ts": at / 1000}
        timed.append((rank, thread, at, 1, begin))
        rank, thread = thread_of[id(message.recv)]
        # A nanosecond before the end the receiving span is there still, so that the arrow sticks to it.
        at = max(message.recv.start, message.recv.end - 1)
        end = {**same, "ph": "f", "bp": "e", "pid": rank, "tid": thread, "ts": at / 1000}
        timed.append((rank, thread, at, 1, end))
    timed.sort(key=lambda row: row[:4])
    events += [row[4] for row in timed]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "notes": list(merged.notes),
            "dropped": {str(one.rank): one.dropped for one in merged.ranks},
            "clock bound (ns)": {str(one.rank): one.bound for one in merged.ranks},
        },
    }


def _meta(kind: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}


def _slice(span: Span, process: int, thread: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.category,
        "pid": process,
        "tid": thread,
        "ts": span.start / 1000,
        "dur": span.length / 1000,
        "args": {"step": span.step, **span.tags},
    }
