"""What lies below `steps/`: committed steps, saves that run, and what they have left.

In every folder the lease is read before the commit: a save that ends in between is seen as committed, never as neither.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from .._format import Commit, Committed, Lease, parse_step_folder, step_path
from .._format.limits import COMMIT_BYTES
from .._format.paths import COMMIT, LEASE, PIN, REMOVED, STEPS
from .._storage import Entry, Storage
from ..errors import CheckpointError, FormatError

__all__ = ["Folder", "may_be_committed", "scan", "stable_scan", "total"]


@dataclass(frozen=True, slots=True)
class Folder:
    """The folder of a step."""

    name: str
    """Such as `steps/00001000-3f2a9c1b`."""
    commit: Commit | None
    """What COMMIT says; None where there is none that can be read."""
    damage: str
    """What is wrong with COMMIT; empty where it is sound or absent."""
    lease: Lease | None
    """What LEASE says; None where there is none that can be read."""
    lease_damage: str
    """What is wrong with LEASE; empty where it is sound or absent."""
    pinned: bool
    """Whether it has a PIN."""
    removed: bool
    """Whether a garbage collection has begun to remove it."""
    entries: tuple[Entry, ...]
    """What lies directly in it."""

    @property
    def committed(self) -> Committed | None:
        """Return the step, where this is one."""
        return Committed(self.name, self.commit) if self.commit is not None else None

    @property
    def state(self) -> tuple[bool, bool, bool, bool]:
        """Return what a second look compares."""
        return self.commit is not None, bool(self.damage), self.lease is not None, bool(self.lease_damage)


def scan(storage: Storage) -> dict[str, Folder]:
    """Return the folders of steps by name, sorted."""
    names = [step_path(e.name) for e in storage.list(STEPS) if e.is_folder and parse_step_folder(e.name) is not None]
    return {name: look(storage, name) for name in names}


def stable_scan(storage: Storage) -> dict[str, Folder]:
    """Return the folders after two looks in a row have seen the same saves and steps.

    With one look, a save could begin, refer to a step, and commit, in the time between the looks at two folders.
    """
    before = scan(storage)
    for _ in range(100):
        after = scan(storage)
        if {n: f.state for n, f in before.items()} == {n: f.state for n, f in after.items()}:
            return after
        before = after
        time.sleep(0.01)  # others are at work here: let them finish something
    raise CheckpointError(f"{storage.url}: steps come and go all the time, so nothing was removed; try again later.")


def look(storage: Storage, name: str) -> Folder:
    """Return one folder, given with or without `steps/`."""
    name = step_path(name)
    entries = tuple(storage.list(step_path(name)))
    files = {entry.name for entry in entries if not entry.is_folder}
    lease, lease_damage, commit, damage = None, "", None, ""
    if LEASE in files:
        try:
            lease = Lease.from_bytes(storage.get(step_path(name, LEASE), COMMIT_BYTES))
        except FileNotFoundError:
            pass  # the save has just ended; COMMIT tells how
        except FormatError as error:
            lease_damage = str(error)
    if files & {COMMIT, LEASE}:
        try:
            commit = Commit.from_bytes(storage.get(step_path(name, COMMIT), COMMIT_BYTES))
            if (commit.step, commit.save_id[:8]) != parse_step_folder(name):
                damage = f"COMMIT belongs to step {commit.step} of save {commit.save_id}, not to this folder."
                commit = None
        except FileNotFoundError:
            pass  # not committed
        except FormatError as error:
            damage = str(error)
    return Folder(name, commit, damage, lease, lease_damage, PIN in files, REMOVED in files, entries)


def may_be_committed(folder: Folder) -> bool:
    """Tell whether a folder is that of a save which may still be committed, whether its lease lives or not."""
    return folder.commit is None and not folder.damage and not folder.removed


def total(entries: Iterable[Entry]) -> int:
    """Return the bytes of files."""
    return sum(entry.size for entry in entries)
