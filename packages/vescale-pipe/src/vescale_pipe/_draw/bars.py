"""What a picture of a pipeline shows: bars on a row per rank, from a simulation or a measurement."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from .._schedule import Kind, Schedule
from .._schedule._given import need_schedule
from .._simulate import Costs, Simulation, simulate

__all__ = ["KINDS", "Bar", "Picture", "number", "picture"]

KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "message": "message",
    "other": "other",
}
"""Kinds of bars as a legend names them; what is none of these is drawn as "other"."""

PREFIXES = ((1.0, ""), (1e-3, "m"), (1e-6, "u"), (1e-9, "n"))


@dataclass(frozen=True, slots=True)
class Bar:
    """One thing that a rank did, for a time."""

    rank: int
    """Row, from 0."""
    start: float
    """Seconds, from when the picture starts."""
    end: float
    """Seconds."""
    label: str
    """What is written into it; for actions the number of the micro-batch."""
    kind: str = "other"
    """One of `KINDS`: tells the colour."""
    shade: int = 0
    """Which of the rank's stages it is for: the higher, the lighter."""
    part: Literal["whole", "upper", "lower"] = "whole"
    """Part of the row's height; the actions of a joined pair share a row."""
    name: str = ""
    """What it is in full, such as 2F0; empty: kind and label."""

    @property
    def full(self) -> str:
        """What it is in full."""
        return self.name or f"{self.kind}{self.label}"


@dataclass(frozen=True, slots=True)
class Picture:
    """All that a picture shows."""

    bars: tuple[Bar, ...]
    """The bars."""
    rows: tuple[str, ...]
    """Name of each rank's row."""
    title: str
    """First line."""
    figures: str
    """Second line: makespan, bubbles, memory."""
    length: float
    """Seconds that the time axis shows."""
    unit: str
    """Unit of the axis: "s", or empty for plain numbers."""


def picture(
    what: Schedule | Simulation | Iterable[Bar],
    costs: Costs | None = None,
    title: str | None = None,
    unit: str | None = None,
) -> Picture:
    """Return what a picture of a schedule, a simulation or of measured bars shows; arguments as in `render`."""
    if isinstance(what, str):
        need_schedule(what, "render")
    if isinstance(what, Schedule):
        if unit is None:
            unit = "" if costs is None else "s"
        what = simulate(what, _rank_costs(what) if costs is None else costs)
    elif costs is not None:
        raise ValueError("costs: given with something that has its times already; costs are for schedules.")
    unit = "s" if unit is None else unit
    if isinstance(what, Simulation):
        return _simulated(what, title, unit)
    if not isinstance(what, Iterable):
        need_schedule(what, "render")
    bars = tuple(what)
    strange = next((one for one in bars if not isinstance(one, Bar)), None)
    if strange is not None:
        raise ValueError(f"bars: {strange!r:.100} given; a Schedule, a Simulation or a list of Bar can be drawn.")
    return _measured(bars, title or "", unit)


def _rank_costs(schedule: Schedule) -> Costs:
    """Return costs by which the layers of a rank, in however many stages, take 1 forward."""
    counts = {len(schedule.stages_of(rank)) for rank in range(schedule.num_ranks)}
    return Costs().divided(counts.pop()) if len(counts) == 1 and 0 not in counts else Costs()


def _simulated(done: Simulation, title: str | None, unit: str) -> Picture:
    schedule = done.schedule
    bars, rows = [], []
    for rank in range(schedule.num_ranks):
        stages = schedule.stages_of(rank)
        chunk = {stage: index for index, stage in enumerate(stages)}
        joined = set(schedule.joined(rank))
        for index, (action, start, end) in enumerate(done.action_times(rank)):
            part: Literal["whole", "upper", "lower"] = "whole"
            if index in joined:
                part = "upper"
            elif index - 1 in joined:
                part = "lower"
            label, kind = str(action.microbatch), Kind(action.kind).name
            bars.append(Bar(rank, start, end, label, kind, chunk[action.stage], part, str(action)))
        names = ", ".join(map(str, stages))
        rows.append(f"rank {rank}" if len(stages) == 1 else f"rank {rank} (stages {names})")
    if title is None:
        title = f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_microbatches} micro-batches"
    figures = (
        f"makespan {number(done.makespan, unit)}, bubble {done.bubble:.1%} "
        f"(in the ranks' own span {done.own_bubble:.1%}), peak {_memory(done)}"
    )
    return Picture(tuple(bars), tuple(rows), title, figures, done.makespan, unit)


def _measured(bars: tuple[Bar, ...], title: str, unit: str) -> Picture:
    for bar in bars:
        if not (bar.rank >= 0 and math.isfinite(bar.start) and math.isfinite(bar.end) and 0 <= bar.start <= bar.end):
            raise ValueError(
                f"bars: {bar} given; ranks and times must not be negative, and none ends before it starts."
            )
    ranks = 1 + max((bar.rank for bar in bars), default=-1)
    begin, length = min((bar.start for bar in bars), default=0.0), max((bar.end for bar in bars), default=0.0)
    busy = [_covered([bar for bar in bars if bar.rank == rank]) for rank in range(ranks)]
    span = length - begin
    bubble = 1 - sum(busy) / (span * ranks) if span > 0 else 0.0
    figures = f"makespan {number(span, unit)}, bubble {bubble:.1%}"
    return Picture(bars, tuple(f"rank {rank}" for rank in range(ranks)), title, figures, length, unit)


def _covered(bars: list[Bar]) -> float:
    """Return the seconds in which something is computed; what overlaps counts once, messages do not."""
    total, reached = 0.0, 0.0
    for bar in sorted(bars, key=lambda bar: bar.start):
        if bar.kind != "message" and bar.end > reached:
            total += bar.end - max(bar.start, reached)
            reached = bar.end
    return total


def _memory(done: Simulation) -> str:
    most = max(done.peak, default=0.0)
    if done.costs.activation in (1.0, 1 / max(1, len(done.schedule.stages_of(0)))):
        return f"{most:.6g} activation{'s' if most != 1 else ''}"
    for size, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if most >= size:
            return f"{most / size:.4g} {name}"
    return f"{most:.6g} bytes"


def number(seconds: float, unit: str) -> str:
    """Return a time as people write it.

    Example:
        >>> number(0.0123, "s"), number(33.0, ""), number(0.0, "s")
        ('12.3 ms', '33', '0 s')
    """
    if unit != "s":
        return f"{seconds:.6g} {unit}".rstrip()
    for size, prefix in PREFIXES:
        if seconds >= size or (seconds == 0 and not prefix):
            return f"{seconds / size:.4g} {prefix}s"
    return f"{seconds:.3g} s"
