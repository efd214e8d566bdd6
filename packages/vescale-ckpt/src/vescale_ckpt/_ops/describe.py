"""What is in a store and in a step, without reading any tensor: for `ls` and `show`."""

from __future__ import annotations

import fnmatch
import os
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from .._format import (
    Committed,
    Index,
    Manifest,
    committed,
    find,
    newest,
    problems,
    read_index,
    read_manifest,
    read_store,
    step_path,
)
from .._geometry import Explicit, Layout
from .._state.nodes import leaves
from .._storage import Storage, open_storage
from ..errors import CheckpointError, StorageError
from .leases import lease_text
from .scan import scan

__all__ = ["Leaf", "StepInfo", "StepView", "StoreView", "describe", "layout_text", "steps"]

THREADS = 8


@dataclass(frozen=True, slots=True)
class StepInfo:
    """A step in a list of steps."""

    step: int
    """Number of the step."""
    folder: str
    """Its folder in the store."""
    generation: int
    """How often the step was saved before."""
    created: float | None
    """When the save began, in seconds since 1970; None where the manifest is damaged."""
    tensors: int
    """Number of tensors, rank-local ones left out."""
    nbytes: int
    """Bytes of those tensors in memory."""
    new_bytes: int
    """Bytes of chunks that this save has stored."""
    shared_bytes: int
    """Bytes of chunks that it shares with earlier steps, or with the whole store."""
    writers: int
    """Number of ranks that wrote it."""
    pinned: bool
    """Whether retention leaves it alone."""
    problem: str
    """What is wrong with manifest or indexes; empty where nothing is. Data is not read: `verify` does that."""
    metadata: Any
    """The caller's."""


@dataclass(frozen=True, slots=True)
class StoreView:
    """What is in a store."""

    path: str
    """The store."""
    steps: tuple[StepInfo, ...]
    """The committed steps, rising."""
    others: tuple[tuple[str, str], ...]
    """(folder, what it is) of saves that run, that never finished, or whose COMMIT is damaged."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of a state."""

    name: str
    """Its key."""
    kind: str
    """"tensor", "value", or "local" for a value of each rank."""
    dtype: str
    """Of a tensor; else empty."""
    shape: tuple[int, ...]
    """Of a tensor."""
    layout: str
    """How a tensor was sharded when it was saved."""
    nbytes: int
    """Bytes in memory."""
    new_bytes: int
    """Bytes that this step has stored for it; an alias counts none."""
    shared_bytes: int
    """Bytes that it shares with earlier steps."""
    codecs: tuple[str, ...]
    """How its chunks are encoded."""
    alias_of: str
    """Key of the leaf that is the same tensor; empty where there is none before it."""
    value: Any
    """Of a value, as the JSON of the manifest."""


@dataclass(frozen=True, slots=True)
class StepView:
    """What is in a step."""

    info: StepInfo
    """In sum."""
    leaves: tuple[Leaf, ...]
    """All leaves, or those that were asked for."""
    options: dict[str, Any]
    """How it was saved."""

    @property
    def dedup_ratio(self) -> float:
        """All bytes that are stored for the step, per byte that the step has added: 1 where nothing is shared."""
        return _ratio(self.info.new_bytes + self.info.shared_bytes, self.info.new_bytes)

    @property
    def compression_ratio(self) -> float:
        """Bytes in memory per byte stored."""
        return _ratio(self.info.nbytes, self.info.new_bytes + self.info.shared_bytes)


def _ratio(whole: int, part: int) -> float:
    return whole / part if part else (1.0 if not whole else float("inf"))


def steps(path: str | os.PathLike[str] | Storage) -> StoreView:
    """List a store.

    Args:
        path: the store.

    Returns:
        Its steps, and what else lies below `steps/`.

    Raises:
        MissingStepError: there is no store.
        StorageError: the storage failed.
    """
    storage = open_storage(path)
    read_store(storage)
    folders = scan(storage)
    there = newest(committed(storage))
    found = []
    for entry in there:
        pinned = entry.folder in folders and folders[entry.folder].pinned
        found.append(_info(storage, entry, pinned)[0])
    texts = {step_path(p.name): p.text for p in problems(storage) if p.kind != "manifest"}
    for name, folder in folders.items():
        if name in texts and folder.removed:
            texts[name] = "removed; holds data that later steps refer to, or that the next gc takes"
        elif name in texts and folder.lease is not None:
            texts[name] = f"being saved, or a save that has died: {lease_text(folder.lease.expires, time.time())}"
    current = {entry.folder for entry in there}
    for entry in committed(storage):
        if entry.folder not in current:
            texts[entry.folder] = f"an older save of step {entry.step}"
    return StoreView(storage.url, tuple(found), tuple(sorted(texts.items())))


def describe(path: str | os.PathLike[str] | Storage, step: int | str = "latest", keys: str | None = None) -> StepView:
    """Describe a step.

    Args:
        path: the store.
        step: number of the step, or "latest".
        keys: only the leaves whose name this glob matches, or that lie below a name that it matches.

    Returns:
        The step and its leaves.

    Raises:
        MissingStepError: there is no such step.
        CorruptionError, FormatError: its manifest or an index is damaged.
    """
    storage = open_storage(path)
    entry = find(storage, step)
    manifest = read_manifest(storage, entry)
    indexes = _indexes(storage, entry, manifest)
    folder = scan(storage).get(entry.folder)
    info = _sum(entry, manifest, indexes, folder is not None and folder.pinned, "")
    found = [leaf for leaf in _leaves(entry, manifest, indexes) if keys is None or _matches(leaf.name, keys)]
    return StepView(info, tuple(found), dict(manifest.options))


