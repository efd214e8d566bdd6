"""Threads that move collectives on while their callers compute: one posts messages, one waits and posts what follows.

A send may copy megabytes before it returns, and the second round of a sum can only begin when the first one has come
in. Neither should happen in the thread that computes gradients.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

import torch

from .running import Running

__all__ = ["Progress"]


class Progress:
    """Moves collectives on, in the order in which they were started. Its threads begin with the first one."""

    def __init__(self) -> None:
        self._poster = _Worker("vescale-comm posts")
        self._follower = _Worker("vescale-comm follows")

    def take(self, run: Running, follow: bool) -> None:
        """Post the messages of a collective that has not begun.

        Args:
            run: the collective, made with `begin=False`; its `wait` is released when the last messages that are posted
                here are under way.
            follow: whether messages come after the first ones.
        """
        # Tensors that were made in inference mode can be written in that mode only, which each thread has for itself.
        inference = torch.is_inference_mode_enabled()
        self._poster.do(lambda: self._begin(run, follow, inference))

    def _begin(self, run: Running, follow: bool, inference: bool) -> None:
        with torch.inference_mode(inference):
            run.begin()
        if follow:
            self._follower.do(lambda: _follow(run, inference))
        else:
            run.release()

    def close(self) -> None:
        """Let the threads end, once what they took is done."""
        self._poster.close()
        self._follower.close()


def _follow(run: Running, inference: bool) -> None:
    with torch.inference_mode(inference):
        run.follow()


class _Worker:
    """A thread that does what it is given, in order."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Callable[[], None] | None] | None = None

    def do(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._queue is None:
                self._queue = SimpleQueue()
                # A daemon: a rank that ends early does not wait here for one that is gone.
                threading.Thread(target=_work, args=(self._queue,), name=self._name, daemon=True).start()
                weakref.finalize(self, self._queue.put, None)
            self._queue.put(job)

    def close(self) -> None:
        with self._lock:
            queue, self._queue = self._queue, None
        if queue is not None:
            queue.put(None)


def _work(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := queue.get()) is not None:
        job()
        del job
