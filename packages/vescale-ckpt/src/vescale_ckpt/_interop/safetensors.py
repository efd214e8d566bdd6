"""Export to safetensors: one file, or shards with an index as Hugging Face lays them out. Written block by block."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from .. import _codec, _state
from .._load import Checkpoint, open_checkpoint
from .._load.names import Keys, Rename
from .._save import parse_bytes
from .._storage import Storage
from ..errors import MismatchError, StateError
from .common import (
    ExportReport,
    Leaves,
    NewFiles,
    Progress,
    export_dtype,
    leaves_to_export,
    local_path,
    read_blocks,
    refuse_existing,
    refuse_values,
)
from .names import new_names

__all__ = ["INDEX", "export_safetensors"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_STALE = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json", re.ASCII)
MAX_HEADER = 100_000_000
"""Longest header that safetensors opens."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A tensor of a file."""

    name: str
    """Its name there."""
    number: int
    """Of the checkpoint."""
    dtype: torch.dtype
    """Its dtype there."""
    shape: tuple[int, ...]
    """Its shape."""
    nbytes: int
    """Bytes there."""


def export_safetensors(
    path: str | os.PathLike[str] | Storage,
    out: str | os.PathLike[str],
    *,
    step: int | str = "latest",
    keys: Keys = None,
    rename: Rename = None,
    dtype: torch.dtype | str | None = None,
    format: str = "safetensors",
    prefix: str | None = None,
    max_shard_bytes: int | str | None = "5GB",
    metadata: Mapping[str, str] | None = None,
    values: str = "skip",
    overwrite: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
) -> ExportReport:
    """Write tensors of a step as safetensors. Takes memory for one block of 16 MiB, whatever the size of the model.

    Args:
        path: the store.
        out: a file if it ends in ".safetensors"; else a folder, which gets `model.safetensors`, or shards
            `model-00001-of-00003.safetensors` and `model.safetensors.index.json`.
        step: number of the step, or "latest".
        keys: pattern or patterns of names ("model.*"), or a function of a name; None: all.
        rename: a mapping of names, a list of (regular expression, replacement), or a function; applied after `prefix`.
        dtype: floating point tensors are converted to this one; None: as they are.
        format: "safetensors", where tied tensors are written under each of their names; or "hf", as Hugging Face has
            it: of tied tensors only the first of the state is written.
        prefix: only names that begin with it are written, without it. None: for "hf" it is "model." if the state is a
            dict with a dict "model", else nothing.
        max_shard_bytes: bytes of a shard in a folder, such as "5GB"; None: never cut. A larger tensor has its own one.
        metadata: strings for the headers.
        values: what becomes of leaves below `prefix` that are no tensors: "skip" tells them in the report, or "error".
        overwrite: replace what is at `out`.
        verify: check the checksums of all that is read.
        progress: called with (bytes done, bytes of all).

    Returns:
        What was written.

    Raises:
        MissingStepError: there is no such step.
        MismatchError: no tensor is wanted, or two names become one.
        StateError: a dtype that safetensors does not have, or values where they are refused.
        CheckpointError: something is at `out` already.

    Example:
        >>> import tempfile, torch, vescale_ckpt as ck
        >>> folder = tempfile.mkdtemp()
        >>> _ = ck.save(f"{folder}/run", {"model": {"w": torch.ones(2, 3), "name": "a"}, "step": 3})
        >>> report = ck.export_safetensors(f"{folder}/run", f"{folder}/hf", format="hf")
        >>> report.tensors, report.skipped
        (1, ('model.name',))
        >>> from safetensors.torch import load_file
        >>> load_file(f"{folder}/hf/model.safetensors")["w"].shape
        torch.Size([2, 3])
    """
    if format not in ("safetensors", "hf"):
        raise ValueError(f'format: expected "safetensors" or "hf", but got {format!r}.')
    limit = None if max_shard_bytes is None else parse_bytes(max_shard_bytes, "max_shard_bytes")
    if limit is not None and limit < 1:
        raise ValueError(f"max_shard_bytes: expected at least 1 byte, but got {max_shard_bytes!r}.")
    header = _header_metadata(metadata)
    target = local_path(out, "out")
    single = target.suffix == ".safetensors"
    refuse_existing(target, overwrite)
    with open_checkpoint(path, step) as checkpoint:
        leaves = leaves_to_export(checkpoint, keys)
        prefix = _prefix_of(checkpoint, leaves) if prefix is None and format == "hf" else prefix or ""
        rows, tied = _rows(checkpoint, leaves, rename, prefix, dtype, format == "hf")
        inside = [name for name in leaves.values if name.startswith(prefix)]
        skipped = refuse_values(inside, values, "safetensors")
        shards = [rows] if single or limit is None else _shards(rows, limit)
        files = [target] if single else [target / name for name in _shard_names(len(shards))]
        total, done = sum(row.nbytes for row in rows), 0

        def count(size: int) -> None:
            nonlocal done
            done += size
            if progress is not None:
                progress(done, total)

        with NewFiles() as new:
            for file, shard in zip(files, shards, strict=True):
                with new.open(file) as opened:
                    _write(opened, checkpoint, shard, header, verify, count)
            if len(files) > 1:
                files.append(target / INDEX)
                with new.open(files[-1]) as opened:
                    opened.write(_index(shards, files, total))
        if not single:
            _remove_stale(target, files)
        return ExportReport(
            str(target), format, checkpoint.step, tuple(map(str, files)), len(rows), total, skipped, tied
        )


