"""The saves of this process that still run: one at a time per store, and no error is lost.

A second save of a store waits for the first (this is the back-pressure), and so does a load, which would otherwise
not see it. Threads are no daemons: the interpreter ends after they have committed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from .._storage import Storage, identity_of
from .handle import Meter, SaveHandle, SaveInfo

__all__ = ["start", "wait_for"]

_lock = threading.Lock()
_latest: dict[str, SaveHandle] = {}
"""By the identity of the store: saves that run, and failed ones of which nobody has asked."""


def wait_for(storage: Storage) -> None:
    """Wait for the save of a store that runs in this process, if there is one, and raise its error if nobody has."""
    key = identity_of(storage)
    with _lock:
        handle = _latest.get(key)
    if handle is None:
        return
    handle._over.wait()
    _drop(key, handle)
    handle.raise_unseen()


def start(storage: Storage, name: str, meter: Meter, work: Callable[[], SaveInfo]) -> SaveHandle:
    """Run `work` on a thread of its own and return its handle."""
    key, handle = identity_of(storage), SaveHandle(name, meter)
    with _lock:
        _latest[key] = handle

    def run() -> None:
        handle.run(work)
        if handle._error is None:
            _drop(key, handle)

    threading.Thread(target=run, name=f"vescale-ckpt {name}", daemon=False).start()
    return handle


def _forget() -> None:
    """Drop what the parent of a forked child runs, on threads that the child does not have."""
    global _lock
    _lock = threading.Lock()
    for handle in _latest.values():
        handle.orphan()
    _latest.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _drop(key: str, handle: SaveHandle) -> None:
    with _lock:
        if _latest.get(key) is handle:
            del _latest[key]
