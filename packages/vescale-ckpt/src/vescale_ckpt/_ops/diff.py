"""Diff: what changed between two steps. Chunks that are known to be the same bytes are not read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from .._format import Index, TensorRecord
from .._geometry import Box, normal
from .._state.nodes import leaves
from .._storage import Storage
from .compare import Distance, distance

if TYPE_CHECKING:
    from .._load import Checkpoint

__all__ = ["DiffReport", "TensorDiff", "ValueDiff", "diff"]

Path: TypeAlias = "str | os.PathLike[str] | Storage"
BLOCK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """One tensor in both steps."""

    name: str
    """Its key; that of a rank-local one says of which rank."""
    kind: str
    """"equal", "changed", "shape", "dtype", "only a" or "only b"."""
    a: str
    """Dtype and shape in the first step."""
    b: str
    """Dtype and shape in the second step."""
    read: bool = False
    """Whether the values were read; equal ones often are known to be without."""
    elements: int = 0
    """Number of elements."""
    different: int = 0
    """Number of elements that are not the same bits, where it is "changed"."""
    max_abs: float = 0.0
    """Largest absolute difference; NaN where an element is NaN on one side only."""
    mean_abs: float = 0.0
    """Mean absolute difference over all elements."""


@dataclass(frozen=True, slots=True)
class ValueDiff:
    """One value that is no tensor."""

    name: str
    """Its key."""
    kind: str
    """"equal", "changed", "only a" or "only b"."""
    a: Any
    """JSON in the first step."""
    b: Any
    """JSON in the second step."""


@dataclass(slots=True)
class DiffReport:
    """The outcome; `equal` where nothing differs."""

    a: tuple[str, int]
    """Store and step of the first."""
    b: tuple[str, int]
    """Store and step of the second."""
    tensors: list[TensorDiff] = field(default_factory=list)
    """By key."""
    values: list[ValueDiff] = field(default_factory=list)
    """By key."""
    notes: list[str] = field(default_factory=list)
    """What was not compared."""

    @property
    def equal(self) -> bool:
        """Whether keys, dtypes, shapes, bits and values are the same."""
        return not self.changes

    @property
    def changes(self) -> list[TensorDiff | ValueDiff]:
        """All that is not equal."""
        entries: list[TensorDiff | ValueDiff] = [*self.tensors, *self.values]
        return [entry for entry in entries if entry.kind != "equal"]


def diff(
    a: Path | tuple[Path, int | str],
    b: Path | tuple[Path, int | str],
    *,
    read: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> DiffReport:
    """Compare two steps, of one store or of two, tensor by tensor.

    Layouts do not matter. Memory is bounded: tensors are read in blocks.

    Args:
        a: a store, whose latest step is taken, or (store, step).
        b: likewise.
        read: read also what must be equal: chunks in the same place of the same file, or of equal size, CRC-32 and
            128-bit fingerprint.
        progress: called with (bytes done, bytes in total) of tensors.

    Returns:
        One entry per tensor and per value.

    Raises:
        MissingStepError: there is no such step.
        CorruptionError: a tensor that had to be read is damaged.

    Example:
        >>> import vescale_ckpt as ck, tempfile, torch
        >>> root = tempfile.mkdtemp()
        >>> for step in (1, 2):
        ...     _ = ck.save(root, {"weight": torch.full((1000,), float(step)), "bias": torch.ones(1000)}, step=step)
        >>> [(t.name, t.kind, t.max_abs) for t in ck.diff((root, 1), (root, 2)).tensors]
        [('bias', 'equal', 0.0), ('weight', 'changed', 1.0)]
    """
    from .._load import open_checkpoint

    (path_a, step_a), (path_b, step_b) = (_pair(side) for side in (a, b))
    with open_checkpoint(path_a, step_a) as first, open_checkpoint(path_b, step_b) as second:
        return _Diff(first, second, read, progress).run()


def _pair(side: Any) -> tuple[Any, int | str]:
    if isinstance(side, tuple):
        if len(side) != 2:
            raise ValueError(f"expected a store or (store, step), but got a tuple of {len(side)}.")
        return side[0], side[1]
    return side, "latest"


class _Side:
    """One of the two steps."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        manifest = checkpoint.manifest
        self.indexes = [checkpoint.index(writer) for writer in range(manifest.world)]
        self.store = checkpoint.storage.url
        self.tensors: dict[str, tuple[int, int | None]] = {}
        self.values: dict[str, Any] = {}
        for leaf in leaves(manifest.tree):
            if leaf.record is not None:
                self.tensors[leaf.name] = (leaf.record, None)
            elif leaf.slot is None:
                self.values[leaf.name] = leaf.node

    def add_local(self) -> None:
        """Take the values that belong to ranks."""
        for index in self.indexes:
            for number, record in enumerate(index.local_tensors):
                self.tensors[f"rank {index.writer}: {record.name}"] = (number, index.writer)
            for slot, node in enumerate(index.local):
                self.values[f"rank {index.writer}: local value {slot}"] = node

    def record(self, key: tuple[int, int | None]) -> TensorRecord:
        number, writer = key
        manifest = self.checkpoint.manifest
        return manifest.tensors[number] if writer is None else self.indexes[writer].local_tensors[number]

    def content(self, key: tuple[int, int | None]) -> tuple[list[Any], list[Any]]:
        """Return what is known of a tensor's bytes: where each stretch lies, and the sums over it."""
        number, writer = key
        world = len(self.checkpoint.manifest.tensors)
        wanted = number if writer is None else world + number
        shape = self.record(key).shape
        places: list[Any] = []
        sums: list[Any] = []
        missing = self.record(key).nbytes // self.record(key).itemsize
        for index in self.indexes if writer is None else [self.indexes[writer]]:
            if wanted in index.inline:
                return [("inline", index.inline[wanted])], [("inline", index.inline[wanted])]
            for record in index.pieces:
                if record.tensor == wanted:
                    piece = normal(record.piece, shape)
                    missing -= piece.numel
                    at = (piece.box.offset, piece.box.shape, piece.start, piece.stop)
                    chunks = list(_chunks(self.store, index, record.first, record.count))
                    places.append((at, [place for place, _ in chunks]))
                    sums.append((at, [known for _, known in chunks]))
        if missing:
            return [object()], [object()]  # equal to nothing: what is there says nothing of the rest
        return sorted(places), sorted(sums, key=lambda entry: entry[0])


