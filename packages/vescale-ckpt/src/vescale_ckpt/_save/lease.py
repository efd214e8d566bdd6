"""The lease of a save on the side of the saver: it is renewed while the save runs, and it is known if it ever ran out.

A garbage collection leaves a save alone, and all that the save may refer to, while its lease lives. So as long as the
lease has been alive without a gap nothing of it has gone, and nothing has to be looked for.
"""

from __future__ import annotations

import threading
import time

from .._format import Lease
from .._storage import Storage

__all__ = ["LeaseKeeper", "put_lease"]

MARGIN = 60.0
"""Seconds that a lease lives beyond the time for which others are waited for."""


def put_lease(
    storage: Storage, folder: str, save_id: str, bases: tuple[str, ...], timeout: float, *, begun: float
) -> None:
    """Write the lease of a save: others are waited for as long as `timeout` from `begun` on, in Unix seconds."""
    storage.put(f"{folder}/LEASE", Lease(save_id, begun + timeout + MARGIN, bases).to_bytes())


class LeaseKeeper:
    """Keeps the lease of a save from running out while it is written. Threads may call it at once."""

    def __init__(
        self, storage: Storage, folder: str, save_id: str, bases: tuple[str, ...], timeout: float, *, begun: float
    ) -> None:
        """Take what `put_lease` got when the save began."""
        self._storage, self._folder, self._save_id, self._bases = storage, folder, save_id, bases
        self._timeout = timeout
        self._busy = threading.Lock()
        self._begun = begun, time.monotonic()  # when the last lease was written, by both clocks
        self._gap = False

    def renew(self, *, older: float | None = None) -> None:
        """Write the lease again.

        Args:
            older: only if it is older than so many seconds; None: than half of the timeout, and only if no other
                thread does it just now.
        """
        if not self._busy.acquire(blocking=older is not None):
            return
        try:
            if self._age() < (self._timeout / 2 if older is None else older):
                return
            now = time.time(), time.monotonic()
            put_lease(self._storage, self._folder, self._save_id, self._bases, self._timeout, begun=now[0])
            self._gap = self.ran_out  # told after the put, which may have taken long
            self._begun = now
        finally:
            self._busy.release()

    @property
    def ran_out(self) -> bool:
        """Whether there was, or is, a time without a live lease, in which the save may have been taken for dead."""
        return self._gap or not self.lives

    @property
    def lives(self) -> bool:
        """Whether the lease that was written last is alive, so that nobody takes the save for dead since then."""
        return self._age() <= self._timeout + MARGIN

    def _age(self) -> float:
        """Return the age of the lease; while a machine sleeps only one of the clocks goes on."""
        return max(time.time() - self._begun[0], time.monotonic() - self._begun[1])
