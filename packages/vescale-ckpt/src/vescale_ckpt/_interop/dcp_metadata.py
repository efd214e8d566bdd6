"""The `.metadata` of a torch.distributed.checkpoint folder, read without running it.

It is a pickle. An unpickler that knows no class but stand-ins of its own, made anew for each file, builds records of
plain values; these are then checked like any foreign data.
"""

from __future__ import annotations

import io
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._format.limits import DIMS, NAME_CHARS, UINT63
from .._geometry import Box
from .._state import DTYPES, covers
from ..errors import FormatError
from .nesting import KeyPath, path_of

__all__ = ["ForeignItem", "ForeignState", "ForeignTensor", "read_dcp_metadata"]

METADATA_BYTES = 1 << 30
CHUNKS = 1 << 24
"""Most chunks of all tensors together."""
_METADATA = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_RECORDS = {
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "StorageMeta"),
    (_FILES, "_StorageInfo"),
}
_PATHS = {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}


@dataclass(frozen=True, slots=True)
class ForeignItem:
    """Where one object of torch.save lies."""

    file: Path
    """Its file."""
    offset: int
    """First byte."""
    length: int
    """Bytes."""


@dataclass(frozen=True, slots=True)
class ForeignTensor:
    """A tensor of a folder."""

    dtype: str
    """Its dtype."""
    shape: tuple[int, ...]
    """Its shape."""
    parts: tuple[tuple[Box, ForeignItem], ...]
    """Boxes that make it up, and where they are."""


@dataclass(frozen=True, slots=True)
class ForeignState:
    """What a folder holds."""

    tensors: dict[str, ForeignTensor]
    """By flat key."""
    values: dict[str, ForeignItem]
    """By flat key."""
    paths: dict[str, KeyPath]
    """Flat key -> keys on the way, for all of them."""


def read_dcp_metadata(folder: Path) -> ForeignState:
    """Return what a folder of torch.distributed.checkpoint holds.

    Raises:
        FormatError: its `.metadata` is missing, malformed, hostile or of a kind that cannot be read.
    """
    at = folder / ".metadata"
    try:
        size = at.stat().st_size
        if size > METADATA_BYTES:
            raise FormatError(f"{at}: {size} bytes; at most {METADATA_BYTES} are read.")
        data = at.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise FormatError(f"src: {folder} is no folder of torch.distributed.checkpoint: no .metadata in it.") from None
    return _state_of(_unpickle(data, str(at)), folder, str(at))


class _Record:
    """Stands in for a class of torch: holds what the pickle says, and does nothing."""

    fields: Any = None

    def __setstate__(self, state: Any) -> None:
        self.fields = state

    def get(self, name: str, at: str) -> Any:
        """Return a field."""
        if not isinstance(self.fields, dict) or name not in self.fields:
            raise FormatError(f"{at}: {type(self).__name__} has no {name}.")
        return self.fields[name]


class _Index(_Record):
    """Stands in for MetadataIndex, which is a key of dicts."""

    def __hash__(self) -> int:
        return hash(self.key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Index) and self.key() == other.key()

    def key(self) -> tuple[str, tuple[int, ...] | None]:
        """Return what tells it from others."""
        return self.get("fqn", "storage_data"), self.fields.get("offset")  # what is None is not in the pickle


def _unpickle(data: bytes, at: str) -> Any:
    # Stand-ins are made for this one file: a pickle can set attributes of what it was given.
    made: dict[tuple[str, str], Any] = {}

    def stand_in(module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return type(name, (_Index if name == "MetadataIndex" else _Record,), {})
        if (module, name) == (_METADATA, "_MEM_FORMAT_ENCODING"):
            return lambda value=None: value
        if (module, name) == ("torch", "Size"):
            return lambda sizes=(): tuple(sizes)
        if (module, name) in (("torch.serialization", "_get_layout"), ("torch.serialization", "_get_dtype")):
            return lambda text=None: text
        if module == "torch" and name in DTYPES:
            return _dtype(name)
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return lambda *parts: "/".join(map(str, parts))
        if (module, name) == ("collections", "OrderedDict"):
            return lambda items=(): dict(items)
        if (module, name) in (("builtins", "set"), ("builtins", "frozenset"), ("builtins", "tuple")):
            return lambda items=(): tuple(items)
        raise FormatError(
            f"{at}: refers to {module}.{name}, which is no part of the metadata of a checkpoint: a pickle that "
            f"does could run code. Load it where you trust it, and save it again with torch.distributed.checkpoint."
        )

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) not in made:
                made[module, name] = stand_in(module, name)
            return made[module, name]

    try:
        return Reader(io.BytesIO(data)).load()
    except FormatError:
        raise
    except Exception as error:  # noqa: BLE001 - malformed pickles raise whatever they like
        raise FormatError(f"{at}: damaged: {type(error).__name__}: {str(error)[:200]}") from None


class _Dtype(str):
    """Name of a dtype."""

    __slots__ = ()


def _dtype(name: str) -> _Dtype:
    return _Dtype(name)


