"""Garbage collection: remove steps that need not stay, and what crashed or removed saves have left.

A step ends when its COMMIT is removed; only then is it decided, from a new look at the store, which of its data nobody
needs. A save does the reverse: it writes its lease, then looks whether the step that it builds on is still committed.
So whoever comes second sees the other, and a crash anywhere leaves only what the next collection removes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from .._format import Committed, newest, read_manifest, read_store, step_path
from .._storage import Storage, open_storage
from ..errors import CheckpointError, StorageError
from .clock import Clock
from .retention import Keep, Saved, as_keep
from .scan import Folder, scan, stable_scan
from .sweep import Sweep

__all__ = ["GcReport", "gc"]

GRACE = 3600.0


@dataclass(slots=True)
class GcReport:
    """What a garbage collection removed, or would remove."""

    dry_run: bool
    """Whether nothing was removed."""
    steps: list[int] = field(default_factory=list)
    """Steps that were removed; also those of which a newer save of the same step exists."""
    kept: list[int] = field(default_factory=list)
    """Steps that are there after it."""
    unfinished: list[str] = field(default_factory=list)
    """Folders of saves that never finished, and were removed."""
    running: list[str] = field(default_factory=list)
    """Folders of saves that run, or may: they are left alone, as are the steps that they build on."""
    leases: dict[str, float] = field(default_factory=dict)
    """Until when the leases of those folders hold, or held, in seconds since 1970; one without a lease is not in it."""
    files: int = 0
    """Number of files that were removed; a folder that was removed whole counts with all its files."""
    bytes: int = 0
    """Their bytes."""
    retained_bytes: int = 0
    """Bytes of data of removed steps that stays, since later steps refer to it."""
    problems: list[str] = field(default_factory=list)
    """What kept it from removing more: damaged steps, of which it cannot be told what they need."""


def gc(
    path: str | os.PathLike[str] | Storage,
    *,
    keep: Keep | int | None = None,
    dry_run: bool = False,
    grace: float = GRACE,
    break_leases: bool = False,
    clock: Callable[[], float] = time.time,
) -> GcReport:
    """Remove steps by a rule, data that no step needs, and what unfinished saves have left.

    Never removed: the last committed step, a pinned one, one that a running save builds on, a damaged one. Safe beside
    savers, other collections, and crashes.

    Data files go as a whole: one of a removed step stays as long as a step that is kept refers to any of it. Saves
    refer to files of removed steps only while a quarter of them or more is needed, so what stays of removed steps is
    at most a few times the steps that are kept; `retained_bytes` tells.

    Args:
        path: the store.
        keep: which steps stay; a number stands for `Keep(last=number)`; None: all, and only garbage is removed.
        dry_run: remove nothing, only tell what would be.
        grace: seconds for which the folder of a save without a live lease is left alone after the last change in it, by
            the clock of the storage. With less than a put may take, a save that has just begun, and has not written
            its lease yet, can lose its folder and fail.
        break_leases: take all unfinished saves for dead; only where you know that none runs.
        clock: seconds since 1970.

    Returns:
        What was removed.

    Raises:
        MissingStepError: there is no store.
        ValueError: `grace` is negative, or `keep` is no rule.
        StorageError: the storage failed; what was removed until then is gone, and nothing else is harmed.

    Example:
        >>> import tempfile, torch, vescale_ckpt as ck
        >>> folder = tempfile.mkdtemp()
        >>> for step in range(4):
        ...     _ = ck.save(folder, {"w": torch.arange(100.0) + step}, step=step)
        >>> ck.gc(folder, keep=ck.Keep(last=2)).steps
        [0, 1]
    """
    if not grace >= 0:
        raise ValueError(f"grace: expected seconds, at least 0, but got {grace!r}.")
    keep = as_keep(keep)
    storage = open_storage(path)
    read_store(storage)
    report = GcReport(dry_run)
    watch = Clock(storage, clock, grace, break_leases=break_leases, dry_run=dry_run)
    sweep = Sweep(storage, report, watch)
    ending = _end_steps(storage, sweep, watch, keep, report)
    gone = ending | sweep.bury(scan(storage))
    folders = stable_scan(storage)
    sweep.clean(folders, gone)
    left = {e.step for f in folders.values() if (e := f.committed) is not None and f.name not in gone}
    report.kept = sorted(left)
    report.steps.sort()
    return report


def _end_steps(storage: Storage, sweep: Sweep, watch: Clock, keep: Keep | None, report: GcReport) -> set[str]:
    """Take away the COMMIT of the steps that go; return the names of their folders."""
    folders = scan(storage)
    needed = {name for folder in folders.values() if watch.runs(folder) for name in _bases(folder)}
    blind = any(watch.runs(folder) and folder.lease_damage for folder in folders.values())
    ended: set[str] = set()
    for step in _expendable(storage, folders, keep, watch, report):
        folder = folders[step.folder]
        if folder.pinned or step.folder in needed or blind:
            continue
        if sweep.end(folder):
            ended.add(step.folder)
            report.steps.append(step.step)
    for folder in folders.values():  # a crash between the mark and the end of a step that now stays
        if folder.removed and folder.commit is not None and folder.name not in ended:
            sweep.unmark(folder)
    return ended


def _bases(folder: Folder) -> tuple[str, ...]:
    return tuple(map(step_path, folder.lease.bases)) if folder.lease is not None else ()


def _expendable(
    storage: Storage, folders: dict[str, Folder], keep: Keep | None, watch: Clock, report: GcReport
) -> list[Committed]:
    """Return the steps that may go, oldest first."""
    there = sorted(
        (step for folder in folders.values() if (step := folder.committed) is not None),
        key=lambda step: (step.step, step.commit.generation, step.commit.save_id),
    )
    current, saved = [], []
    damaged = set()
    for step in newest(there):
        try:
            manifest = read_manifest(storage, step)
        except StorageError:
            raise
        except CheckpointError as error:
            damaged.add(step.step)  # stays, and does not count as one of the last
            report.problems.append(f"step {step.step} is damaged and stays: {error}")
            continue
        current.append(step)
        saved.append(Saved(step.step, manifest.created, manifest.metadata))
    sound = {step.folder for step in current}
    superseded = [s for s in there if s.folder not in sound and s.step not in damaged]
    if keep is None:
        return superseded
    # One with a mark may be a save that is about to take its commit back: no other step goes because it is there.
    unmarked = [s for s, step in zip(saved, current, strict=True) if not folders[step.folder].removed]
    stay = keep.choose(saved, watch.now()) | keep.choose(unmarked, watch.now())
    return superseded + [step for step in current if step.step not in stay]
