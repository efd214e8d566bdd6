"""Export as a torch.distributed.checkpoint folder, written chunk by chunk, that `dcp.load` reads on any ranks."""

from __future__ import annotations

import io
import os
import pickle
import secrets
import shutil
from pathlib import Path
from typing import Any, BinaryIO

import torch

from .. import _state
from .._geometry import Box, Piece
from .._load import Checkpoint, open_checkpoint
from .._load.names import Keys
from .._storage import Storage
from ..errors import StateError, StorageError
from .common import ExportReport, Progress, export_dtype, fill, local_path, record_of, refuse_existing
from .torch_file import build_items, chosen_items

__all__ = ["export_dcp"]

CHUNK_BYTES = 64 << 20
"""A chunk has about as many bytes at most, unless one row has more."""
FILE_BYTES = 4 << 30
"""Another file begins beyond."""


def export_dcp(
    path: str | os.PathLike[str] | Storage,
    out: str | os.PathLike[str],
    *,
    step: int | str = "latest",
    keys: Keys = None,
    dtype: torch.dtype | str | None = None,
    overwrite: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
) -> ExportReport:
    """Write a step as a folder that `torch.distributed.checkpoint.load` reads, with its keys and nesting.

    One process writes it, with memory for a chunk of 64 MiB; ranks that load it take what they need. Numpy arrays
    become tensors.

    Args:
        path: the store.
        out: the folder.
        step: number of the step, or "latest".
        keys: pattern or patterns of names ("model.*"), or a function of a name; None: all.
        dtype: floating point tensors are converted to this one; None: as they are.
        overwrite: replace the folder, with all that is in it.
        verify: check the checksums of all that is read.
        progress: called with (bytes done, bytes of all).

    Returns:
        What was written. Values of single ranks are left out, unless one rank saved.

    Raises:
        MissingStepError: there is no such step.
        StateError: the state is no dict, or two of its keys have one name.
        CheckpointError: something is at `out` already.
    """
    target = local_path(out, "out")
    refuse_existing(target, overwrite)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        with open_checkpoint(path, step) as checkpoint:
            root, skipped = chosen_items(checkpoint, keys)
            partial.mkdir(parents=True)
            folder = _Folder(partial, checkpoint, dtype, verify, progress)
            tensors = folder.write(root)
            names = sorted(entry.name for entry in partial.iterdir())
            _replace(partial, target)
            files = tuple(str(target / name) for name in names)
            return ExportReport(str(target), "dcp", checkpoint.step, files, tensors, folder.done, skipped)
    except OSError as error:
        if isinstance(error, StorageError) or error.errno is None:
            raise
        raise StorageError(error.errno, f"out: {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class _Folder:
    """A folder that is being written."""

    def __init__(
        self,
        folder: Path,
        checkpoint: Checkpoint,
        dtype: torch.dtype | str | None,
        verify: bool,
        progress: Progress | None,
    ) -> None:
        self._folder, self._checkpoint, self._dtype = folder, checkpoint, dtype
        self._verify, self._progress = verify, progress
        self._file: BinaryIO | None = None
        self._files = 0
        self._stored: dict[Any, Any] = {}
        self.done = self.total = 0

    def write(self, root: _state.Item) -> int:
        """Write all leaves and the metadata; return the number of tensors."""
        from torch.distributed.checkpoint.metadata import (
            BytesStorageMetadata,
            ChunkStorageMetadata,
            Metadata,
            TensorProperties,
            TensorStorageMetadata,
        )

        flat, paths, numbers = self._flatten(root)
        self.total = sum(
            Box.whole(tuple(value.shape)).numel * value.element_size()
            for value in flat.values()
            if isinstance(value, torch.Tensor)
        )
        entries: dict[str, Any] = {}
        for name, value in flat.items():
            if not isinstance(value, torch.Tensor):
                entries[name] = BytesStorageMetadata()
                self._put(name, None, value)
                continue
            shape, chunks = tuple(value.shape), []
            for number, box in enumerate(_boxes(shape, value.element_size())):
                data = torch.empty(box.numel, dtype=value.dtype)
                fill(self._checkpoint, numbers[id(value)], Piece(box, 0, box.numel), data, verify=self._verify)
                self._put(name, (box.offset, number), data.view(box.shape))
                chunks.append(ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)))
                self.done += data.nbytes
                if self._progress is not None:
                    self._progress(self.done, self.total)
            entries[name] = TensorStorageMetadata(TensorProperties(dtype=value.dtype), torch.Size(shape), chunks)
        self._close()
        with open(self._folder / ".metadata", "xb") as file:
            pickle.dump(Metadata(entries, planner_data=paths, storage_data=self._stored, version="1.0.0"), file)
            file.flush()
            os.fsync(file.fileno())
        return len(numbers)

    def _flatten(self, root: _state.Item) -> tuple[dict[str, Any], dict[str, Any], dict[int, int]]:
        """Let torch flatten the state, with meta tensors; return (leaves, paths, id of a tensor -> its number)."""
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        numbers: dict[int, int] = {}

        def make(number: int) -> torch.Tensor:
            record = record_of(self._checkpoint, number)
            tensor = torch.empty(record.shape, dtype=export_dtype(record.dtype, self._dtype), device="meta")
            numbers[id(tensor)] = number
            return tensor

        state = build_items(root, make)
        if not isinstance(state, dict):
            raise StateError(f"state: torch.distributed.checkpoint saves dicts, but this is a {type(state).__name__}.")
        planner = DefaultSavePlanner()
        try:
            planner.set_up_planner(state, None, True)
        except ValueError as error:
            raise StateError(f"state: torch.distributed.checkpoint cannot hold it: {error}.") from None
        return dict(planner.state_dict), dict(planner.mappings), numbers

    def _put(self, name: str, place: tuple[tuple[int, ...], int] | None, value: Any) -> None:
        from torch.distributed.checkpoint.filesystem import _StorageInfo
        from torch.distributed.checkpoint.metadata import MetadataIndex

        if self._file is None or self._file.tell() > FILE_BYTES:
            self._close()
            self._file = open(self._folder / f"__0_{self._files}.distcp", "xb")  # noqa: SIM115 - closed by `_close`
            self._files += 1
        start = self._file.tell()
        # Small objects by way of memory: their zip files are written in many small steps.
        if isinstance(value, torch.Tensor) and value.nbytes > 1 << 20:
            torch.save(value, self._file)
        else:
            buffer = io.BytesIO()
            torch.save(value, buffer)
            self._file.write(buffer.getbuffer())
        index = MetadataIndex(name) if place is None else MetadataIndex(name, place[0], place[1])
        length = self._file.tell() - start
        self._stored[index] = _StorageInfo(f"__0_{self._files - 1}.distcp", start, length)

    def _close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


def _boxes(shape: tuple[int, ...], itemsize: int) -> list[Box]:
    """Cut a tensor by rows into chunks."""
    whole = Box.whole(shape)
    if whole.numel * itemsize <= CHUNK_BYTES:
        return [whole]
    dim = next(dim for dim, size in enumerate(shape) if size > 1)
    rows = max(1, CHUNK_BYTES * shape[dim] // (whole.numel * itemsize))
    return [
        Box(
            tuple(at if d == dim else 0 for d in range(len(shape))),
            tuple(min(rows, shape[dim] - at) if d == dim else size for d, size in enumerate(shape)),
        )
        for at in range(0, shape[dim], rows)
    ]


def _replace(partial: Path, target: Path) -> None:
    """Put a folder in its place; what was there goes when the new one is whole."""
    old = None
    if os.path.lexists(target):
        old = target.with_name(f".{target.name}.{secrets.token_hex(4)}.old")
        os.rename(target, old)
    os.rename(partial, target)
    if old is not None:
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        else:
            old.unlink()