def _chunks(store: str, index: Index, first: int, count: int) -> Iterator[tuple[Any, Any]]:
    for row in range(first, first + count):
        chunk = index.chunks.row(row)
        place = (store, index.files[chunk.file].path, chunk.offset, chunk.raw)
        # Without a fingerprint only the bytes themselves tell: an object is equal to nothing but itself.
        yield place, (chunk.raw, chunk.crc, chunk.fingerprint if any(chunk.fingerprint) else object())


class _Diff:
    def __init__(self, a: Checkpoint, b: Checkpoint, read: bool, progress: Callable[[int, int], None] | None) -> None:
        self._a, self._b, self._read, self._progress = _Side(a), _Side(b), read, progress
        self._seen: dict[tuple[Any, Any], tuple[Distance, bool]] = {}
        self._done = self._total = 0

    def run(self) -> DiffReport:
        a, b = self._a, self._b
        report = DiffReport((a.store, a.checkpoint.step), (b.store, b.checkpoint.step))
        if len(a.indexes) == len(b.indexes):
            a.add_local()
            b.add_local()
        elif any(index.local or index.local_tensors for side in (a, b) for index in side.indexes):
            report.notes.append(
                f"values of ranks were not compared: {len(a.indexes)} ranks wrote a, {len(b.indexes)} wrote b."
            )
        self._total = sum(self._a.record(key).nbytes for key in a.tensors.values())
        for name in sorted({*a.tensors, *b.tensors}):
            report.tensors.append(self._tensor(name))
            if name in a.tensors:
                self._advance(a.record(a.tensors[name]).nbytes)
        for name in sorted({*a.values, *b.values}):
            report.values.append(self._value(name))
        return report

    def _advance(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _value(self, name: str) -> ValueDiff:
        a, b = self._a.values, self._b.values
        if name not in a or name not in b:
            return ValueDiff(name, "only b" if name not in a else "only a", a.get(name), b.get(name))
        # As JSON, since True == 1 == 1.0 in Python.
        same = json.dumps(a[name], sort_keys=True) == json.dumps(b[name], sort_keys=True)
        return ValueDiff(name, "equal" if same else "changed", a[name], b[name])

    def _tensor(self, name: str) -> TensorDiff:
        key_a, key_b = self._a.tensors.get(name), self._b.tensors.get(name)
        if key_a is None or key_b is None:
            one = self._b.record(key_b) if key_b is not None else self._a.record(key_a)  # type: ignore[arg-type]
            return TensorDiff(
                name,
                "only b" if key_a is None else "only a",
                "" if key_a is None else text(one),
                "" if key_b is None else text(one),
            )
        a, b = self._a.record(key_a), self._b.record(key_b)
        for kind in ("shape", "dtype"):
            if getattr(a, kind) != getattr(b, kind):
                return TensorDiff(name, kind, text(a), text(b))
        if (key_a, key_b) not in self._seen:
            self._seen[(key_a, key_b)] = self._distance(a, key_a, key_b)
        found, read = self._seen[(key_a, key_b)]
        kind = "changed" if found.different else "equal"
        return TensorDiff(
            name, kind, text(a), text(b), read, found.elements, found.different, found.max_abs, found.mean_abs
        )

    def _distance(
        self, record: TensorRecord, key_a: tuple[int, int | None], key_b: tuple[int, int | None]
    ) -> tuple[Distance, bool]:
        if not self._read:
            known = zip(self._a.content(key_a), self._b.content(key_b), strict=True)
            if any(x == y for x, y in known):
                return Distance(record.nbytes // record.itemsize), False
        most = max(1, BLOCK_BYTES // record.itemsize)
        return distance(_reader(self._a, key_a), _reader(self._b, key_b), record.shape, most), True


def _reader(side: _Side, key: tuple[int, int | None]) -> Callable[[Box], Any]:
    number, writer = key
    return lambda box: side.checkpoint.read(number, box, writer=writer)


def text(record: TensorRecord) -> str:
    """Return dtype and shape of a tensor in short."""
    return f"{record.dtype}{list(record.shape)}"