def _rows(
    checkpoint: Checkpoint, leaves: Leaves, rename: Rename, prefix: str, dtype: Any, once: bool
) -> tuple[list[_Row], dict[str, str]]:
    """Return the tensors to write in the order of the state, and the names that are left out as tied."""
    rows, tied = [], dict[str, str]()
    first: dict[int, str] = {}
    new = new_names(leaves.tensors, rename, prefix)
    for name, number in leaves.tensors.items():
        if name not in new:
            continue
        if once and number in first:
            tied[new[name]] = first[number]
            continue
        first.setdefault(number, new[name])
        record = checkpoint.record(number)
        outside = export_dtype(record.dtype, dtype)
        if _state.safetensors_name(_state.dtype_name(outside)) is None:
            raise StateError(
                f"{name}: {record.dtype} has no name in safetensors. Leave it out with keys=..., or export with "
                f'format "torch" or "dcp".'
            )
        if new[name] == "__metadata__":
            raise MismatchError("rename: __metadata__ is a name that safetensors keeps for itself; use another one.")
        rows.append(_Row(new[name], number, outside, record.shape, record.nbytes // record.itemsize * outside.itemsize))
    if not rows:
        raise MismatchError(f"keys: none of the chosen leaves of step {checkpoint.step} is a tensor.")
    return rows, tied


def _prefix_of(checkpoint: Checkpoint, leaves: Leaves) -> str:
    tree = checkpoint.manifest.tree
    inside = isinstance(tree, dict) and isinstance(tree.get("model"), dict) and "$tensor" not in tree["model"]
    return "model." if inside and any(name.startswith("model.") for name in leaves.tensors) else ""


def _shards(rows: list[_Row], limit: int) -> list[list[_Row]]:
    """Fill shards in order, as Hugging Face does."""
    shards: list[list[_Row]] = [[]]
    size = 0
    for row in rows:
        if shards[-1] and size + row.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(row)
        size += row.nbytes
    return shards


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _index(shards: list[list[_Row]], files: list[Path], total: int) -> bytes:
    weights = {row.name: file.name for shard, file in zip(shards, files, strict=False) for row in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def _write(
    file: BinaryIO,
    checkpoint: Checkpoint,
    rows: list[_Row],
    metadata: dict[str, str],
    verify: bool,
    count: Callable[[int], None],
) -> None:
    # The widest dtypes first, as safetensors itself orders them, so that all tensors are aligned.
    rows = sorted(rows, key=lambda row: (-row.dtype.itemsize, row.name))
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for row in rows:
        header[row.name] = {
            "dtype": _state.safetensors_name(_state.dtype_name(row.dtype)),
            "shape": list(row.shape),
            "data_offsets": [at, at + row.nbytes],
        }
        at += row.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise StateError(
            f"safetensors: a header of {len(text)} bytes for {len(rows)} tensors; at most {MAX_HEADER} are allowed. "
            f"Write several files, by a smaller max_shard_bytes."
        )
    file.write(struct.pack("<Q", len(text)) + text)
    for row in rows:
        for block in read_blocks(checkpoint, row.number, row.dtype, verify=verify):
            file.write(_codec.memory(block.view(torch.uint8)))
            count(block.numel() * row.dtype.itemsize)


def _header_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    given = dict(metadata or {})
    if not all(isinstance(key, str) and isinstance(value, str) for key, value in given.items()):
        raise ValueError(f"metadata: headers of safetensors hold strings only, but got {metadata!r:.200}.")
    return {"format": "pt", **given}


def _remove_stale(folder: Path, files: list[Path]) -> None:
    """Remove files of an earlier export, which readers would take for a part of this one."""
    for entry in folder.iterdir():
        if _STALE.fullmatch(entry.name) and entry not in files:
            entry.unlink()
