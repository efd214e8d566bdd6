"""Is a save dead? Asked of two clocks, since that of the saver, of this machine and of the storage may differ."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from .._format import step_path
from .._storage import Entry, Storage
from .scan import Folder

__all__ = ["PROBE", "Clock"]

PROBE = "gc-probe-"
"""Empty files at the root begin with this: they show the time of the storage."""


class Clock:
    """Judges the age of what unfinished saves have left.

    Args:
        storage: the store.
        clock: seconds since 1970, by this machine.
        grace: seconds without a change after which a save without a live lease is dead.
        break_leases: take every unfinished save for dead.
        dry_run: write nothing, so that the time of the storage is taken to be that of this machine.
    """

    def __init__(
        self, storage: Storage, clock: Callable[[], float], grace: float, *, break_leases: bool, dry_run: bool
    ) -> None:
        self._storage, self._clock, self._grace = storage, clock, grace
        self._break, self._dry = break_leases, dry_run
        self._ahead: float | None = None  # of the storage; None before it is known

    def now(self) -> float:
        """Return the time of this machine."""
        return self._clock()

    def storage_now(self) -> float:
        """Return the time of the storage, or that of this machine where the storage does not tell."""
        if self._ahead is None:
            self._ahead = 0.0 if self._dry else self._measure()
        return self._clock() + self._ahead

    def runs(self, folder: Folder) -> bool:
        """Tell whether a folder is that of a save that may still run."""
        if folder.commit is not None or folder.removed or folder.damage:
            return False
        return not self._is_dead(folder)

    def is_old(self, modified: float | None) -> bool:
        """Tell whether something has not changed for the time of grace; what has no time has changed just now."""
        if self._break:
            return True
        return modified is not None and self.storage_now() - modified >= self._grace

    def has_lease(self, folder: Folder) -> bool:
        """Tell whether the lease of a folder lives, whatever else is in it."""
        if self._break or folder.lease is None:
            return False
        return folder.lease.expires > min(self._clock(), self.storage_now())

    def is_stale(self, entry: Entry, said: float) -> bool:
        """Tell whether a file is old; one of which the storage keeps no time says itself when it was written."""
        if entry.modified is None and not self._break:
            return self._clock() - said >= self._grace
        return self.is_old(entry.modified)

    def _is_dead(self, folder: Folder) -> bool:
        if self._break:
            return True
        return not self.has_lease(folder) and self.is_old(self._changed(folder))

    def _changed(self, folder: Folder) -> float | None:
        """Return when something in a folder changed last; None where that is not known."""
        entries = list(self._storage.list(folder.name, temporary=True))
        for inner in folder.entries:
            if inner.is_folder:
                entries += self._storage.list(step_path(folder.name, inner.name), temporary=True)
        times = [entry.modified for entry in entries if entry.modified is not None]
        if any(entry.modified is None and not entry.is_folder for entry in entries):
            # The storage keeps no times: the end of the lease is what is left to go by.
            return folder.lease.expires if folder.lease is not None else None
        return max(times, default=None)

    def _measure(self) -> float:
        name = f"{PROBE}{secrets.token_hex(4)}"
        before = self._clock()
        self._storage.put(name, b"")
        found = [entry.modified for entry in self._storage.list("") if entry.name == name]
        self._storage.remove(name)
        return found[0] - before if found and found[0] is not None else 0.0
