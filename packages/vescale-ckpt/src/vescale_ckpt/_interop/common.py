"""What all exports and imports share: reports, the choice of tensors, reading in blocks, files that appear whole."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .. import _state
from .._format import TensorRecord
from .._geometry import Box, Piece
from .._load import Checkpoint, Request
from .._load.names import Keys, chooser
from .._load.target import copy
from .._save import SaveInfo
from ..errors import CheckpointError, MismatchError, StateError, StorageError

__all__ = [
    "BLOCK_BYTES",
    "ExportReport",
    "ImportReport",
    "Leaves",
    "NewFiles",
    "Progress",
    "blocks",
    "export_dtype",
    "fill",
    "leaves_to_export",
    "local_path",
    "read_blocks",
    "record_of",
    "refuse_existing",
    "refuse_values",
]

BLOCK_BYTES = 16 << 20
"""What is read, converted and written at a time."""
Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes of all)."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What was exported."""

    out: str
    """The file or folder."""
    format: str
    """"safetensors", "hf", "torch" or "dcp"."""
    step: int
    """The step that was exported."""
    files: tuple[str, ...]
    """Paths of the files that were written."""
    tensors: int
    """How many tensors were written."""
    bytes: int
    """Bytes of their elements."""
    skipped: tuple[str, ...] = ()
    """Names of leaves that the format cannot hold."""
    tied: Mapping[str, str] | None = None
    """Names that were left out, since they are the same tensor as the name that they stand with."""


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What was imported."""

    source: str
    """The file or folder."""
    format: str
    """"safetensors", "torch" or "dcp"."""
    tensors: int
    """How many distinct tensors were saved."""
    bytes: int
    """Bytes of their elements."""
    values: int
    """How many other values were saved."""
    info: SaveInfo
    """The step that was made."""


@dataclass(frozen=True, slots=True)
class Leaves:
    """The leaves of a step that are to be exported."""

    tensors: dict[str, int]
    """Name -> number of the tensor, in the order of the state; tied ones have one number."""
    values: tuple[str, ...]
    """Names of chosen leaves that are no tensors of all ranks."""


def leaves_to_export(checkpoint: Checkpoint, keys: Keys) -> Leaves:
    """Return the leaves whose names are wanted.

    Raises:
        MismatchError: none is.
    """
    root = _state.parse(checkpoint.manifest.tree, len(checkpoint.names))
    names, wanted = _state.leaf_names(root), chooser(keys)
    tensors, values = {}, []
    for leaf in _state.leaves_of(root):
        name = names[id(leaf)]
        if not wanted(name):
            continue
        if leaf.kind in ("tensor", "numpy"):
            tensors[name] = leaf.number
        else:
            values.append(name)
    if not tensors and not values:
        raise MismatchError(
            f"keys: none of the {len(names)} keys of step {checkpoint.step} is wanted by {keys!r}; there are "
            f"{', '.join(sorted(names.values())[:5]) or 'none'}."
        )
    return Leaves(tensors, tuple(values))


def export_dtype(stored: str, wanted: torch.dtype | str | None) -> torch.dtype:
    """Return the dtype that a tensor has outside: `wanted` if it holds floating point numbers, else its own.

    Args:
        stored: name of its dtype.
        wanted: a floating point dtype or its name; None: no conversion.

    Example:
        >>> export_dtype("float32", "bfloat16"), export_dtype("int64", "bfloat16")
        (torch.bfloat16, torch.int64)
    """
    own = _state.dtype_of(stored)
    if wanted is None:
        return own
    target = wanted if isinstance(wanted, torch.dtype) else _state.DTYPES.get(wanted)
    if target is None or not target.is_floating_point:
        raise ValueError(f'dtype: expected a floating point dtype such as "bfloat16", or None, but got {wanted!r}.')
    return target if own.is_floating_point else own


def blocks(numel: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """Yield (first, one past the last) element of the blocks of a tensor."""
    step = max(1, BLOCK_BYTES // itemsize)
    for start in range(0, numel, step):
        yield start, min(numel, start + step)


def fill(checkpoint: Checkpoint, number: int, piece: Piece, out: Tensor, *, verify: bool) -> None:
    """Read a piece of a tensor.

    Args:
        checkpoint: an open step.
        number: of the tensor; from the number of all tensors on, of those of the only writer.
        piece: which elements.
        out: 1-D, of their number; another dtype converts.
        verify: check the checksums.
    """
    count = len(checkpoint.names)
    stored = _state.dtype_of(record_of(checkpoint, number).dtype)
    writer = 0 if number >= count else None
    target = out if out.dtype == stored else torch.empty(piece.numel, dtype=stored)
    requests, at = [], 0
    for box in piece.boxes():
        requests.append(Request(number, box, target[at : at + box.numel].view(box.shape), writer))
        at += box.numel
    checkpoint.read_many(requests, verify=verify)
    if target is not out:
        copy(out, target)


def record_of(checkpoint: Checkpoint, number: int) -> TensorRecord:
    """Return the record of a tensor; from the number of all tensors on, of one of the only writer's own."""
    count = len(checkpoint.names)
    return checkpoint.record(number) if number < count else checkpoint.index(0).local_tensors[number - count]


