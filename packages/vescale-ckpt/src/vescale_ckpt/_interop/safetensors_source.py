"""Import from safetensors: files, shards with an index, or a folder. Headers are checked, data is read in blocks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .._codec import memory
from .._format.safetensors_file import StoredTensor, header_length, read_header
from .._geometry import Piece
from .._load.names import Keys, Rename, chooser
from .._save.options import SaveOptions
from .._storage import Storage
from ..errors import FormatError, MismatchError
from .common import ImportReport, Progress, local_path
from .names import below, new_names
from .safetensors import INDEX
from .streaming import Source, marker, save_stream

__all__ = ["SafetensorsFile", "import_safetensors", "nested_below", "read_into"]

INDEX_BYTES = 256 << 20
"""Longest index that is read."""


def import_safetensors(
    src: str | os.PathLike[str],
    path: str | os.PathLike[str] | Storage,
    *,
    step: int | None = None,
    keys: Keys = None,
    rename: Rename = None,
    under: str | None = None,
    overwrite: bool = False,
    metadata: Any = None,
    compress: str | None = None,
    dedup: str | None = "position",
    progress: Progress | None = None,
) -> ImportReport:
    """Save the tensors of safetensors files as a step. Takes memory for a few blocks of 16 MiB.

    Args:
        src: a file, an index (`model.safetensors.index.json`), or a folder that has an index or files.
        path: the store.
        step: number of the step; None: the one after the latest.
        keys: pattern or patterns of names as in the files, or a function of a name; None: all.
        rename: a mapping of names, a list of (regular expression, replacement), or a function.
        under: keys of the dict that the tensors are put in, joined by dots: with "model" the state is
            `{"model": {name: tensor}}`. None: `{name: tensor}`.
        overwrite: save a step again that is there.
        metadata: JSON to keep with the step; None: what the files' headers say.
        compress: as for `save`.
        dedup: as for `save`.
        progress: called with (bytes done, bytes of all).

    Returns:
        What was saved.

    Raises:
        FormatError: a file or an index is malformed.
        MismatchError: no tensor is wanted, or two names become one.
        StorageError: the storage failed.

    Example:
        >>> import tempfile, torch, vescale_ckpt as ck
        >>> from safetensors.torch import save_file
        >>> folder = tempfile.mkdtemp()
        >>> save_file({"w": torch.arange(3)}, f"{folder}/a.safetensors")
        >>> ck.import_safetensors(f"{folder}/a.safetensors", f"{folder}/run", under="model").info.step
        0
        >>> ck.load_dict(f"{folder}/run")
        {'model': {'w': tensor([0, 1, 2])}}
    """
    options = SaveOptions(compress=compress, dedup=dedup, overwrite=overwrite)
    place = below(under)
    source = local_path(src, "src")
    files: list[SafetensorsFile] = []
    try:
        found: dict[str, tuple[SafetensorsFile, StoredTensor]] = {}
        told: dict[str, str] = {}
        for file_path, expected in _files(source):
            files.append(SafetensorsFile(file_path))
            told |= {key: value for key, value in files[-1].metadata.items() if key != "format"}
            if expected is not None and (lost := expected - files[-1].tensors.keys()):
                raise FormatError(f"{file_path}: {min(lost)} is not there, though the index says so.")
            for name, tensor in files[-1].tensors.items():
                if expected is not None and name not in expected:
                    continue
                if name in found:
                    raise FormatError(
                        f"{file_path}: {name} is in {found[name][0].path} too. Import the files one by one."
                    )
                found[name] = files[-1], tensor
        wanted = chooser(keys)
        chosen = [name for name in found if wanted(name)]
        if not chosen:
            raise MismatchError(f"keys: none of the {len(found)} tensors of {source} is wanted by {keys!r}.")
        new = new_names(chosen, rename)
        flat: dict[str, Tensor] = {}
        sources: dict[int, Source] = {}
        for name in chosen:
            file, tensor = found[name]
            flat[new[name]] = marker()
            sources[id(flat[new[name]])] = Source(tensor.dtype, tensor.shape, file.reader(tensor))
        state = nested_below(place, flat)
        kept = metadata if metadata is not None else told or None
        info, packed = save_stream(path, state, sources, step=step, metadata=kept, options=options, progress=progress)
        total = sum(found[name][1].stop - found[name][1].start for name in chosen)
        return ImportReport(str(source), "safetensors", len(packed.tensors), total, 0, info)
    finally:
        for opened in files:
            opened.close()


class SafetensorsFile:
    """A safetensors file that is open for reading; its header has been checked."""

    def __init__(self, path: Path) -> None:
        """Open a file and read its header.

        Raises:
            FormatError: it is none.
        """
        self.path = path
        self._file: BinaryIO = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by `close`
        try:
            size = os.fstat(self._file.fileno()).st_size
            length = header_length(_pread(self._file, 8, 0), size, str(path))
            self.tensors, self.metadata = read_header(_pread(self._file, length, 8), size, str(path))
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def reader(self, tensor: StoredTensor) -> Callable[[Piece], Tensor]:
        """Return a function that reads a piece of a tensor."""
        numel = 1
        for size in tensor.shape:
            numel *= size
        itemsize = (tensor.stop - tensor.start) // numel if numel else 1

        def fetch(piece: Piece) -> Tensor:
            out = torch.empty(piece.numel * itemsize, dtype=torch.uint8)
            read_into(self._file, tensor.start + piece.start * itemsize, out, self.path)
            return out

        return fetch


def read_into(file: BinaryIO, offset: int, out: Tensor, path: Path) -> None:
    """Fill a 1-D uint8 tensor from a place in a file. Threads may call this at once."""
    view = memory(out)
    done = 0
    while done < len(view):
        count = os.preadv(file.fileno(), [view[done:]], offset + done)
        if count == 0:
            raise FormatError(f"{path}: ends at {offset + done}, but was longer when it was opened.")
        done += count


def nested_below(place: tuple[str, ...], state: Any) -> Any:
    """Return dicts that lead to a state by these keys."""
    for key in reversed(place):
        state = {key: state}
    return state


def _pread(file: BinaryIO, count: int, offset: int) -> bytes:
    parts = []
    while count and (part := os.pread(file.fileno(), min(count, 1 << 24), offset)):
        parts.append(part)
        count, offset = count - len(part), offset + len(part)
    return b"".join(parts)


def _files(source: Path) -> list[tuple[Path, set[str] | None]]:
    """Return the files to read, and of each the names that are meant; None: all."""
    if source.is_dir():
        if (source / INDEX).is_file():
            return _by_index(source / INDEX)
        indexes = sorted(source.glob("*.safetensors.index.json"))
        if len(indexes) == 1:
            return _by_index(indexes[0])
        files = sorted(source.glob("*.safetensors"))
        if not files or len(indexes) > 1:
            what = f"{len(indexes)} indexes; name one of them" if indexes else "no *.safetensors file"
            raise FormatError(f"src: {source} has {what}.")
        return [(file, None) for file in files]
    if not source.exists():
        raise FormatError(f"src: {source} is not there.")
    return _by_index(source) if source.suffix == ".json" else [(source, None)]


def _by_index(index: Path) -> list[tuple[Path, set[str] | None]]:
    if index.stat().st_size > INDEX_BYTES:
        raise FormatError(f"{index}: {index.stat().st_size} bytes are too many for an index; at most {INDEX_BYTES}.")
    try:
        value = json.loads(index.read_bytes())
        weights = value["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"{index}: not an index of safetensors files: {type(error).__name__}: {error}") from None
    if not isinstance(weights, dict) or not weights:
        raise FormatError(f"{index}: weight_map must be an object that names files, but is {weights!r:.100}.")
    by_file: dict[str, set[str] | None] = {}
    for name, file in weights.items():
        # The files of an index lie beside it; any other path may be one that this process should not read.
        if not isinstance(file, str) or file in ("", ".", "..") or any(c in file for c in "/\\\0"):
            raise FormatError(f"{index}: {name!r:.200} lies in {file!r:.200}, which is no file beside the index.")
        names = by_file.setdefault(file, set())
        assert names is not None
        names.add(name)
    for file in by_file:
        if not (index.parent / file).is_file():
            raise FormatError(f"{index}: names {file}, which is not there.")
    return [(index.parent / file, names) for file, names in sorted(by_file.items())]
