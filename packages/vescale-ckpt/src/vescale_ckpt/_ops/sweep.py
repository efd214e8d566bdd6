"""The removing half of a garbage collection: a crash anywhere leaves what the next collection takes up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._format import step_path
from .._format.paths import COMMIT, LEASE, REMOVED, STEPS
from .._storage import Entry, Storage, leftovers
from .chunks import remove_chunks
from .clock import PROBE, Clock
from .references import References, references
from .scan import Folder, look, may_be_committed, total

if TYPE_CHECKING:
    from .gc import GcReport

__all__ = ["Sweep"]

DATA = "data"


class Sweep:
    """Removes, and counts what it removes; in a dry run it only counts.

    Args:
        storage: the store.
        report: is filled in.
        watch: judges which saves are dead.
    """

    def __init__(self, storage: Storage, report: GcReport, watch: Clock) -> None:
        self._storage, self._report, self._watch = storage, report, watch
        self.dry: bool = report.dry_run
        """Whether nothing is removed."""

    def end(self, folder: Folder) -> bool:
        """Make a step none, unless somebody has pinned it meanwhile; its files stay for now."""
        if not self.dry:
            self._storage.put(step_path(folder.name, REMOVED), b"")
            if look(self._storage, folder.name).pinned:
                self.unmark(folder)
                return False
        self.remove(step_path(folder.name, COMMIT), next(e for e in folder.entries if e.name == COMMIT))
        # Until this is durable a loss of power could bring the step back, so none of its data may go before.
        if not self.dry:
            self._storage.sync(step_path(folder.name))
        return True

    def unmark(self, folder: Folder) -> None:
        """Take the mark off a folder that stays."""
        if not self.dry:
            self._storage.remove(step_path(folder.name, REMOVED))

    def bury(self, folders: dict[str, Folder]) -> set[str]:
        """Mark the folders of saves that are dead, and return their names; none of them can be committed any more.

        All of them before anything is removed: a saver that wakes up writes its lease again, then looks for the mark;
        here the mark is put first, then the lease is looked at. So either it sees the mark, and commits nothing, or it
        is spared, with all that it refers to.
        """
        dead = set()
        for folder in folders.values():
            if folder.removed or not self._may_go(folder):
                continue
            if not self.dry:
                self._storage.put(step_path(folder.name, REMOVED), b"")
                now = look(self._storage, folder.name)
                if now.commit is not None or now.damage or self._watch.has_lease(now):
                    self.unmark(folder)
                    continue
            dead.add(folder.name)
        self._report.unfinished += sorted(dead)
        return dead

    def clean(self, folders: dict[str, Folder], gone: set[str]) -> None:
        """Remove what no step needs.

        Args:
            folders: all folders, looked at after the last step has ended and the last dead save was marked.
            gone: names of those folders.
        """
        # Also those whose lease ran out since the dead ones were marked: without the mark they may still be committed.
        running = [f for f in folders.values() if f.name not in gone and may_be_committed(f)]
        self._report.running += [folder.name for folder in running]
        self._report.leases |= {folder.name: folder.lease.expires for folder in running if folder.lease is not None}
        going = [f for f in folders.values() if f.name in gone or (f.removed and self._may_go(f))]
        needed = self.needed(folders, {folder.name for folder in going}, running, shared=False)
        for folder in going:
            self._folder(folder, needed)
        for folder in folders.values():
            if folder.commit is not None and folder.name not in gone:
                self._lease_of_step(folder)
        remove_chunks(self._storage, self._watch, self, gone)
        self._temporary({folder.name for folder in running})
        for entry in self._storage.list(""):
            if entry.name.startswith(PROBE) and not entry.is_folder:
                self.remove(entry.name, entry)

    def _may_go(self, folder: Folder) -> bool:
        return folder.commit is None and not folder.damage and not self._watch.runs(folder)

    def needed(self, folders: dict[str, Folder], going: set[str], running: list[Folder], *, shared: bool) -> References:
        """Return what the steps need that stay, and the saves that run."""
        steps = [s for f in folders.values() if f.name not in going and (s := f.committed) is not None]
        needed = references(self._storage, steps, going, shared=shared)
        for folder in running:
            if folder.lease_damage:
                needed.unknown.append(f"{folder.name} may be a running save, but its LEASE is unreadable")
            elif folder.lease is not None:  # without one, a save has not begun to look for what it can refer to
                needed.folders |= set(map(step_path, folder.lease.bases))
        for folder in folders.values():
            if folder.damage and folder.name not in going:
                needed.unknown.append(f"{folder.name}: {folder.damage} Restore it, or remove the folder by hand.")
        texts = [f"data of removed steps stays: {reason}" for reason in needed.unknown]
        self._report.problems += [text for text in texts if text not in self._report.problems]
        return needed

    def _folder(self, folder: Folder, needed: References) -> None:
        """Remove a folder, but for data that is needed."""
        storage, path = self._storage, step_path(folder.name)
        if not self.dry:
            now = look(storage, folder.name)
            if now.commit is not None or not now.removed:  # others were here
                return
        data = [] if folder.name in needed.folders else list(storage.list(f"{path}/{DATA}", temporary=True))
        stays = [entry for entry in data if needed.needs(f"{path}/{DATA}/{entry.name}")]
        if folder.name in needed.folders:
            stays = list(storage.list(f"{path}/{DATA}"))
        self._report.retained_bytes += total(stays)
        for entry in storage.list(path, temporary=True):
            inner = f"{path}/{entry.name}"
            if not entry.is_folder:
                if entry.name not in (REMOVED, COMMIT):
                    self.remove(inner, entry)
            elif entry.name != DATA:
                self._remove_folder(inner)
        if stays:
            kept = {entry.name for entry in stays}
            for entry in data:
                if entry.name not in kept:
                    self.remove(f"{path}/{DATA}/{entry.name}", entry)
            return
        self._remove_folder(f"{path}/{DATA}")
        if not self.dry:
            # The mark goes last: with it, a folder that is half gone is known for what it is.
            storage.sync(path)
            storage.remove(f"{path}/{REMOVED}")
            storage.remove_folder(path)
            storage.sync(STEPS)

    def _lease_of_step(self, folder: Folder) -> None:
        """Remove the lease that a saver has left which died right after its commit: a step needs none."""
        for entry in folder.entries:
            if entry.name == LEASE and not entry.is_folder and not self._watch.has_lease(folder):
                self.remove(step_path(folder.name, LEASE), entry)

    def _temporary(self, running: set[str]) -> None:
        """Remove files of puts that have never finished."""
        for path, entry in list(leftovers(self._storage)):
            if "/".join(path.split("/")[:2]) in running:
                continue
            if self._watch.is_old(entry.modified):
                self.remove(path, entry)

    def remove(self, path: str, entry: Entry) -> None:
        """Remove a file, and count it."""
        self._report.files += 1
        self._report.bytes += entry.size
        if not self.dry:
            self._storage.remove(path)

    def _remove_folder(self, path: str) -> None:
        for entry in self._storage.list(path, temporary=True):
            if entry.is_folder:
                self._remove_folder(f"{path}/{entry.name}")
            else:
                self._report.files += 1
                self._report.bytes += entry.size
        if not self.dry:
            self._storage.remove_folder(path)
