"""Threads for bulk work beside training: a bounded number, of low priority if wanted; the first error stops all.

What they run must release Python's lock in bulk. Torch operators in them stay on the thread that calls them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import queue
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sized
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

import torch

__all__ = ["Workers"]

In = TypeVar("In")
Out = TypeVar("Out")
Job: TypeAlias = "tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]"
Jobs: TypeAlias = "queue.SimpleQueue[Job | None]"

NICE = 10
"""Added to the niceness of threads that run beside training: about a tenth of a core that is wanted by both."""


class Workers:
    """A few daemon threads; as a context manager they are gone at the end of the block.

    Unlike those of `concurrent.futures` they still work while the interpreter waits for a save at exit.

    Example:
        >>> with Workers(2) as workers:
        ...     workers.map(len, ["a", "bcd"])
        [1, 3]
    """

    def __init__(self, threads: int, *, low_priority: bool = False, name: str = "vescale-ckpt worker") -> None:
        """Make the pool; threads start when there is work.

        Args:
            threads: most threads at a time; with 1, `map` runs in the caller's thread unless the priority is low.
            low_priority: lower the scheduling priority of the threads, where the system can do that per thread.
            name: of the threads.
        """
        if type(threads) is not int or threads < 1:
            raise ValueError(f"threads: expected an integer of at least 1, but got {threads!r}.")
        self.threads = threads
        self._name, self._low_priority = name, low_priority
        self._jobs: Jobs = queue.SimpleQueue()
        self._started: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False
        self._process = os.getpid()
        self._end = weakref.finalize(self, _end_threads, self._jobs, threads)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the threads and end them; what has not begun is cancelled."""
        with self._lock:
            if not self._closed:
                self._closed = True
                with contextlib.suppress(queue.Empty):
                    while (job := self._jobs.get_nowait()) is not None:
                        job[0].cancel()
                self._end()
            threads = self._started
        if os.getpid() == self._process:
            for thread in threads:
                if thread is not threading.current_thread():
                    thread.join()

    def submit(self, function: Callable[..., Out], *args: Any) -> Future[Out]:
        """Run a function on a thread.

        Raises:
            RuntimeError: the pool was closed, or this process was forked from the one with the threads.
        """
        future: Future[Out] = Future()
        job = (future, function, args)
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{self._name}: the pool was closed, so it can run nothing more.")
            if os.getpid() != self._process:
                raise RuntimeError(
                    f"{self._name}: the threads are in process {self._process}, from which this process, "
                    f"{os.getpid()}, was forked; make a pool here."
                )
            if len(self._started) < self.threads:
                self._start_thread()
            if self._started:
                self._jobs.put(job)
                return future
        _do(job)
        return future

    def _start_thread(self) -> None:
        arguments = (self._jobs, self._low_priority)
        thread = threading.Thread(target=_run, args=arguments, name=f"{self._name} {len(self._started)}", daemon=True)
        # At exit, or by a limit of the system, there may be no more threads; then fewer or the caller do the work.
        with contextlib.suppress(RuntimeError):
            thread.start()
            self._started.append(thread)

    def map(self, function: Callable[[In], Out], items: Iterable[In]) -> list[Out]:
        """Run a function on each item, some at a time, and return the results in order.

        Items are taken from an iterator when a thread is free for them. May be called from a function that this pool
        runs, and then stays on that thread.

        Raises:
            BaseException: what the first failing call raised, after the calls that run have ended; no more are begun.
        """
        alone = self.threads == 1 and not self._low_priority
        if alone or threading.current_thread() in self._started:
            return [function(item) for item in items]
        count = min(self.threads, len(items)) if isinstance(items, Sized) else self.threads
        numbered, lock = iter(enumerate(items)), threading.Lock()
        results: dict[int, Out] = {}
        errors: list[BaseException] = []

        def work() -> None:
            try:
                while not errors:
                    with lock:
                        entry = next(numbered, None)
                    if entry is None:
                        return
                    results[entry[0]] = function(entry[1])
            except BaseException as error:  # noqa: BLE001 - `map` raises it
                errors.append(error)

        futures = [self.submit(work) for _ in range(count)]
        try:
            wait(futures)
        except BaseException as error:  # Ctrl-C: the calls that run use the caller's buffers, so end them first
            errors.append(error)
            wait(futures)
            raise
        if errors:
            raise errors[0]
        if any(future.cancelled() for future in futures):
            raise RuntimeError(f"{self._name}: the pool was closed while map() ran, so not all items were done.")
        return [results[number] for number in range(len(results))]


def _run(jobs: Jobs, low_priority: bool) -> None:
    """Be a thread of a pool."""
    if low_priority:
        _lower_priority()
    _stay_on_one_core()
    while (job := jobs.get()) is not None:
        _do(job)
        del job  # its arguments may be large


def _do(job: Job) -> None:
    future, function, args = job
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function(*args)
    except BaseException as error:  # noqa: BLE001 - who asks the future gets it
        future.set_exception(error)
    else:
        future.set_result(result)


def _end_threads(jobs: Jobs, threads: int) -> None:
    for _ in range(threads):
        jobs.put(None)


def _lower_priority() -> None:
    """Lower the priority of the calling thread, on Linux; elsewhere that of all threads would be lowered."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):  # a sandbox may forbid it; the work is the same
            os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + NICE))


def _stay_on_one_core() -> None:
    """Let torch operators of the calling thread start no team of threads, which would run beside training's.

    `torch.set_num_threads` would also change what threads that start later get, so ask OpenMP itself.
    """
    torch.get_num_threads()  # torch sets OpenMP's number when a thread first asks; later it leaves it alone
    for library in _openmp():
        library.omp_set_num_threads(1)


@functools.cache
def _openmp() -> tuple[ctypes.CDLL, ...]:
    """Return the OpenMP libraries that are loaded, where the system tells."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if re.search(r"/lib[gi]?omp[\d.-]", line)}
    except OSError:
        return ()
    found = []
    for path in sorted(paths):
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(path)
            if hasattr(library, "omp_set_num_threads"):
                found.append(library)
    return tuple(found)
