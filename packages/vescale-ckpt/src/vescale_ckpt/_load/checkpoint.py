"""One step of a store, open for reading: its keys, its values, and tensors of which only what is asked for is read."""

from __future__ import annotations

import difflib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from .. import _state
from .._format import Commit, Committed, Index, Manifest, TensorRecord, find, read_index, read_manifest
from .._geometry import Box
from .._state import dtype_of
from .._storage import Storage, open_storage
from .._threads import Workers
from .._words import counted
from ..errors import CorruptionError, MismatchError, MissingStepError
from .earlier import with_earlier
from .plan import IndexView, Plan, Planner
from .reader import Damage, Reader, ReadStats, corruption
from .target import Request
from .view import TensorView

__all__ = ["Checkpoint", "open_checkpoint"]

PARTLY = "The targets hold what could be read; they are not valid."
INDEX_THREADS = 8
"""Indexes that are read at a time: they are small, and reading them is mostly waiting."""


def open_checkpoint(
    path: str | os.PathLike[str] | Storage, step: int | str = "latest", *, threads: int | None = None
) -> Checkpoint:
    """Open a step for reading. Needs no process group and no mesh, whatever the step was saved with.

    Args:
        path: the store.
        step: number of the step, "latest", or the name of a step's folder.
        threads: that read at the same time; None: 2.

    Raises:
        MissingStepError: there is no such step.
        CorruptionError: the manifest is damaged.
        FormatError: it was written by a newer version, or is none.

    Example:
        >>> import tempfile, torch, vescale_ckpt as ck
        >>> folder = tempfile.mkdtemp()
        >>> _ = ck.save(folder, {"model": {"w": torch.arange(12).view(4, 3)}}, step=7)
        >>> with ck.open(folder) as checkpoint:
        ...     checkpoint.step, checkpoint.names, checkpoint.tensor("model.w")[1:3, 0].tolist()
        (7, ('model.w',), [3, 6])
    """
    storage = open_storage(path)
    return Checkpoint(storage, find(storage, step), threads=threads)


