"""Import of torch.distributed.checkpoint folders: a chunk in memory at a time, every object with weights_only=True."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from typing import Any

import torch
from torch import Tensor

from .. import _state
from .._codec import as_bytes
from .._geometry import Box, Piece
from .._load.names import Keys, chooser
from .._save.options import SaveOptions
from .._storage import Storage
from ..errors import CorruptionError, FormatError, MismatchError
from .common import ImportReport, Progress, local_path
from .dcp_metadata import ForeignItem, ForeignTensor, read_dcp_metadata
from .names import below
from .nesting import nest
from .safetensors_source import nested_below
from .streaming import Source, marker, save_stream
from .torch_file import tensor_source

__all__ = ["FileSlice", "import_dcp"]


def import_dcp(
    src: str | os.PathLike[str],
    path: str | os.PathLike[str] | Storage,
    *,
    step: int | None = None,
    keys: Keys = None,
    under: str | None = None,
    overwrite: bool = False,
    metadata: Any = None,
    compress: str | None = None,
    dedup: str | None = "position",
    progress: Progress | None = None,
) -> ImportReport:
    """Save what a torch.distributed.checkpoint folder holds as a step, of whatever number of ranks it is.

    Nothing of the folder is run: its pickled `.metadata` is read by an unpickler that knows stand-ins only, objects
    with `weights_only=True`. Takes memory for one chunk, that is for one rank's shard of one tensor.

    Args:
        src: the folder, with its `.metadata`.
        path: the store.
        step: number of the step; None: the one after the latest.
        keys: pattern or patterns of names ("model.*"), or a function of a name; None: all.
        under: keys of the dict that the state is put in, joined by dots; None: it is the state.
        overwrite: save a step again that is there.
        metadata: JSON to keep with the step.
        compress: as for `save`.
        dedup: as for `save`.
        progress: called with (bytes done, bytes of all).

    Returns:
        What was saved. Dicts and lists are nested again where the folder says how.

    Raises:
        FormatError: the metadata or an object is malformed, or would run code; names the key.
        StateError: a value that no checkpoint holds.
    """
    options = SaveOptions(compress=compress, dedup=dedup, overwrite=overwrite, threads=1)
    place, folder = below(under), local_path(src, "src")
    foreign = read_dcp_metadata(folder)
    wanted = chooser(keys)
    names = [name for name in foreign.paths if wanted(name)]
    if not names:
        raise MismatchError(f"keys: none of the {len(foreign.paths)} keys of {folder} is wanted by {keys!r}.")
    leaves: list[tuple[tuple[str | int, ...], Any]] = []
    sources: dict[int, Source] = {}
    total = values = 0
    for name in names:
        tensor = foreign.tensors.get(name)
        if tensor is None:
            values += 1
            leaf = _value(name, foreign.values[name], sources)
        else:
            leaf = marker()
            sources[id(leaf)] = _source(name, tensor)
            total += Box.whole(tensor.shape).numel * _state.itemsize(tensor.dtype)
        leaves.append((foreign.paths[name], leaf))
    state = nested_below(place, nest(leaves))
    info, packed = save_stream(path, state, sources, step=step, metadata=metadata, options=options, progress=progress)
    return ImportReport(str(folder), "dcp", len(packed.tensors), total, values, info)


class FileSlice(io.RawIOBase):
    """Part of a file as a file of its own."""

    def __init__(self, item: ForeignItem) -> None:
        """Open it."""
        super().__init__()
        self._file = open(item.file, "rb", buffering=0)  # noqa: SIM115 - closed by `close`
        self._start, self._size, self._at = item.offset, item.length, 0

    def readable(self) -> bool:
        """Tell that it can be read."""
        return True

    def seekable(self) -> bool:
        """Tell that it can be sought in."""
        return True

    def tell(self) -> int:
        """Return the place."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"cannot seek to {base + offset}, which is before the beginning.")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer; return the number of bytes."""
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._size - self._at)]
        count = os.preadv(self._file.fileno(), [view], self._start + self._at) if len(view) else 0
        self._at += count
        return count

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


def _source(name: str, tensor: ForeignTensor) -> Source:
    by_box = dict(tensor.parts)

    def fetch(piece: Piece) -> Tensor:
        return _read_chunk(name, tensor, piece.box, by_box[piece.box])

    return Source(tensor.dtype, tensor.shape, fetch, tuple(by_box))


def _read_chunk(name: str, tensor: ForeignTensor, box: Box, item: ForeignItem) -> Tensor:
    found = _load(name, item)
    if type(found) is not Tensor or tuple(found.shape) != box.shape or found.dtype != _state.dtype_of(tensor.dtype):
        kind = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise FormatError(f"{item.file}: {name}: must hold {tensor.dtype} {box.shape} at {item.offset}, but is {kind}.")
    plain = tensor_source(found, name)
    return plain.fetch(Piece(Box.whole(box.shape), 0, box.numel)) if box.numel else as_bytes(found.view(-1))


def _value(name: str, item: ForeignItem, sources: dict[int, Source]) -> Any:
    """Return an object that is no tensor of its own; tensors in it are kept in memory."""
    found = _load(name, item)
    stack = [found]
    while stack:
        value = stack.pop()
        if isinstance(value, Tensor):
            sources[id(value)] = tensor_source(value, name)
        elif isinstance(value, dict):
            stack.extend(value.values())
        elif isinstance(value, (list, tuple)):
            stack.extend(value)
    return found


def _load(name: str, item: ForeignItem) -> Any:
    with FileSlice(item) as raw, io.BufferedReader(raw, 1 << 16) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                # torch writes entries as they are; packed ones could become any number of bytes.
                if any(entry.compress_type or entry.file_size > item.length for entry in archive.infolist()):
                    raise FormatError(f"{item.file}: {name}: has compressed entries, which torch.save does not write.")
            file.seek(0)
            return torch.load(file, weights_only=True, map_location="cpu")
        except pickle.UnpicklingError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            why = next((line for line in lines if "global" in line.lower()), lines[0] if lines else "")
            raise FormatError(
                f"{item.file}: {name}: holds more than tensors and plain values, and reading it could run its code: "
                f"{why:.300} Leave it out with keys=...."
            ) from None
        except (zipfile.BadZipFile, RuntimeError, ValueError, EOFError, KeyError, TypeError, OSError) as error:
            if isinstance(error, (FormatError, CorruptionError)):
                raise
            raise FormatError(
                f"{item.file}: {name}: no whole object of torch.save at {item.offset}: {type(error).__name__}: "
                f"{str(error)[:200]}"
            ) from None
