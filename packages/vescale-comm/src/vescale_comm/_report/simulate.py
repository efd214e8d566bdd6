"""Simulates a step: tasks that wait for each other, on streams that run one task at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["COMPUTE", "Simulated", "Span", "Task", "simulate"]

COMPUTE = "compute"
"""The stream that slows down while others are busy, where communication takes its processor away."""


@dataclass(frozen=True, slots=True)
class Task:
    """Something that takes time on a stream."""

    name: str
    """For reading."""
    stream: str
    """On which it runs, after the tasks of that stream that come before it in the list."""
    seconds: float
    """How long it takes undisturbed."""
    after: tuple[int, ...] = ()
    """Indices of earlier tasks that must have ended."""
    takes: float = 0.0
    """Bytes that are in use from its start on."""
    gives: float = 0.0
    """Bytes that are free from its end on."""
    speed: float | None = None
    """Of `COMPUTE` while it runs on another stream, as a share of full speed; None: as for all."""


@dataclass(frozen=True, slots=True)
class Span:
    """When a task ran."""

    name: str
    """Of the task."""
    stream: str
    """Of the task."""
    start: float
    """Seconds from the beginning."""
    end: float
    """Seconds from the beginning."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """What happened."""

    spans: tuple[Span, ...]
    """In the order of the tasks."""
    seconds: float
    """Until the last task ended."""
    peak: float
    """Most bytes in use at once; what is given back at a moment can be taken at once."""


def simulate(tasks: Sequence[Task], overlap: float = 1.0) -> Simulated:
    """Run tasks, each as early as it can.

    Args:
        tasks: in an order in which each comes behind those it waits for. A task that slows compute down must come
            before the computation that it slows down, which it does where tasks stand in the order of their launch.
        overlap: speed of the stream `COMPUTE` while another stream is busy, as a share of its full speed: 1 where
            communication costs it nothing, 0 where there is no processor left. Tasks may have a speed of their own;
            where several run, the lowest one counts.

    Example:
        >>> tasks = [Task("a", COMPUTE, 2), Task("send a", "net", 3, (0,)), Task("b", COMPUTE, 4)]
        >>> simulate(tasks).seconds, simulate(tasks, overlap=0).seconds
        (6.0, 9.0)
    """
    free: dict[str, float] = {}
    busy: list[tuple[float, float, float]] = []
    spans: list[Span] = []
    moments: list[tuple[float, float]] = []
    for task in tasks:
        start = max((free.get(task.stream, 0.0), *(spans[index].end for index in task.after)))
        end = start + task.seconds
        if task.stream == COMPUTE:
            busy = [one for one in busy if one[1] > start]
            end = _slowed(start, task.seconds, busy)
        elif task.seconds:
            speed = overlap if task.speed is None else task.speed
            if speed < 1:
                busy.append((start, end, speed))
        free[task.stream] = end
        spans.append(Span(task.name, task.stream, start, float(end)))
        moments += [(start, task.takes)] if task.takes else []
        moments += [(end, -task.gives)] if task.gives else []
    used = peak = 0.0
    for _, change in sorted(moments):
        used += change
        peak = max(peak, used)
    return Simulated(tuple(spans), max((span.end for span in spans), default=0.0), peak)


def _slowed(start: float, work: float, busy: list[tuple[float, float, float]]) -> float:
    """Return when some work ends that goes on at a lower speed while anything is busy."""
    now = start
    edges = sorted({edge for begin, end, _ in busy for edge in (begin, end) if edge > start})
    for edge in edges:
        speed = min((one for begin, end, one in busy if begin <= now < end), default=1.0)
        if work <= (edge - now) * speed:
            return now + (work / speed if work else 0.0)
        work -= (edge - now) * speed
        now = edge
    return now + work
