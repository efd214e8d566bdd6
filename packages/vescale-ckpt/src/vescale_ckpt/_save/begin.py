"""The start of a save: member 0 finds the step a folder of its own and the step before that it may refer to."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from .._format import Committed, StepFolders, bases_of, ensure_store, read_commit, read_store, step_folder
from .._format.paths import CHUNKS_GO
from .._storage import Storage
from ..errors import CheckpointError, FormatError, MissingStepError, RanksError, StorageError
from .lease import LeaseKeeper, put_lease
from .options import SaveOptions
from .space import check_space

__all__ = ["Start", "begin", "drop", "groups_of", "writes_all"]

log = logging.getLogger("vescale_ckpt")

LOOKS = 8
"""COMMITs of earlier steps that are looked at at once."""


@dataclass(frozen=True, slots=True)
class Start:
    """What member 0 tells the others."""

    store: str
    """Id of the store."""
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
    share: bool
    """Whether chunks are shared by their content."""
    gone: tuple[str, ...] = ()
    """Those of `bases` that are no steps any more: their data is there only because others refer to it."""

    def lease(self, storage: Storage, options: SaveOptions) -> LeaseKeeper:
        """Return what keeps the lease of the save alive, for member 0."""
        return LeaseKeeper(storage, self.folder, self.save_id, self.bases, options.timeout, begun=self.created)

    def to_bytes(self) -> bytes:
        """Return the message."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Start:
        """Return what `to_bytes` sent."""
        value = json.loads(data)
        folders = {name: tuple(value[name]) for name in ("bases", "gone")}
        return cls(**{**value, **folders, "kinds": tuple(map(tuple, value["kinds"]))})


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


def begin(
    storage: Storage, step: int | None, options: SaveOptions, kinds: tuple[tuple[int, ...], ...], needed: int = 0
) -> Start:
    """Make the folder of a save and its lease. Called on member 0 only.

    Args:
        storage: the store.
        step: that is to be saved; None: the one after the latest.
        options: how.
        kinds: for the others.
        needed: bytes that the ranks write together at least, if they write everything and as it is.

    Raises:
        CheckpointError: the step is there already and is not to be saved again.
        StorageError: the storage failed, or has not enough room; then nothing was written.
    """
    try:
        store = read_store(storage)
    except MissingStepError:
        store = ""
    there = StepFolders(storage)
    latest = there.latest()
    if step is None:
        step = latest.step + 1 if latest is not None else 0
    same = there.of(step)
    if same and not options.overwrite:
        raise CheckpointError(
            f"step: {step} is in {storage.url} already ({same[-1].folder}). Save another step, or pass overwrite=True, "
            f"which keeps the old one until the new one is committed."
        )
    save_id = secrets.token_hex(16)
    folder = step_folder(step, save_id)
    base = latest if options.dedup_mode == "position" else None
    bases: tuple[str, ...] = ()
    if base is not None:
        try:
            bases = _closure(storage, base)
        except CheckpointError as error:
            log.warning("%s cannot be referred to, everything is written anew: %s", base.folder, error)
            base = None
    if writes_all(options, base is not None):
        check_space(storage, step, needed)
    store = store or ensure_store(storage)
    created = time.time()
    generation = 1 + max((entry.commit.generation for entry in same), default=-1)
    try:
        put_lease(storage, folder, save_id, bases, options.timeout, begun=created)
        base, share = _look_again(storage, folder, base, options)
        base_folder, bases = (base.folder, bases) if base is not None else (None, ())
        gone = _gone(storage, bases[1:])  # the first of them is the base
        return Start(store, save_id, step, folder, generation, created, base_folder, bases, kinds, share, gone)
    except BaseException:
        drop(storage, folder)
        raise


def drop(storage: Storage, folder: str) -> None:
    """Remove what a failed save has left, as far as the storage lets us; a garbage collection gets the rest."""
    try:
        storage.remove_folder(folder)
    except (OSError, CheckpointError) as error:
        log.warning("%s: a failed save could not be cleaned up and is left to `gc`: %s", folder, error)


def _look_again(
    storage: Storage, folder: str, base: Committed | None, options: SaveOptions
) -> tuple[Committed | None, bool]:
    """Return the base if it is still a step, and whether chunks are shared; called when the lease is there."""
    # The lease is there, so a garbage collection that comes now spares the base; one that came before is seen here.
    if base is not None and not _still_there(storage, base):
        log.warning("%s went while %s began to refer to it: everything is written anew.", base.folder, folder)
        base = None
    share = options.dedup_mode == "content" and not _chunks_go(storage)
    if options.dedup_mode == "content" and not share:
        log.warning("shared chunks are being removed, so %s keeps its data in files of its own.", folder)
    return base, share


def writes_all(options: SaveOptions, has_base: bool) -> bool:
    """Tell whether a save writes every byte of its tensors as it is."""
    return options.compress is None and options.dedup_mode != "content" and not has_base


def _chunks_go(storage: Storage) -> bool:
    """Tell whether a garbage collection may be removing shared chunks that this save would refer to.

    It puts its mark, then looks for leases; here the lease is put first, then comes the look for marks.
    """
    return any(entry.name.startswith(CHUNKS_GO) for entry in storage.list(""))


def _closure(storage: Storage, base: Committed) -> tuple[str, ...]:
    """Return a step's folder and those in which chunks lie that it refers to."""
    return tuple(dict.fromkeys([base.folder, *bases_of(storage, base)]))


def _gone(storage: Storage, folders: Sequence[str]) -> tuple[str, ...]:
    """Return those folders that hold no step any more; one of which that cannot be told counts as a step."""
    if not folders:
        return ()

    def is_gone(folder: str) -> bool:
        try:
            read_commit(storage, folder)
        except MissingStepError:
            return True
        except (FormatError, StorageError) as error:
            log.debug("%s counts as a step: %s", folder, error)
        return False

    with ThreadPoolExecutor(min(LOOKS, len(folders))) as pool:
        return tuple(folder for folder, gone in zip(folders, pool.map(is_gone, folders), strict=True) if gone)


def _still_there(storage: Storage, base: Committed) -> bool:
    try:
        return read_commit(storage, base.folder) == base
    except (MissingStepError, FormatError):
        return False