class Checkpoint:
    """A step of a store; made by `open_checkpoint`, which is `vescale_ckpt.open`. Threads may read at once."""

    def __init__(
        self,
        storage: Storage,
        committed: Committed,
        *,
        manifest: Manifest | None = None,
        threads: int | None = None,
    ) -> None:
        """Read the manifest, unless it is given; its digest is compared."""
        self.storage = storage
        """The store."""
        self.folder: str = committed.folder
        """Folder of the step in the store."""
        self.commit: Commit = committed.commit
        """What its COMMIT says."""
        self.manifest: Manifest = _manifest(storage, committed) if manifest is None else manifest
        """What it holds."""
        self.names: tuple[str, ...] = tuple(record.name for record in self.manifest.tensors)
        """Names of the tensors, but for those of single ranks."""
        self._committed, self._threads = committed, threads
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self._lock = threading.Lock()
        self._indexes: dict[int, IndexView] = {}
        self._keys: dict[str, int] | None = None
        self._planner = Planner(self.manifest, self._index_view, self.prefetch)
        self._reader = Reader(storage)

    def __repr__(self) -> str:
        size = sum(record.nbytes for record in self.manifest.tensors)
        return f"<Checkpoint {self.storage.url} step {self.step}: {len(self.names)} tensors, {size} bytes>"

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the files that are open."""
        self._reader.files.close()

    @property
    def step(self) -> int:
        """Number of the step."""
        return self.commit.step

    @property
    def metadata(self) -> Any:
        """What the caller of `save` wanted to be kept."""
        return self.manifest.metadata

    def __contains__(self, name: object) -> bool:
        return name in self._numbers

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, key: str) -> Any:
        """Return what stands at a key: a `TensorView`, a value, or a dict or list of those.

        Args:
            key: keys on the way, joined by dots, such as "opt.state.0.exp_avg".
        """
        if key in self.keys():
            return self.tensor(key)
        root = _state.parse(self.manifest.tree, len(self.names))
        for item, name in _named_items(root):
            if name == key:
                return _state.build(item, self._view, lambda _: None)
        raise KeyError(f"{key}: not in step {self.step}." + _near(key, self.keys()))

    def keys(self) -> dict[str, int]:
        """Return the number of the tensor at each key of the state that holds one; tied ones have the same number."""
        if self._keys is None:
            root = _state.parse(self.manifest.tree, len(self.names))
            names = _state.leaf_names(root)
            tensors = (leaf for leaf in _state.leaves_of(root) if leaf.kind in ("tensor", "numpy"))
            self._keys = {names[id(leaf)]: leaf.number for leaf in tensors}
        return self._keys

    def number(self, name: str) -> int:
        """Return the number of a tensor.

        Raises:
            KeyError: there is none of that name; the message has names that are near.
        """
        found = self._numbers.get(name)
        if found is None:
            found = self.keys().get(name)
        if found is None:
            raise KeyError(f"{name}: not a tensor of step {self.step}." + _near(name, self.keys()))
        return found

    def record(self, number: int) -> TensorRecord:
        """Return the manifest's record of a tensor."""
        return self.manifest.tensors[number]

    def tensor(self, name: str) -> TensorView:
        """Return a tensor of which nothing is read before it is indexed.

        Raises:
            KeyError: there is none of that name; the message has names that are near.
        """
        return self._view(self.number(name))

    def tree(self, rank: int | None = None) -> Any:
        """Return the whole state with `TensorView`s in place of tensors, the same one where they are tied.

        Args:
            rank: whose own values are filled in; None: a `Local` without a value stands for them.
        """
        own = None if rank is None else self.local(rank)
        local: Callable[[int], Any] = (lambda _: _state.Local(None)) if own is None else own.__getitem__
        return _state.unpack(self.manifest.tree, self._view, local, tensors=len(self.names))

    def local(self, rank: int) -> list[Any]:
        """Return the values that belong to one rank, with `TensorView`s; None for those that it has not."""
        index = self.index(rank)
        records = index.local_tensors

        def view(number: int) -> TensorView:
            return TensorView(self, number, records[number], rank)

        return [
            None
            if _state.is_absent(node)
            else _state.unpack(node, view, lambda _: None, tensors=len(records), locals=0)
            for node in index.local
        ]

    def index(self, writer: int) -> Index:
        """Return what a writer wrote; read once, after its digest was compared.

        Raises:
            CorruptionError: it is damaged.
            FormatError: it is none.
        """
        return self._index_view(writer).index

    def read(
        self,
        number: int,
        box: Box | None = None,
        out: Tensor | None = None,
        *,
        writer: int | None = None,
        device: torch.device | str | None = None,
        verify: bool = True,
    ) -> Tensor:
        """Read a box of a tensor; `TensorView` is the comfortable way.

        Args:
            number: of the tensor; with `writer`, of its own ones, counted from 0.
            box: which elements; None: all.
            out: where they go, any strides and device; None: a new tensor.
            writer: whose own tensor it is; None: one of the whole.
            device: of the new tensor; None: the CPU.
            verify: check the checksums of all chunks that are read.

        Raises:
            CorruptionError: a chunk is damaged.
            MismatchError: `out` has another dtype.
        """
        number += 0 if writer is None else len(self.names)
        record = self._planner.record(number, writer)
        box = Box.whole(record.shape) if box is None else box
        dtype = dtype_of(record.dtype)
        consequence = PARTLY
        if out is None:
            out, consequence = torch.empty(box.shape, dtype=dtype, device=device), "Nothing was returned."
        elif out.dtype != dtype:
            raise MismatchError(f"out: {record.name} is {record.dtype}, but the target is {out.dtype}.")
        self.read_many([Request(number, box, out, writer)], verify=verify, consequence=consequence)
        return out

    def read_many(
        self,
        requests: Iterable[Request],
        *,
        verify: bool = True,
        threads: int | None = None,
        progress: Callable[[int], None] | None = None,
        consequence: str = PARTLY,
    ) -> ReadStats:
        """Read many boxes at once, each chunk once.

        Args:
            requests: what to read, and where it goes.
            verify: check the checksums of all chunks.
            threads: that read at the same time.
            progress: called with numbers of bytes that have been read, by any thread.
            consequence: what a damaged chunk means for the caller, for the error.

        Raises:
            CorruptionError: chunks are damaged; the message names tensors, files and offsets.
            FormatError: the pieces of the checkpoint do not hold what is wanted.
            StorageError: the storage failed.
        """
        plan = self._planner.plan(list(requests))
        stats, damages = self.carry_out(plan, verify=verify, threads=threads, progress=progress)
        if damages:
            error = corruption(damages, self.storage.url, self.folder, consequence)
            raise with_earlier(error, self.storage, self.step)
        return stats

    def carry_out(
        self,
        plan: Plan,
        *,
        verify: bool = True,
        threads: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> tuple[ReadStats, list[Damage]]:
        """Fill the targets of a plan and return what was read and what is damaged."""
        with torch.no_grad():
            return self._reader.read(plan, verify=verify, threads=threads or self._threads, progress=progress)

    def prefetch(self, writers: Iterable[int]) -> None:
        """Read the indexes of several writers at the same time, as far as they have not been read."""
        with self._lock:
            missing = [writer for writer in writers if writer not in self._indexes]
        if len(missing) > 1:
            with Workers(min(INDEX_THREADS, len(missing))) as workers:
                workers.map(self._index_view, missing)

    def _view(self, number: int) -> TensorView:
        return TensorView(self, number, self.manifest.tensors[number])

    def _index_view(self, writer: int) -> IndexView:
        with self._lock:
            found = self._indexes.get(writer)
        if found is None:
            if not 0 <= writer < self.manifest.world:
                raise MissingStepError(
                    f"rank: step {self.step} was saved by {counted(self.manifest.world, 'rank')}, numbered from 0, so "
                    f"there is none of number {writer}."
                )
            try:
                found = IndexView(read_index(self.storage, self._committed, self.manifest, writer))
            except CorruptionError as error:
                raise with_earlier(error, self.storage, self.step) from None
            with self._lock:
                found = self._indexes.setdefault(writer, found)
        return found


def _manifest(storage: Storage, committed: Committed) -> Manifest:
    try:
        return read_manifest(storage, committed)
    except CorruptionError as error:
        raise with_earlier(error, storage, committed.step) from None


def _named_items(root: Any) -> Iterator[tuple[Any, str]]:
    stack = [root]
    while stack:
        item = stack.pop()
        yield item, ".".join(map(str, item.path))
        stack.extend(child for _, child in item.children)


def _near(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), 3, 0.6)
    return f" Near: {', '.join(near)}." if near else ""
