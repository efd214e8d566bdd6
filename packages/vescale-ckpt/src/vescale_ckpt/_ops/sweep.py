"""The removing half of a garbage collection: a crash anywhere leaves what the next collection takes up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._format import step_path
from .._format.paths import CHUNKS, COMMIT, STEPS
from .._storage import Entry, Storage, leftovers
from .clock import PROBE, Clock
from .references import References, references
from .scan import REMOVED, Folder, look, scan, total

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
        self._dry = report.dry_run

    def end(self, folder: Folder) -> bool:
        """Make a step none, unless somebody has pinned it meanwhile; its files stay for now."""
        if not self._dry:
            self._storage.put(step_path(folder.name, REMOVED), b"")
            if look(self._storage, folder.name).pinned:
                self.unmark(folder)
                return False
        self._remove(step_path(folder.name, COMMIT), next(e for e in folder.entries if e.name == COMMIT))
        # Until this is durable a loss of power could bring the step back, so none of its data may go before.
        if not self._dry:
            self._storage.sync(step_path(folder.name))
        return True

    def unmark(self, folder: Folder) -> None:
        """Take the mark off a folder that stays."""
        if not self._dry:
            self._storage.remove(step_path(folder.name, REMOVED))

    def clean(self, folders: dict[str, Folder], ended: set[str]) -> None:
        """Remove what no step needs.

        Args:
            folders: all folders, looked at after the last step has ended.
            ended: names of those that were steps before.
        """
        running = [folder for folder in folders.values() if folder.name not in ended and self._watch.runs(folder)]
        self._report.running += [folder.name for folder in running]
        going = [f for f in folders.values() if f.name in ended or self._may_go(f)]
        chunks = self._storage.list(CHUNKS)
        needed = self._needed(folders, {folder.name for folder in going}, running, bool(chunks))
        for folder in going:
            self._folder(folder, needed, was_step=folder.name in ended or folder.removed)
        if chunks:
            self._chunks(chunks, needed)
        self._temporary({folder.name for folder in running})
        for entry in self._storage.list(""):
            if entry.name.startswith(PROBE) and not entry.is_folder:
                self._remove(entry.name, entry)

    def _may_go(self, folder: Folder) -> bool:
        return folder.commit is None and not folder.damage and not self._watch.runs(folder)

    def _needed(self, folders: dict[str, Folder], going: set[str], running: list[Folder], shared: bool) -> References:
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
        self._report.problems += [f"data of removed steps stays: {reason}" for reason in needed.unknown]
        return needed

    def _folder(self, folder: Folder, needed: References, *, was_step: bool) -> None:
        """Remove a folder, but for data that is needed."""
        storage, path = self._storage, step_path(folder.name)
        if not was_step:
            # The mark first, then the look: a saver that wakes up commits, then looks for the mark and withdraws.
            if not self._dry:
                storage.put(f"{path}/{REMOVED}", b"")
                if look(storage, folder.name).state[:2] != (False, False):
                    self.unmark(folder)
                    return
            self._report.unfinished.append(folder.name)
        data = [] if folder.name in needed.folders else list(storage.list(f"{path}/{DATA}", temporary=True))
        stays = [entry for entry in data if needed.needs(f"{path}/{DATA}/{entry.name}")]
        if folder.name in needed.folders:
            stays = list(storage.list(f"{path}/{DATA}"))
        self._report.retained_bytes += total(stays)
        for entry in storage.list(path, temporary=True):
            inner = f"{path}/{entry.name}"
            if not entry.is_folder:
                if entry.name not in (REMOVED, COMMIT):
                    self._remove(inner, entry)
            elif entry.name != DATA:
                self._remove_folder(inner)
        if stays:
            kept = {entry.name for entry in stays}
            for entry in data:
                if entry.name not in kept:
                    self._remove(f"{path}/{DATA}/{entry.name}", entry)
            return
        self._remove_folder(f"{path}/{DATA}")
        if not self._dry:
            # The mark goes last: with it, a folder that is half gone is known for what it is.
            storage.sync(path)
            storage.remove(f"{path}/{REMOVED}")
            storage.remove_folder(path)
            storage.sync(STEPS)

    def _chunks(self, fans: list[Entry] | tuple[Entry, ...], needed: References) -> None:
        """Remove shared chunks that no step needs, while no save runs that could use one."""
        for fan in fans:
            folder = f"{CHUNKS}/{fan.name}"
            if needed.unknown or not fan.is_folder:
                continue
            idle = [
                e for e in self._storage.list(folder) if f"{folder}/{e.name}" not in needed.files and not e.is_folder
            ]
            if not idle:
                continue
            if self._saves_run():
                return
            for entry in idle:
                self._remove(f"{folder}/{entry.name}", entry)
            # The folder of the fan stays: somebody may be putting a chunk into it.

    def _saves_run(self) -> bool:
        return any(self._watch.runs(folder) for folder in scan(self._storage).values())

    def _temporary(self, running: set[str]) -> None:
        """Remove files of puts that have never finished."""
        for path, entry in list(leftovers(self._storage)):
            if "/".join(path.split("/")[:2]) in running:
                continue
            if self._watch.is_old(entry.modified):
                self._remove(path, entry)

    def _remove(self, path: str, entry: Entry) -> None:
        self._report.files += 1
        self._report.bytes += entry.size
        if not self._dry:
            self._storage.remove(path)

    def _remove_folder(self, path: str) -> None:
        for entry in self._storage.list(path, temporary=True):
            if entry.is_folder:
                self._remove_folder(f"{path}/{entry.name}")
            else:
                self._report.files += 1
                self._report.bytes += entry.size
        if not self._dry:
            self._storage.remove_folder(path)