def _matches(name: str, keys: str) -> bool:
    return fnmatch.fnmatchcase(name, keys) or fnmatch.fnmatchcase(name, f"{keys}.*")


def _indexes(storage: Storage, entry: Committed, manifest: Manifest) -> list[Index]:
    with ThreadPoolExecutor(min(THREADS, manifest.world)) as pool:
        return list(pool.map(lambda writer: read_index(storage, entry, manifest, writer), range(manifest.world)))


def _info(storage: Storage, entry: Committed, pinned: bool) -> tuple[StepInfo, Manifest | None]:
    manifest = None
    try:
        manifest = read_manifest(storage, entry)
        return _sum(entry, manifest, _indexes(storage, entry, manifest), pinned, ""), manifest
    except StorageError:
        raise
    except CheckpointError as error:
        if manifest is not None:
            return _sum(entry, manifest, [], pinned, str(error)), manifest
        gone = StepInfo(
            entry.step,
            entry.folder,
            entry.commit.generation,
            None,
            0,
            0,
            entry.commit.bytes,
            0,
            0,
            pinned,
            str(error),
            None,
        )
        return gone, None


def _sum(entry: Committed, manifest: Manifest, indexes: list[Index], pinned: bool, problem: str) -> StepInfo:
    shared = sum(_stored(entry, index)[1] for index in indexes)
    nbytes = sum(record.nbytes for record in manifest.tensors)
    nbytes += sum(record.nbytes for index in indexes for record in index.local_tensors)
    new = sum(_stored(entry, index)[0] for index in indexes) if indexes else entry.commit.bytes
    return StepInfo(
        entry.step,
        entry.folder,
        entry.commit.generation,
        manifest.created,
        len(manifest.tensors),
        nbytes,
        new,
        shared,
        manifest.world,
        pinned,
        problem,
        manifest.metadata,
    )


def _stored(entry: Committed, index: Index) -> tuple[int, int]:
    """Return the bytes of an index's chunks in this step, inline ones too, and elsewhere; each place counts once."""
    own = f"{entry.folder}/"
    mine = [file.path.startswith(own) for file in index.files]
    table = index.chunks
    places = {(f, o): s for f, o, s in zip(table.file, table.offset, table.stored, strict=True)}
    new = sum(size for (file, _), size in places.items() if mine[file])
    return new + sum(map(len, index.inline.values())), sum(places.values()) - new


def _leaves(entry: Committed, manifest: Manifest, indexes: list[Index]) -> list[Leaf]:
    new, shared, codecs = _per_tensor(entry, manifest, indexes)
    first: dict[int, str] = {}
    found = []
    for leaf in leaves(manifest.tree):
        if leaf.record is None:
            kind = "value" if leaf.slot is None else "local"
            found.append(Leaf(leaf.name, kind, "", (), "", 0, 0, 0, (), "", leaf.node if leaf.slot is None else None))
            continue
        record, alias = manifest.tensors[leaf.record], first.setdefault(leaf.record, leaf.name)
        own = alias == leaf.name
        found.append(
            Leaf(
                leaf.name,
                "tensor",
                record.dtype,
                record.shape,
                layout_text(manifest.layouts[record.layout]),
                record.nbytes,
                new[leaf.record] if own else 0,
                shared[leaf.record] if own else 0,
                tuple(sorted(codecs[leaf.record])),
                "" if own else alias,
                None,
            )
        )
    return found


def _per_tensor(
    entry: Committed, manifest: Manifest, indexes: list[Index]
) -> tuple[Counter[int], Counter[int], dict[int, set[str]]]:
    """Return per tensor the bytes stored in this step, those stored elsewhere, and the codecs."""
    new: Counter[int] = Counter()
    shared: Counter[int] = Counter()
    codecs: dict[int, set[str]] = defaultdict(set)
    own = f"{entry.folder}/"
    for index in indexes:
        mine = [file.path.startswith(own) for file in index.files]
        names = ["raw", *index.codecs]
        for record in index.pieces:
            if record.tensor >= len(manifest.tensors):
                continue
            for row in range(record.first, record.first + record.count):
                side = new if mine[index.chunks.file[row]] else shared
                side[record.tensor] += index.chunks.stored[row]
                codecs[record.tensor].add(names[index.chunks.codec[row]])
        for number, data in index.inline.items():
            if number < len(manifest.tensors):
                new[number] += len(data)
                codecs[number].add("inline")
    return new, shared, codecs


def layout_text(layout: Layout) -> str:
    """Return a layout as a few words.

    Example:
        >>> from vescale_ckpt._geometry import Mesh, Rule
        >>> layout_text(Rule(Mesh((2, 4), range(8)), ("R", "S(0)")))
        'R, S(0) on 2x4'
    """
    if isinstance(layout, Explicit):
        boxes = sum(len(part) for _, part in layout.parts)
        return f"{boxes} boxes on {len(layout.parts)} ranks"
    if len(layout.mesh.ranks) == 1:
        return "one rank"
    return f"{', '.join(layout.placements)} on {'x'.join(map(str, layout.mesh.shape))}"
