"""`comm_report`: what was sent in some steps, and how long the program stood still for it."""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from .watch import Event, stop_watching, watch_for

__all__ = ["CommReport", "ReportRow", "comm_report"]

HEAD = ("operation", "MB", "per step", "start ms", "under way ms", "exposed ms", "hidden", "what")


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One bucket or unit, over all steps."""

    operation: str
    """What was asked of the transport."""
    name: str
    """The tensors."""
    nbytes: int
    """Of the buffer, or on the wire where gradients are compressed."""
    calls: float
    """Per step."""
    start: float
    """Seconds from the beginning of a step to the first call in it, on average."""
    under_way: float
    """Seconds per step from calls to the ends of the waits for them: no less than the communication takes."""
    exposed: float
    """Seconds per step that the program stood still for it."""

    @property
    def hidden(self) -> float:
        """Share of the time under way in which the program did something else."""
        return 1 - self.exposed / self.under_way if self.under_way else 0.0


class CommReport:
    """What `comm_report` saw; prints as a table."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        """All collectives, in the order of their begin."""
        self.steps: list[float] = []
        """When steps began, in seconds of `time.perf_counter`."""
        self.begun = time.perf_counter()
        """When the report began."""
        self.ended = 0.0
        """When it ended; 0: it goes on."""

    def step(self) -> None:
        """Say that a step begins; without, all that is seen counts as one step."""
        self.steps.append(time.perf_counter())

    @property
    def num_steps(self) -> int:
        """Number of steps, at least one."""
        return max(1, len(self.steps))

    @property
    def seconds(self) -> float:
        """Seconds per step."""
        return ((self.ended or time.perf_counter()) - self._marks[0]) / self.num_steps

    @property
    def exposed(self) -> float:
        """Seconds per step that the program stood still for communication."""
        return sum(row.exposed for row in self.rows)

    @property
    def nbytes(self) -> float:
        """Bytes of buffers per step."""
        return sum(row.nbytes * row.calls for row in self.rows)

    @property
    def _marks(self) -> list[float]:
        return self.steps or [self.begun]

    @property
    def rows(self) -> list[ReportRow]:
        """One row for each bucket or unit and operation, in the order in which they first began."""
        marks = self._marks
        found: dict[tuple[str, str, int], list[Event]] = {}
        for event in self.events:
            if event.wait_ended and event.begun >= marks[0]:
                found.setdefault((event.operation, event.name, event.nbytes), []).append(event)
        return [self._row(events, marks) for events in found.values()]

    def _row(self, events: list[Event], marks: list[float]) -> ReportRow:
        first: dict[int, float] = {}
        for event in events:
            step = bisect.bisect(marks, event.begun) - 1
            first.setdefault(step, event.begun - marks[step])
        return ReportRow(
            events[0].operation,
            events[0].name,
            events[0].nbytes,
            len(events) / self.num_steps,
            sum(first.values()) / len(first),
            sum(event.wait_ended - event.begun for event in events) / self.num_steps,
            sum(event.wait_ended - event.wait_began for event in events) / self.num_steps,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers as builtins, for JSON."""
        whole = {"steps": self.num_steps, "seconds": self.seconds, "exposed": self.exposed, "nbytes": self.nbytes}
        return {**whole, "rows": [asdict(row) | {"hidden": row.hidden} for row in self.rows]}

    def __str__(self) -> str:
        rows = self.rows
        cells = [HEAD]
        cells += [
            (
                row.operation,
                f"{row.nbytes / 1e6:.2f}",
                f"{row.calls:g}",
                f"{row.start * 1e3:.2f}",
                f"{row.under_way * 1e3:.2f}",
                f"{row.exposed * 1e3:.2f}",
                f"{row.hidden:.0%}",
                row.name,
            )
            for row in rows
        ]
        widths = [max(len(line[column]) for line in cells) for column in range(len(HEAD))]
        lines = [
            "  ".join(
                [
                    line[0].ljust(widths[0]),
                    *(cell.rjust(width) for cell, width in zip(line[1:-1], widths[1:-1], strict=True)),
                    line[-1],
                ]
            )
            for line in cells
        ]
        share = self.exposed / self.seconds if self.seconds else 0.0
        lines.append(
            f"{self.num_steps} step(s) of {self.seconds * 1e3:.2f} ms: {self.nbytes / 1e6:.2f} MB, "
            f"{self.exposed * 1e3:.2f} ms ({share:.1%}) exposed"
        )
        return "\n".join(lines)


@contextmanager
def comm_report() -> Iterator[CommReport]:
    """Report on the communication of this process that goes on inside: per bucket or unit bytes, start, wait.

    Seen are the gradients and parameters of `replicate`, `DistributedDataParallel`, `DistributedOptimizer` and
    `fully_shard`, and `reduce_over`. Outside of a report nothing is recorded. Times are those of the host: on
    accelerators a wait does not stop it, so there exposed time is to be looked for in a profile. Ranks that are threads
    of one process, as in an emulation, appear in one report.

    Returns:
        A context manager that gives the report; it can be printed, or read as data, inside and afterwards.

    Example:
        >>> with comm_report() as report:
        ...     report.step()  # at the beginning of each step
        >>> report.num_steps, report.rows
        (1, [])
    """
    report = CommReport()
    watch_for(report.events)
    try:
        yield report
    finally:
        stop_watching(report.events)
        report.ended = time.perf_counter()
