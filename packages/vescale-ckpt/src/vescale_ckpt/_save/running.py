"""The saves of this process that still run: one at a time per store, and no error is lost.

A second save of a store waits for the first (this is the back-pressure), and so does a load, which would otherwise
not see it. Threads are no daemons: the interpreter ends after they have committed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from .handle import Meter, SaveHandle, SaveInfo

__all__ = ["start", "wait_for"]

_lock = threading.Lock()
_latest: dict[str, SaveHandle] = {}


def wait_for(url: str) -> None:
    """Wait for the save of a store that runs in this process, if there is one, and raise its error if nobody has."""
    with _lock:
        handle = _latest.get(url)
    if handle is None:
        return
    handle._over.wait()
    with _lock:
        if _latest.get(url) is handle:
            del _latest[url]
    handle.raise_unseen()


def start(url: str, name: str, meter: Meter, work: Callable[[], SaveInfo]) -> SaveHandle:
    """Run `work` on a thread of its own and return its handle."""
    handle = SaveHandle(name, meter)
    with _lock:
        _latest[url] = handle
    threading.Thread(target=handle.run, args=(work,), name=f"vescale-ckpt {name}", daemon=False).start()
    return handle
