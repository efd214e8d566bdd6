"""The start of a save: member 0 finds the step a folder of its own and the step before that it may refer to."""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .._format import Committed, Lease, bases_of, committed, ensure_store, read_commit, step_folder
from .._storage import Storage
from ..errors import CheckpointError, FormatError, MissingStepError, RanksError
from .options import SaveOptions

__all__ = ["LeaseKeeper", "Start", "begin", "groups_of"]

log = logging.getLogger("vescale_ckpt")


@dataclass(frozen=True, slots=True)
class Start:
    """What member 0 tells the others."""

    save_id: str
    """Hex digits that no other save has."""
    step: int
    """Step that is saved."""
    folder: str
    """Its folder in the store."""
    generation: int
    """How often the step was saved before."""
    created: float
    """Seconds since 1970."""
    base: str | None
    """Folder of the step that may be referred to."""
    bases: tuple[str, ...]
    """That folder and those that it refers to itself."""
    kinds: tuple[tuple[int, ...], ...]
    """Writers that hold the same keys; one entry where all do."""

    def to_bytes(self) -> bytes:
        """Return the message."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Start:
        """Return what `to_bytes` sent."""
        value = json.loads(data)
        return cls(**{**value, "bases": tuple(value["bases"]), "kinds": tuple(map(tuple, value["kinds"]))})


class LeaseKeeper:
    """Keeps the lease of a save from running out while it is written."""

    def __init__(self, storage: Storage, start: Start, timeout: float) -> None:
        """Take where the lease lies and for how many seconds it is given."""
        self._storage, self._start, self._timeout = storage, start, timeout
        self._lock = threading.Lock()
        self._due = time.monotonic() + timeout / 2

    def renew(self, *, now: bool = False) -> None:
        """Write the lease again, if half of its time is over, or at once."""
        with self._lock:
            if not now and time.monotonic() < self._due:
                return
            self._due = time.monotonic() + self._timeout / 2
        self._storage.put(
            f"{self._start.folder}/LEASE", lease_of(self._start.save_id, self._start.bases, self._timeout)
        )


def lease_of(save_id: str, bases: tuple[str, ...], timeout: float) -> bytes:
    """Return the content of the lease of a save: others are waited for as long as `timeout`."""
    return Lease(save_id, time.time() + timeout + 60, bases).to_bytes()


def groups_of(messages: list[Mapping[str, Any]]) -> tuple[tuple[int, ...], ...]:
    """Return the writers by digest, and raise RanksError where they were called differently."""
    for key in ("step", "options", "url"):
        first = messages[0][key]
        other = next((rank for rank, message in enumerate(messages) if message[key] != first), None)
        if other is not None:
            raise RanksError(
                f"{key}: rank 0 was called with {first!r}, rank {other} with {messages[other][key]!r}. All ranks must "
                f"save the same step to the same place in the same way."
            )
    groups: dict[str, list[int]] = {}
    for rank, message in enumerate(messages):
        groups.setdefault(message["digest"], []).append(rank)
    return tuple(map(tuple, groups.values()))


def begin(storage: Storage, step: int | None, options: SaveOptions, kinds: tuple[tuple[int, ...], ...]) -> Start:
    """Make the folder of a save and its lease. Called on member 0 only.

    Raises:
        CheckpointError: the step is there already and is not to be saved again.
        StorageError: the storage failed.
    """
    ensure_store(storage)
    there = committed(storage)
    if step is None:
        step = there[-1].commit.step + 1 if there else 0
    same = [entry for entry in there if entry.commit.step == step]
    if same and not options.overwrite:
        raise CheckpointError(
            f"step: {step} is in {storage.url} already ({same[-1].folder}). Save another step, or pass overwrite=True, "
            f"which keeps the old one until the new one is committed."
        )
    save_id = secrets.token_hex(16)
    folder = step_folder(step, save_id)
    base = there[-1] if there and options.dedup_mode == "position" else None
    bases: tuple[str, ...] = ()
    if base is not None:
        try:
            bases = _closure(storage, base)
        except CheckpointError as error:
            log.warning("%s cannot be referred to, everything is written anew: %s", base.folder, error)
            base = None
    storage.put(f"{folder}/LEASE", lease_of(save_id, bases, options.timeout))
    # The lease is there, so a garbage collection that comes now spares the base; one that came before is seen here.
    if base is not None and not _still_there(storage, base):
        log.warning("%s went while %s began to refer to it: everything is written anew.", base.folder, folder)
        base, bases = None, ()
    generation = 1 + max((entry.commit.generation for entry in same), default=-1)
    return Start(save_id, step, folder, generation, time.time(), base.folder if base else None, bases, kinds)


def _closure(storage: Storage, base: Committed) -> tuple[str, ...]:
    """Return a step's folder and those in which chunks lie that it refers to."""
    return tuple(dict.fromkeys([base.folder, *bases_of(storage, base)]))


def _still_there(storage: Storage, base: Committed) -> bool:
    try:
        return read_commit(storage, base.folder) == base
    except (MissingStepError, FormatError):
        return False
