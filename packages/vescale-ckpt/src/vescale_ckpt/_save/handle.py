"""What a caller holds while a save runs, and what it gets when the save is committed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import CheckpointError

__all__ = ["Meter", "Progress", "SaveHandle", "SaveInfo"]

log = logging.getLogger("vescale_ckpt")


@dataclass(frozen=True, slots=True)
class Progress:
    """How far this rank's part of a save is."""

    phase: str
    """"plan", "stage", "write", "commit", "done" or "failed"."""
    bytes_done: int
    """Bytes of tensors that were read, whether they had to be written or not."""
    bytes_total: int
    """Bytes of tensors that this rank has to write."""
    bytes_reused: int
    """Bytes among those done that an earlier step has already."""
    seconds: float
    """Since the save began."""

    @property
    def fraction(self) -> float:
        """From 0 to 1."""
        return self.bytes_done / self.bytes_total if self.bytes_total else float(self.phase == "done")

    @property
    def eta(self) -> float | None:
        """Seconds that are left at the speed so far; None before anything is known."""
        return self.seconds * (1 - self.fraction) / self.fraction if self.fraction else None


@dataclass(frozen=True, slots=True)
class SaveInfo:
    """A committed save."""

    path: str
    """The store."""
    step: int
    """The step."""
    folder: str
    """Where the step lies in the store."""
    bytes_total: int
    """Bytes of all tensors, replicas counted once, all ranks together."""
    bytes_written: int
    """Bytes that were written to storage, all ranks together."""
    bytes_reused: int
    """Bytes of tensors that earlier steps had already, all ranks together."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of this rank's phases: "plan", "stage", "write", "commit", and "blocked", the time in the call."""


class Meter:
    """Counts what worker threads have done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = time.perf_counter()
        self._marks: dict[str, float] = {}
        self._since = self._begun
        self.phase = "plan"
        self.total = self.done = self.reused = self.written = 0

    def enter(self, phase: str) -> None:
        """Begin a phase and close the one before."""
        now = time.perf_counter()
        self._marks[self.phase] = self._marks.get(self.phase, 0.0) + now - self._since
        self.phase, self._since = phase, now

    def add(self, *, done: int = 0, reused: int = 0, written: int = 0) -> None:
        """Count bytes."""
        with self._lock:
            self.done += done
            self.reused += reused
            self.written += written

    def progress(self) -> Progress:
        """Return the state of now."""
        return Progress(self.phase, self.done, self.total, self.reused, time.perf_counter() - self._begun)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of the phases that are over."""
        return {phase: seconds for phase, seconds in self._marks.items() if phase not in ("done", "failed")}


class SaveHandle:
    """A save that runs in the background. The state may be changed as soon as the caller has this."""

    def __init__(self, name: str, meter: Meter) -> None:
        self._name, self._meter = name, meter
        self._over = threading.Event()
        self._info: SaveInfo | None = None
        self._error: BaseException | None = None
        self._told = False  # whether somebody has seen the error

    def __repr__(self) -> str:
        return f"<SaveHandle {self._name}: {self._meter.phase}>"

    def done(self) -> bool:
        """Tell whether the save is over, well or not."""
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> SaveInfo:
        """Wait until the step is committed and durable on all ranks.

        Args:
            timeout: seconds; None waits as long as it takes (other ranks are waited for as long as `timeout` of the
                save says).

        Returns:
            What was written.

        Raises:
            TimeoutError: the save still runs; it goes on.
            CheckpointError: the save failed, here or on another rank.
        """
        if not self._over.wait(timeout):
            raise TimeoutError(f"the save of {self._name} is not over after {timeout} s; it goes on in the background.")
        if self._error is not None:
            self._told = True
            raise self._error
        assert self._info is not None
        return self._info

    def exception(self) -> BaseException | None:
        """Return what went wrong, once the save is over; None if it went well or still runs."""
        self._told = self._told or self._error is not None
        return self._error

    def progress(self) -> Progress:
        """Return how far this rank is."""
        return self._meter.progress()

    def seen(self) -> bool:
        """Tell whether the save failed, and somebody knows."""
        return self._told

    def raise_unseen(self) -> None:
        """Raise the error of a save that is over and that nobody has asked about."""
        if self._over.is_set() and self._error is not None and not self._told:
            self._told = True
            raise self._error

    def orphan(self) -> None:
        """End in a forked child, where nothing runs any more; the save goes on in the parent."""
        over, self._over = self._over.is_set(), threading.Event()
        self._over.set()
        self._told = True
        if not over:
            self._error = CheckpointError(f"the save of {self._name} runs in the process that this one is a fork of.")

    def run(self, work: Callable[[], SaveInfo]) -> None:
        """Do the work of the background thread and keep its outcome."""
        try:
            info = work()
            self._meter.enter("done")
            self._info = info
        except BaseException as error:  # noqa: BLE001 - `wait` raises it
            self._meter.enter("failed")
            log.error("the save of %s failed: %s: %s", self._name, type(error).__name__, error)
            self._error = error
        finally:
            self._over.set()
