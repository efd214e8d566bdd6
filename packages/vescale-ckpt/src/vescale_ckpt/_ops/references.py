"""Which data files the committed steps need: their own, those of earlier steps, and shared chunks."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from .._format import Committed, Manifest, bases_in, read_index, read_manifest, step_path
from .._storage import Storage
from ..errors import CheckpointError, FormatError, StorageError

__all__ = ["References", "bases_of", "files_of", "references"]

_MOST = 256
"""Steps whose files are remembered; a committed step never changes."""
_lock = threading.Lock()
_known: OrderedDict[tuple[str, str, str], frozenset[str]] = OrderedDict()


@dataclass(slots=True)
class References:
    """What must stay."""

    files: set[str] = field(default_factory=set)
    """Paths of data files that a committed step needs."""
    folders: set[str] = field(default_factory=set)
    """Folders of steps of which all data stays, since it is not known which of it is needed."""
    unknown: list[str] = field(default_factory=list)
    """Why it is not known what some step needs; then all data of other steps and all shared chunks stay."""

    def needs(self, path: str) -> bool:
        """Tell whether a data file must stay."""
        return bool(self.unknown) or path in self.files or path.partition("/data/")[0] in self.folders


def bases_of(manifest: Manifest) -> set[str] | None:
    """Return the folders of steps that a step's chunks may lie in, beside its own; None if it does not say."""
    if "bases" not in manifest.options:
        return None
    try:
        return set(map(step_path, bases_in(manifest)))
    except FormatError:
        return None


def files_of(storage: Storage, step: Committed, manifest: Manifest, threads: int = 8) -> frozenset[str]:
    """Return the paths of all data files that a step needs.

    Raises:
        CorruptionError, FormatError: one of its indexes is damaged.
    """
    key = (storage.url, step.folder, step.commit.manifest_sha256)
    with _lock:
        known = _known.get(key)
    if known is None:
        with ThreadPoolExecutor(max(1, min(threads, manifest.world))) as pool:
            parts = pool.map(lambda writer: _paths(storage, step, manifest, writer), range(manifest.world))
            known = frozenset(path for part in parts for path in part)
        with _lock:
            _known[key] = known
            while len(_known) > _MOST:
                _known.popitem(last=False)
    return known


def _paths(storage: Storage, step: Committed, manifest: Manifest, writer: int) -> list[str]:
    return [file.path for file in read_index(storage, step, manifest, writer).files]


def references(storage: Storage, steps: Iterable[Committed], wanted: set[str], *, shared: bool) -> References:
    """Return what steps need of some folders, and of the shared chunks.

    Args:
        storage: the store.
        steps: those that stay.
        wanted: the folders whose data may go.
        shared: whether there are shared chunks, which a manifest does not list.
    """
    found = References()
    for step in steps:
        try:
            manifest = read_manifest(storage, step)
        except StorageError:
            raise
        except CheckpointError as error:
            found.unknown.append(f"step {step.step}: {error}")
            continue
        bases = bases_of(manifest)
        if not shared and bases is not None and not bases & wanted:
            continue
        try:
            found.files |= files_of(storage, step, manifest)
        except StorageError:
            raise
        except CheckpointError as error:
            if bases is None or shared:
                found.unknown.append(f"step {step.step}: {error}")
            found.folders |= bases or set()
    return found