def read_blocks(checkpoint: Checkpoint, number: int, dtype: torch.dtype, *, verify: bool) -> Iterator[Tensor]:
    """Yield the elements of a tensor in row-major order, as 1-D tensors of one block each."""
    record = record_of(checkpoint, number)
    whole = Box.whole(record.shape)
    for start, stop in blocks(whole.numel, record.itemsize):
        out = torch.empty(stop - start, dtype=dtype)
        fill(checkpoint, number, Piece(whole, start, stop), out, verify=verify)
        yield out


def refuse_existing(out: Path, overwrite: bool) -> None:
    """Raise CheckpointError if something is at `out` that must not be replaced; an empty folder may be."""
    if overwrite or not os.path.lexists(out):
        return
    if out.is_dir() and not any(out.iterdir()):
        return
    raise CheckpointError(f"out: {out} is there already. Choose another place, or pass overwrite=True.")


class NewFiles:
    """Files that take their places together when the block ends well, and of which nothing stays when it does not."""

    def __init__(self) -> None:
        """Begin without any."""
        self._partial: dict[Path, Path] = {}

    def __enter__(self) -> NewFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is None:
                for path, partial in self._partial.items():
                    with _storage_errors(path):
                        os.replace(partial, path)
        finally:
            for partial in self._partial.values():
                partial.unlink(missing_ok=True)

    def place(self, path: Path) -> Path:
        """Return where a file is to be written that will be moved to `path`."""
        with _storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._partial[path] = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        return self._partial[path]

    @contextlib.contextmanager
    def open(self, path: Path) -> Iterator[BinaryIO]:
        """Give a file to write; it is durable when the block ends."""
        partial = self.place(path)
        with _storage_errors(path), open(partial, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())


@contextlib.contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise StorageError(error.errno, f"out: {path}: {error.strerror or error}") from error


def refuse_values(names: Iterable[str], values: str, what: str) -> tuple[str, ...]:
    """Return the names of leaves that are left out, or raise StateError, as the caller has chosen.

    Args:
        names: of leaves that the format cannot hold.
        values: "skip" or "error".
        what: the format, for the message.
    """
    if values not in ("skip", "error"):
        raise ValueError(f'values: expected "skip" or "error", but got {values!r}.')
    found = tuple(names)
    if found and values == "error":
        raise StateError(
            f"{what} holds tensors only, but {len(found)} keys are other values: {', '.join(found[:5])}. Choose the "
            f'tensors with keys=..., or pass values="skip" to leave these out.'
        )
    return found


def local_path(where: Any, name: str) -> Path:
    """Return an argument that must be a path of this machine."""
    if not isinstance(where, (str, os.PathLike)):
        raise ValueError(f"{name}: expected a path, but got {where!r}.")
    text = os.fspath(where)
    if isinstance(text, bytes) or "://" in text:
        raise ValueError(f"{name}: expected a path of this machine, but got {text!r}.")
    return Path(text)
