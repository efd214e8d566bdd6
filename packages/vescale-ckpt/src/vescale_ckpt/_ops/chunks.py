"""Removing the chunks that steps share by their content, while saves look for chunks that are there already.

No chunk may go that a save has found and refers to in a COMMIT that comes later. A save writes its lease, then looks
for marks of collections at the root; if there is one it shares nothing. A collection puts its mark, then looks at all
leases and commits, and removes chunks only if no save runs, and only those that no commit needs; the mark goes when
that is done. Whoever comes second sees the other:

- The lease was there when the collection looked: it removes nothing, or sees the commit, if that came in between.
- It was not, so it came after the mark: the save sees the mark and shares nothing, or the mark is gone, and so is all
  that was to be removed: what it finds then stays.

A lease that ran out is as none: such a save commits nothing that refers to others. A collection that dies leaves its
mark, which costs sharing and no data until another one takes it away. This needs storage on which a file is seen by all
once it was written, and no rename, no lock and no clock but to tell which marks and leases are those of the dead.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from .._format.paths import CHUNKS, CHUNKS_GO
from .._storage import Entry, Storage
from .clock import Clock
from .references import References
from .scan import may_be_committed, stable_scan

if TYPE_CHECKING:
    from .sweep import Sweep

__all__ = ["remove_chunks"]


def remove_chunks(storage: Storage, watch: Clock, sweep: Sweep, gone: set[str]) -> None:
    """Remove shared chunks that no step needs, if no save runs that could use one; and marks of dead collections.

    Args:
        storage: the store.
        watch: judges the age of marks.
        sweep: removes and counts.
        gone: folders that do not count: in a dry run they are still there.
    """
    fans = [entry for entry in storage.list(CHUNKS) if entry.is_folder]
    mark = f"{CHUNKS_GO}{int(watch.now())}-{secrets.token_hex(8)}"
    if fans and not sweep.dry:
        storage.put(mark, b"")
    try:
        if fans:
            _remove(storage, sweep, fans, gone, mark)
    finally:
        if fans and not sweep.dry:
            storage.remove(mark)
    for entry in storage.list(""):
        if entry.name.startswith(CHUNKS_GO) and not entry.is_folder and watch.is_stale(entry, _time(entry.name)):
            sweep.remove(entry.name, entry)


def _remove(storage: Storage, sweep: Sweep, fans: list[Entry], gone: set[str], mark: str) -> None:
    folders = stable_scan(storage)
    # Also one whose lease ran out just now: it was not marked, so it may wake up and commit.
    if any(may_be_committed(folder) and folder.name not in gone for folder in folders.values()):
        return
    needed = sweep.needed(folders, gone, [], shared=True)
    if needed.unknown:
        return
    for fan in fans:
        idle = _idle(storage, f"{CHUNKS}/{fan.name}", needed)
        if idle and not sweep.dry:
            # Without the mark saves share again: another collection took this one for dead.
            if not any(entry.name == mark for entry in storage.list("")):
                return
            storage.put(mark, b"")  # so that it stays young
        for path, entry in idle:
            sweep.remove(path, entry)
        # The folder of the fan stays: somebody may be putting a chunk into it.


def _idle(storage: Storage, folder: str, needed: References) -> list[tuple[str, Entry]]:
    found = [(f"{folder}/{entry.name}", entry) for entry in storage.list(folder) if not entry.is_folder]
    return [(path, entry) for path, entry in found if path not in needed.files]


def _time(name: str) -> float:
    """Return when a mark was put, by the clock of who put it; one that does not say is as old as can be."""
    text = name.removeprefix(CHUNKS_GO).partition("-")[0]
    return float(text) if text.isdecimal() and len(text) < 20 else 0.0
