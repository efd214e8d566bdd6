"""Saves what does not fit in memory: the bytes of a piece are fetched when it is written, and dropped after.

The state is given with an empty marker in place of each tensor, and per marker a source that knows how to read it.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from .. import _state
from .._coordination.single import Alone
from .._format import TensorRecord
from .._geometry import Box, Explicit, Layout, Mesh, Piece, Rule, normal
from .._save.base import load_base, recall
from .._save.begin import begin
from .._save.finish import Part, finish
from .._save.handle import Meter, SaveInfo
from .._save.options import SaveOptions
from .._save.plan import total_bytes
from .._save.running import wait_for
from .._save.save import check_metadata, check_step, clean_up
from .._save.stage import Staged, Task
from .._state import TensorSpec
from .._storage import Storage, open_storage
from ..errors import FormatError
from .common import BLOCK_BYTES, Progress

if TYPE_CHECKING:
    from .._coordination import Coordinator

__all__ = ["LazyStaged", "Source", "layout_of", "marker", "save_stream"]

Fetch = Callable[[Piece], Tensor]
"""Returns the bytes of a piece of a box: 1-D uint8 on the CPU."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tensor comes from."""

    dtype: str
    """Its dtype."""
    shape: tuple[int, ...]
    """Its shape."""
    fetch: Fetch
    """Reads a piece of one of the boxes."""
    boxes: tuple[Box, ...] | None = None
    """Boxes that make up the tensor, each read as one; None: it is read in blocks of any size."""


def marker() -> Tensor:
    """Return an empty tensor that is unlike all others."""
    return torch.empty(0, dtype=torch.uint8)


class _Kept:
    """The few pieces whose bytes are in memory."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._found: OrderedDict[int, Tensor] = OrderedDict()
        self._busy: dict[int, threading.Lock] = {}

    def get(self, key: int, fetch: Callable[[], Tensor]) -> Tensor:
        """Return what `fetch` returned for this key, if it is still here; else fetch it, on one thread only."""
        with self._lock:
            busy = self._busy.setdefault(key, threading.Lock())
        with busy:
            with self._lock:
                if key in self._found:
                    self._found.move_to_end(key)
                    return self._found[key]
                while len(self._found) >= self._most:
                    self._found.popitem(last=False)
            data = fetch()
            with self._lock:
                self._found[key] = data
            return data


class LazyStaged(Staged):
    """A task whose bytes are fetched when they are asked for."""

    __slots__ = ("_fetch", "_kept")
    _fetch: Callable[[], Tensor]
    _kept: _Kept

    def __init__(self, task: Task, fetch: Callable[[], Tensor], kept: _Kept) -> None:
        """Take what is written and what returns its bytes."""
        object.__setattr__(self, "task", task)
        object.__setattr__(self, "_fetch", fetch)
        object.__setattr__(self, "_kept", kept)

    @property
    def data(self) -> Tensor:
        """Bytes of the piece, 1-D uint8."""
        return self._kept.get(id(self), self._fetch)


def layout_of(shape: tuple[int, ...], boxes: Sequence[Box], writer: int = 0) -> Layout:
    """Return the layout of a tensor that one writer holds, in these boxes."""
    whole = Box.whole(shape)
    if all(normal(Piece(box, 0, box.numel), shape).box == whole for box in boxes):
        boxes = [whole] if whole.numel else []
    return Explicit(((writer, tuple(boxes)),)) if list(boxes) != [whole] or writer else _alone()


def save_stream(
    path: str | os.PathLike[str] | Storage,
    state: Any,
    sources: Mapping[int, Source],
    *,
    step: int | None,
    metadata: Any,
    options: SaveOptions,
    progress: Progress | None = None,
) -> tuple[SaveInfo, _state.Packed]:
    """Save a state whose tensors are read piece by piece.

    Args:
        path: the store.
        state: nested state with markers, or with ordinary tensors, in place of tensors.
        sources: id of the marker or tensor -> where its elements come from.
        step: number of the step; None: the one after the latest.
        metadata: JSON to keep with it.
        options: how to write.
        progress: called as bytes are read.

    Returns:
        What was written, and the state without its tensors.
    """
    check_step(step)
    check_metadata(metadata)
    storage = open_storage(path)
    wait_for(storage)
    packed, meter = _state.pack(state), Meter()
    if packed.local:
        raise FormatError(f"state: {packed.local_names[0]} is a value of one rank, which an import cannot have.")
    found = [sources[id(tensor)] for _, tensor in packed.tensors]
    specs = [
        TensorSpec(name, source.dtype, source.shape, layout_of(source.shape, source.boxes or [Box.whole(source.shape)]))
        for (name, _), source in zip(packed.tensors, found, strict=True)
    ]
    names = {number: (spec.name, spec.dtype) for number, spec in enumerate(specs)}
    start = begin(storage, step, options, ((0,),), total_bytes(specs))
    part = Part(
        storage,
        start,
        specs,
        packed.tree,
        metadata,
        [],
        list[TensorRecord](),
        [],
        names,
        options,
        None,
        lease=start.lease(storage, options),
    )
    try:
        if start.base is not None:
            part.base = recall(start.store, 0, 1, start.base) or load_base(storage, start.base, 0, 1)
        part.staged = list(_stage(found, options, progress))
        part.tasks = [item.task for item in part.staged]
        meter.total = sum(task.nbytes for task in part.tasks)
        return finish(part, cast("Coordinator", Alone()), meter), packed
    except BaseException:
        clean_up(part, 0)
        raise


def _stage(sources: Sequence[Source], options: SaveOptions, progress: Progress | None) -> list[Staged]:
    kept = _Kept(options.threads)
    lock, done = threading.Lock(), 0
    staged: list[Staged] = []
    for number, source in enumerate(sources):
        dtype = _state.dtype_of(source.dtype)
        for piece in _pieces(source, dtype.itemsize, options.chunk_bytes):
            task = Task(number, normal(piece, source.shape), (), source.shape, dtype, dtype.itemsize)

            def fetch(source: Source = source, piece: Piece = piece, size: int = task.nbytes) -> Tensor:
                nonlocal done
                data = source.fetch(piece)
                if data.numel() != size:
                    raise FormatError(f"a source gave {data.numel()} bytes for {piece}, not {size}.")
                with lock:
                    done += size
                    now = min(done, total)
                if progress is not None:
                    progress(now, total)
                return data

            staged.append(LazyStaged(task, fetch, kept))
    total = sum(item.task.nbytes for item in staged)
    return staged


def _pieces(source: Source, itemsize: int, chunk_bytes: int) -> list[Piece]:
    if source.boxes is not None:
        return [Piece(box, 0, box.numel) for box in source.boxes if box.numel]
    whole = Box.whole(source.shape)
    step = max(1, BLOCK_BYTES // chunk_bytes) * (chunk_bytes // itemsize)
    return [Piece(whole, at, min(whole.numel, at + step)) for at in range(0, whole.numel, step)]


def _alone() -> Layout:
    return Rule(Mesh((1,), (0,)), ("R",))
