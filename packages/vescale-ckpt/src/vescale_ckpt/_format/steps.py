"""The steps of a store: listing them, finding one, and telling what else lies below `steps/`.

The names of the folders are listed once; a COMMIT is read only where it matters, for a store may hold thousands.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from .._storage import Storage
from ..errors import CorruptionError, FormatError, MissingStepError, StorageError
from .commit import Committed, read_commit, read_manifest
from .fields import NewerFormatError
from .paths import COMMIT, MARKER, REMOVED, STEPS, parse_step_folder, step_path

__all__ = ["Problem", "StepFolders", "committed", "find", "newest", "problems"]

log = logging.getLogger("vescale_ckpt")


@dataclass(frozen=True, slots=True)
class Problem:
    """Something below `steps/` that is no sound step."""

    name: str
    """Name of the file or folder below `steps/`."""
    kind: str
    """What: "junk" is not a step's folder; "unfinished" has no COMMIT; a damaged "commit" or "manifest"; or "newer"."""
    text: str
    """What is wrong."""


class StepFolders:
    """The folders of a store's steps, as one listing showed them.

    Args:
        storage: the store.

    Raises:
        StorageError: the storage failed.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._names: dict[int, list[str]] = {}
        self._read: dict[str, Committed | Problem] = {}
        self.junk: list[Problem] = []
        """What is not the folder of a step."""
        for entry in storage.list(STEPS):
            parsed = parse_step_folder(entry.name)
            if parsed is None or not entry.is_folder:
                self.junk.append(Problem(entry.name, "junk", "not the folder of a step"))
            else:
                self._names.setdefault(parsed[0], []).append(entry.name)

    @property
    def numbers(self) -> list[int]:
        """Return the steps that have a folder, the highest first."""
        return sorted(self._names, reverse=True)

    def names(self, number: int) -> list[str]:
        """Return the names of the folders of one step."""
        return self._names.get(number, [])

    def has(self, name: str) -> bool:
        """Tell whether there is a folder of a step of this name."""
        parsed = parse_step_folder(name)
        return parsed is not None and name in self.names(parsed[0])

    def read(self, names: Iterable[str]) -> tuple[list[Committed], list[Problem]]:
        """Read the COMMITs of folders that are there; each is read once.

        Returns:
            The steps, sorted by step, generation and save id, and what is none.

        Raises:
            StorageError: the storage failed.
        """
        found = []
        for name in names:
            if name not in self._read:
                self._read[name] = self._look(name)
            found.append(self._read[name])
        steps = [entry for entry in found if isinstance(entry, Committed)]
        steps.sort(key=lambda entry: (entry.step, entry.commit.generation, entry.commit.save_id))
        return steps, [entry for entry in found if isinstance(entry, Problem)]

    def of(self, number: int) -> list[Committed]:
        """Return the sound saves of one step; the last of them counts."""
        return self.read(self.names(number))[0]

    def latest(self) -> Committed | None:
        """Return the last step that is sound, newest generation; None where there is none. Reads down to it only."""
        return next((steps[-1] for number in self.numbers if (steps := self.of(number))), None)

    def all(self) -> tuple[list[Committed], list[Problem]]:
        """Return what `read` returns of all folders; the problems are sorted by name, junk is among them."""
        steps, others = self.read(name for names in self._names.values() for name in names)
        return steps, sorted(self.junk + others, key=lambda problem: problem.name)

    def _look(self, name: str) -> Committed | Problem:
        folder = step_path(name)
        try:
            return read_commit(self._storage, folder)
        except MissingStepError:
            if any(entry.name == REMOVED for entry in self._storage.list(folder)):
                return Problem(name, "unfinished", "removed; what is left of it is data that other steps may need")
            return Problem(name, "unfinished", "no COMMIT: being saved, or never finished")
        except FormatError as error:
            return Problem(name, "newer" if isinstance(error, NewerFormatError) else "commit", str(error))
        except StorageError as error:
            if not any(entry.name == COMMIT and entry.is_folder for entry in self._storage.list(folder)):
                raise
            return Problem(name, "commit", str(error))


def committed(storage: Storage) -> list[Committed]:
    """Return the steps that exist, sorted by step, generation and save id; broken and half-written ones are not there.

    Reads every COMMIT; where one step is enough, use `find` or `StepFolders`.

    Raises:
        StorageError: the storage failed.
    """
    return StepFolders(storage).all()[0]


def newest(steps: list[Committed]) -> list[Committed]:
    """Return of each step the newest generation, sorted by step.

    Args:
        steps: as `committed` returns them.
    """
    return list({entry.step: entry for entry in steps}.values())


def find(storage: Storage, step: int | str = "latest") -> Committed:
    """Return a step: its newest generation. Reads the COMMITs of that step alone; all of them if there is none.

    Args:
        storage: the store.
        step: number of the step, "latest", or the folder of a step, with or without `steps/`.

    Raises:
        MissingStepError: there is no such step; the message lists those that are there.
        FormatError: it was written in a newer format; the message says what to install.
    """
    folders = StepFolders(storage)
    if isinstance(step, str) and step != "latest":
        name = step_path(step).partition("/")[2]
        groups = [[name]] if folders.has(name) else []
    else:
        groups = [folders.names(number) for number in folders.numbers if step in ("latest", number)]
    for names in groups:
        steps, others = folders.read(names)
        # One in a newer format counts as a step: an older one in its place would be a silent surprise.
        if newer := [problem for problem in others if problem.kind == "newer"]:
            raise FormatError(newer[0].text)
        for problem in others:
            if problem.kind == "commit":
                log.warning("%s is left out: %s", problem.name, problem.text)
        if steps:
            return steps[-1]
    sound, others = folders.all()
    if not sound and not others:
        entries = storage.list("")
        if not any(entry.name == MARKER for entry in entries):
            what = "this is no store: no save has made it one" if entries else "there is no such folder, or it is empty"
            raise MissingStepError(f"{storage.url}: no committed checkpoint; {what}. Check the path.")
    there = sorted({entry.step for entry in sound})
    some = ", ".join(map(str, there[-16:])) if there else "none"
    some = f"..., {some}" if len(there) > 16 else some
    text = "no committed checkpoint" if step == "latest" else f"no committed checkpoint of step {step}"
    left_out = "".join(f"\n  {problem.name}: {problem.text}" for problem in others[:8])
    raise MissingStepError(f"{storage.url}: {text}; there are: {some}." + (f" Left out:{left_out}" if left_out else ""))


def problems(storage: Storage) -> list[Problem]:
    """Return what lies below `steps/` and is no sound step: junk, unfinished saves, broken commits and manifests.

    Raises:
        StorageError: the storage failed.
    """
    steps, found = StepFolders(storage).all()
    for entry in steps:
        try:
            read_manifest(storage, entry)
        except (CorruptionError, FormatError) as error:
            found.append(Problem(entry.name, "manifest", str(error)))
    return sorted(found, key=lambda problem: problem.name)