def _state_of(value: Any, folder: Path, at: str) -> ForeignState:
    if not isinstance(value, _Record) or type(value).__name__ != "Metadata":
        raise FormatError(f"{at}: must hold Metadata, but holds {type(value).__name__}.")
    entries = _dict(value.get("state_dict_metadata", at), f"{at}: state_dict_metadata")
    stored = _dict(value.get("storage_data", at), f"{at}: storage_data")
    places = _Places(folder)
    items = {}
    for index, info in stored.items():
        if not isinstance(index, _Index):
            raise FormatError(f"{at}: storage_data: a key must be a MetadataIndex, but is {index!r:.100}.")
        items[index.key()] = info
    tensors: dict[str, ForeignTensor] = {}
    values: dict[str, ForeignItem] = {}
    count = 0
    for name, entry in entries.items():
        if type(name) is not str or len(name) > NAME_CHARS:
            raise FormatError(f"{at}: a key must be a string of at most {NAME_CHARS} characters, but is {name!r:.100}.")
        kind = type(entry).__name__
        if isinstance(entry, _Record) and kind == "BytesStorageMetadata":
            if (name, None) not in items:
                raise FormatError(f"{at}: {name}: nothing says where it lies.")
            values[name] = places.item(items[name, None], f"{at}: {name}")
        elif isinstance(entry, _Record) and kind == "TensorStorageMetadata":
            tensors[name] = _tensor(name, entry, items, places, f"{at}: {name}")
            count += len(tensors[name].parts)
        else:
            raise FormatError(f"{at}: {name}: must be a tensor or bytes, but is {kind}.")
        if count > CHUNKS:
            raise FormatError(f"{at}: more than {CHUNKS} chunks.")
    return ForeignState(tensors, values, _paths(value, [*tensors, *values], at))


def _paths(value: _Record, names: list[str], at: str) -> dict[str, KeyPath]:
    """Return the path of each key; the key itself where the metadata does not know one for each."""
    told = value.fields.get("planner_data")
    if not isinstance(told, dict) or not all(name in told for name in names):
        return {name: (name,) for name in names}
    return {name: path_of(told[name], f"{at}: planner_data: {name}") for name in names}


def _tensor(name: str, entry: _Record, items: dict[Any, Any], places: _Places, at: str) -> ForeignTensor:
    shape = _sizes(entry.get("size", at), f"{at}: size")
    properties = entry.get("properties", at)
    fields = properties.fields if isinstance(properties, _Record) else None
    if not isinstance(fields, tuple) or len(fields) != 5 or type(fields[0]) is not _Dtype:
        raise FormatError(f"{at}: properties must name a dtype, but are {fields!r:.200}.")
    if fields[1] not in ("torch.strided", "strided"):
        raise FormatError(f"{at}: its layout is {fields[1]!r:.50}; only strided tensors are read.")
    chunks = entry.get("chunks", at)
    if not isinstance(chunks, list) or len(chunks) > CHUNKS:
        raise FormatError(f"{at}: chunks must be a list.")
    parts = []
    for chunk in chunks:
        if not isinstance(chunk, _Record) or type(chunk).__name__ != "ChunkStorageMetadata":
            raise FormatError(f"{at}: a chunk must be ChunkStorageMetadata, but is {chunk!r:.100}.")
        box = Box(_sizes(chunk.get("offsets", at), at), _sizes(chunk.get("sizes", at), at))
        if box.ndim != len(shape) or not Box.whole(shape).contains(box):
            raise FormatError(f"{at}: {box} does not lie in a tensor of shape {shape}.")
        if (name, box.offset) not in items:
            raise FormatError(f"{at}: nothing says where the chunk at {box.offset} lies.")
        if box.numel:
            parts.append((box, places.item(items[name, box.offset], at)))
    if not covers(shape, [box for box, _ in parts]):
        raise FormatError(f"{at}: its {len(parts)} chunks do not make up a tensor of shape {shape}, each element once.")
    return ForeignTensor(str(fields[0]), shape, tuple(parts))


class _Places:
    """Checks where items lie."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._root = folder.resolve()
        self._files: dict[str, tuple[Path, int]] = {}

    def item(self, info: Any, at: str) -> ForeignItem:
        """Return the place that a _StorageInfo names."""
        if not isinstance(info, _Record) or type(info).__name__ != "_StorageInfo":
            raise FormatError(f"{at}: storage_data must be a _StorageInfo, but is {info!r:.100}.")
        if info.fields.get("transform_descriptors") if isinstance(info.fields, dict) else False:
            raise FormatError(f"{at}: is stored through extensions ({info.fields['transform_descriptors']!r:.100}).")
        name, offset, length = (info.get(key, at) for key in ("relative_path", "offset", "length"))
        file, size = self._file(name, at)
        if type(offset) is not int or type(length) is not int or not 0 <= offset <= offset + length <= size:
            raise FormatError(f"{at}: bytes {offset!r:.50} + {length!r:.50} do not lie in {file} of {size} bytes.")
        return ForeignItem(file, offset, length)

    def _file(self, name: Any, at: str) -> tuple[Path, int]:
        if type(name) is not str or not name or "\0" in name or "\\" in name or len(name) > 4096:
            raise FormatError(f"{at}: {name!r:.200} is no file name.")
        if name not in self._files:
            path = self._folder / name
            if os.path.isabs(name) or ".." in Path(name).parts or not path.resolve().is_relative_to(self._root):
                raise FormatError(f"{at}: {name!r:.200} lies outside of the folder.")
            if not path.is_file():
                raise FormatError(f"{at}: {path} is not there.")
            self._files[name] = path, path.stat().st_size
        return self._files[name]


def _sizes(value: Any, at: str) -> tuple[int, ...]:
    if not isinstance(value, tuple) or len(value) > DIMS:
        raise FormatError(f"{at}: must be at most {DIMS} sizes, but is {value!r:.100}.")
    numel = 1
    for size in value:
        if type(size) is not int or not 0 <= size <= UINT63:
            raise FormatError(f"{at}: a size must be from 0 to 2**63 - 1, but is {size!r:.100}.")
        numel *= max(1, size)
    if numel > UINT63 // 16:
        raise FormatError(f"{at}: {value!r:.200} has too many elements.")
    return value


def _dict(value: Any, at: str) -> dict[Any, Any]:
    if type(value) is not dict:
        raise FormatError(f"{at}: must be a dict, but is {type(value).__name__}.")
    return value
