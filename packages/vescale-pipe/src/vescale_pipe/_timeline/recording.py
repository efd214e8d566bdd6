"""Start and stop of a recording, and what comes out: the timeline of this rank."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ..errors import PipeError
from .clock import PINGS, read_clocks
from .rank_file import (
    RankSpans,
    end_line,
    header_line,
    lines_of,
    read_file,
    reading_line,
    spans_line,
    write_lines,
)
from .recorder import recorder
from .ring import Ring
from .span import ClockReading, Span, span_of
from .world import clock_ranks, coordinates_on

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Timeline", "current", "record", "start", "step", "stop", "sync"]

CAPACITY = 1 << 16
FLUSH_SECONDS = 1.0


class Timeline:
    """What one rank records; made by `start` or `record`.

    While it runs, spans are in memory (about 200 bytes each, `capacity` at most), or go to a file from a thread of
    their own.
    """

    def __init__(
        self,
        rank: int,
        coordinates: dict[str, int],
        capacity: int,
        path: Path | None,
        flush_seconds: float,
        clocks: tuple[ProcessGroup, Sequence[int]] | None,
        device: Any,
    ) -> None:
        self._ring = Ring(capacity)
        self._clocks = clocks
        self._device = device
        self._known = RankSpans(rank, coordinates, time.perf_counter_ns(), time.time_ns(), socket.gethostname())
        self._known.process = os.getpid()
        self._path = path
        self._file: IO[str] | None = None
        self._failure: OSError | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8")
            write_lines(self._file, [header_line(self._known)])
            self._thread = threading.Thread(
                target=self._flush_often, args=(flush_seconds,), name="vescale_pipe timeline", daemon=True
            )

    # -- what is known

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self._known.rank

    @property
    def in_file(self) -> bool:
        """Whether spans go to a file, and not only to memory."""
        return self._path is not None

    @property
    def spans(self) -> list[Span]:
        """All spans that have ended, by start; times in nanoseconds since the recording started."""
        return sorted(self.data().spans, key=lambda span: (span.start, -span.end))

    @property
    def dropped(self) -> int:
        """Spans that were lost, oldest first, because the ring was full."""
        return self._ring.dropped + (0 if self._device is None else self._device.dropped)

    @property
    def unfinished(self) -> list[str]:
        """Names of the spans that had not ended when the recording did."""
        return self._known.unfinished

    def data(self) -> RankSpans:
        """Return all that is known, for `merge`."""
        self.flush()
        return self._known if self._path is None else read_file(self._path)

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the file of this rank.

        Args:
            path: where to; "{rank}" in it stands for the number of the rank, and in a folder that exists the file is
                called timeline.<rank>.jsonl.

        Returns:
            The file.

        Raises:
            OSError: it cannot be written.
        """
        target = _target(path, self.rank)
        target.parent.mkdir(parents=True, exist_ok=True)
        data = self.data()
        if self._path is None or not target.exists() or not target.samefile(self._path):
            with target.open("w", encoding="utf-8") as file:
                write_lines(file, lines_of(data))
        return target

    # -- while it runs

    def sync(self, pings: int = PINGS) -> None:
        """Read the clocks of other ranks again; all ranks of the recording call this at the same time.

        Args:
            pings: messages to and fro per pair of ranks.

        Raises:
            PipeError: the recording was started without a mesh or group.
        """
        if self._clocks is None:
            raise PipeError(
                f"rank {self.rank}: this recording knows no other ranks; start it with mesh= or group= on all of them."
            )
        if len(self._clocks[1]) == 1:
            return
        import torch.distributed as dist

        group, ranks = self._clocks
        reading = read_clocks(group, ranks, pings)
        if reading is not None:
            parent = dist.get_global_rank(group, reading.parent)
            here = ClockReading(reading.time - self._known.origin, parent, reading.offset, reading.bound)
            self._known.readings.append(here)
            self._write(reading_line(here))

    def flush(self) -> None:
        """Fetch what has ended from the ring, to the file if there is one."""
        with self._lock:
            raw = self._ring.drain()
            if self._device is not None:
                raw += self._device.resolve(wait=self._over.is_set())
            origin = self._known.origin
            # What began before the recording did would have no place in it.
            spans = [span_of(one, origin) for one in raw if one[0][6] >= origin]
            if self._path is None:
                self._known.spans += spans
            elif spans:
                self._write(spans_line(spans))

    def begin(self) -> None:
        """Let spans come."""
        recorder.device = self._device
        recorder.use(self._ring)
        if self._thread is not None:
            self._thread.start()

    def finish(self) -> None:
        """Let no more spans come, and write the rest."""
        recorder.use(None)
        recorder.device = None
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self.flush()
        known = self._known
        known.unfinished = [token[2] or "an action" for token in self._ring.unfinished()]
        known.dropped = self.dropped
        known.tracks, known.complete = dict(recorder.tracks), True
        self._write(end_line(known))
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._failure is not None:
            raise self._failure

    def abandon(self) -> None:
        """Close the file of a recording that never began."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _flush_often(self, seconds: float) -> None:
        while not self._over.wait(seconds):
            self.flush()

    def _write(self, line: dict[str, Any]) -> None:
        """Write a line; a disk that is full ends the writing, not the training: `finish` raises it."""
        if self._file is not None and self._failure is None:
            try:
                write_lines(self._file, [line])
            except OSError as error:
                self._failure = error


class _Current:
    """The recording of this process."""

    def __init__(self) -> None:
        self.timeline: Timeline | None = None

    def drop(self) -> None:
        self.timeline = None


_current = _Current()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_current.drop)


def current() -> Timeline | None:
    """Return the recording that runs in this process, or None."""
    return _current.timeline


def start(
    *,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    path: str | PathLike[str] | None = None,
    capacity: int = CAPACITY,
    flush_seconds: float = FLUSH_SECONDS,
    device: torch.device | str | None = None,
) -> Timeline:
    """Start to record spans in this process.

    Args:
        mesh: of all ranks that record: its axes are in the picture, and the ranks read each other's clocks, now and
            when they stop, so all of them must start and stop.
        group: process group through which they do so, of ranks that all record; it must be able to send tensors of
            the CPU. None: the default one if there is a mesh; without a mesh, clocks are not read, and ranks are
            put together by the time of day.
        path: file to write to as the recording goes on, as in `Timeline.save`. None: keep spans in memory.
        capacity: spans in memory; the oldest are dropped if there are more, and counted.
        flush_seconds: how often spans go to the file.
        device: a GPU, to record spans on it too.

    Returns:
        The recording; `stop` ends it.

    Raises:
        PipeError: one runs already.
        ValueError: capacity is not positive; mesh and group do not fit; the group cannot send tensors of the CPU.
    """
    import torch.distributed as dist

    if _current.timeline is not None:
        raise PipeError(f"rank {_current.timeline.rank}: a recording runs already; stop it first.")
    known = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if known else int(os.environ.get("RANK", "0"))
    clocks = clock_ranks(mesh, group)
    spans_on_device = None
    if device is not None:
        from .device import DeviceSpans

        spans_on_device = DeviceSpans(recorder, device, capacity)
    target = None if path is None else _target(path, rank)
    recorder.step = 0
    timeline = Timeline(rank, coordinates_on(mesh), capacity, target, flush_seconds, clocks, spans_on_device)
    if clocks is not None:
        try:
            timeline.sync()
        except BaseException:
            timeline.abandon()
            raise
    _current.timeline = timeline
    timeline.begin()
    return timeline


def stop(*, sync: bool = True) -> Timeline:
    """End the recording that runs.

    Args:
        sync: read the clocks of other ranks once more, if they were read at the start.

    Returns:
        What was recorded.

    Raises:
        PipeError: none runs.
        OSError: a part of it could not be written.
    """
    timeline = _current.timeline
    if timeline is None:
        raise PipeError("no recording runs; start one first.")
    _current.timeline = None
    try:
        if sync and timeline._clocks is not None:
            timeline.sync()
    finally:
        timeline.finish()
    return timeline


@contextlib.contextmanager
def record(
    *,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    path: str | PathLike[str] | None = None,
    capacity: int = CAPACITY,
    flush_seconds: float = FLUSH_SECONDS,
    device: torch.device | str | None = None,
) -> Iterator[Timeline]:
    """Record spans while the block runs; arguments and errors as in `start`.

    Example:
        >>> from vescale_pipe import timeline
        >>> with timeline.record() as recorded, timeline.span("data", "load", rows=8):
        ...     pass
        >>> [(one.category, one.name, one.tags) for one in recorded.spans]
        [('data', 'load', {'rows': 8})]
    """
    timeline = start(mesh=mesh, group=group, path=path, capacity=capacity, flush_seconds=flush_seconds, device=device)
    try:
        yield timeline
    except BaseException:
        # Other ranks may be gone: nobody may be there to answer pings.
        if _current.timeline is timeline:
            stop(sync=False)
        raise
    if _current.timeline is timeline:
        stop()


def step(number: int | None = None) -> int:
    """Say that a training step begins; spans from now on belong to it.

    Args:
        number: of the step; None: one more than the last. All ranks must use the same numbers.

    Returns:
        The number.
    """
    recorder.step = recorder.step + 1 if number is None else number
    return recorder.step


def sync(pings: int = PINGS) -> None:
    """Read clocks again, on all ranks at the same time, such as every 100 steps of a long recording.

    Does nothing if no recording runs. Arguments and errors as in `Timeline.sync`.
    """
    if _current.timeline is not None:
        _current.timeline.sync(pings)


def _target(path: str | PathLike[str], rank: int) -> Path:
    target = Path(fspath(path).replace("{rank}", str(rank)))
    return target / f"timeline.{rank}.jsonl" if target.is_dir() else target


def _at_exit() -> None:
    """Write the rest of a recording that nobody stopped."""
    if _current.timeline is not None and _current.timeline.in_file:
        stop(sync=False)


atexit.register(_at_exit)
