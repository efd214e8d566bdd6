"""The manifest: what the whole is. Its size grows with tensors plus writers, never with their product.

Columns instead of records, each digest 43 characters, each layout and each (dtype, shape, layout) once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .._geometry import Layout
from ..errors import FormatError, LayoutError
from .fields import Fields, by, check_format, columns, encode, shape_of
from .jsonio import dumps, loads, refuse, short
from .layouts import MAX_BOXES, box_count, layouts_from_json, layouts_to_json
from .limits import FORMAT, INDEX_BYTES, ITEMSIZE, MANIFEST_BYTES, MAX_STEP, NAME_CHARS, UINT63
from .paths import SAVE_ID

__all__ = ["LOCAL", "Manifest", "TensorRecord", "WriterRecord"]

LOCAL = -1
"""In place of a layout: the tensor belongs to one writer."""
_KEYS = "format by save_id step created world options metadata meshes layouts kinds tensors tree writers"


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor."""

    name: str
    """Its path in the state."""
    dtype: str
    """torch's name of its dtype, without "torch."."""
    shape: tuple[int, ...]
    """Shape of the whole."""
    layout: int
    """Number of its layout in the manifest; LOCAL for a tensor of one writer."""

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class WriterRecord:
    """What one writer wrote, in sum."""

    index_sha256: str
    """SHA-256 of its index, in hex."""
    index_bytes: int
    """Size of its index."""
    data_bytes: int
    """Bytes that it put into data files of this save."""
    chunks: int
    """Rows of its chunk table."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint holds."""

    save_id: str
    """Hex digits that no other save has."""
    step: int
    """Step of the training."""
    created: float
    """When the save began, in seconds since 1970."""
    world: int
    """Number of writers."""
    layouts: tuple[Layout, ...]
    """How tensors were sharded."""
    tensors: tuple[TensorRecord, ...]
    """The tensors; other files name them by their place here."""
    tree: Any
    """The state, as JSON in which `{"$tensor": n}` stands for tensor n."""
    metadata: Any
    """The caller's JSON."""
    writers: tuple[WriterRecord, ...]
    """One per writer."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """How it was saved, for information."""

    def to_bytes(self) -> bytes:
        """Return the content of `manifest.json`.

        Raises:
            FormatError: a reader would refuse it.
        """
        kinds: dict[tuple[str, tuple[int, ...], int], int] = {}
        numbers = [kinds.setdefault((t.dtype, t.shape, t.layout), len(kinds)) for t in self.tensors]
        meshes, layouts = layouts_to_json(self.layouts)
        try:
            digests = bytes.fromhex("".join(writer.index_sha256 for writer in self.writers))
        except ValueError:
            raise FormatError("writers: an index_sha256 is not hex.") from None
        value = {
            "format": FORMAT,
            "by": by(),
            "save_id": self.save_id,
            "step": self.step,
            "created": self.created,
            "world": self.world,
            "options": dict(self.options),
            "metadata": self.metadata,
            "meshes": meshes,
            "layouts": layouts,
            "kinds": list(kinds),
            "tensors": {"name": [t.name for t in self.tensors], "kind": numbers},
            "tree": self.tree,
            "writers": {
                "index_sha256": encode(digests),
                **columns(self.writers, "index_bytes", "data_bytes", "chunks"),
            },
        }
        data = dumps(value, "manifest.json")
        Manifest.from_bytes(data)  # what no reader accepts must not be committed
        return data

    @classmethod
    def from_bytes(cls, data: bytes, at: str = "manifest.json") -> Manifest:
        """Return the manifest that `data` holds, with every number checked.

        Args:
            data: content of `manifest.json`.
            at: name of the file, for messages.

        Raises:
            FormatError: naming the field, what it holds and the rule; for a newer format, what to install.
        """
        value = loads(data, at, MANIFEST_BYTES)
        check_format(value, at)
        fields = Fields(value, at, _KEYS)
        writers = _writers(fields.inner("writers", "index_sha256 index_bytes data_bytes chunks"))
        world = fields.integer("world", 1)
        if len(writers) != world:
            refuse(fields.at("world"), world, f"must be the number of writers, {len(writers)}")
        layouts = layouts_from_json(fields.items("meshes"), fields.items("layouts"), world, at)
        tensors = _tensors(fields, layouts, at)
        options = fields.value("options")
        if not isinstance(options, dict):
            refuse(fields.at("options"), options, "must be an object")
        check_tree(fields.value("tree"), len(tensors), fields.at("tree"))
        return cls(
            fields.text("save_id", SAVE_ID, "8 to 64 lower-case hex digits"),
            fields.integer("step", 0, MAX_STEP),
            fields.number("created"),
            world,
            layouts,
            tensors,
            fields.value("tree"),
            fields.value("metadata"),
            writers,
            options,
        )


def check_tree(tree: Any, tensors: int, at: str) -> None:
    """Raise FormatError where a state refers to a tensor that is not there."""
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            for tag in ("$tensor", "$numpy"):
                if tag in node:
                    number = node[tag]
                    if type(number) is not int or not 0 <= number < tensors:
                        refuse(f"{at}: {tag}", number, f"must be the number of one of {tensors} tensors")
            left.extend(node.values())
        elif isinstance(node, list):
            left.extend(node)


def kind_of(dtype: Any, shape: Any, at: str) -> tuple[str, tuple[int, ...]]:
    """Return a dtype that is known and a shape of which all bytes can be counted."""
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        refuse(f"{at}: dtype", dtype, f"must be one of {', '.join(ITEMSIZE)}")
    sizes, _ = shape_of(shape, f"{at}: shape", UINT63 // ITEMSIZE[dtype])
    return dtype, sizes


def _kinds(values: list[Any], layouts: int, at: str) -> list[tuple[str, tuple[int, ...], int]]:
    found = []
    for number, value in enumerate(values):
        place = f"{at}[{number}]"
        if not isinstance(value, list) or len(value) != 3:
            refuse(place, value, "must be [dtype, shape, layout]")
        dtype, shape = kind_of(value[0], value[1], place)
        if type(value[2]) is not int or not 0 <= value[2] < layouts:
            refuse(f"{place}: layout", value[2], f"must be the number of one of {layouts} layouts")
        found.append((dtype, shape, value[2]))
    return found


def _tensors(fields: Fields, layouts: tuple[Layout, ...], at: str) -> tuple[TensorRecord, ...]:
    kinds = _kinds(fields.items("kinds"), len(layouts), fields.at("kinds"))
    left = 4 * MAX_BOXES
    for number, (_, shape, layout) in enumerate(kinds):
        boxes = box_count(layouts[layout], shape)
        left -= boxes
        if boxes > MAX_BOXES or left < 0:
            raise FormatError(
                f"{at}: kinds[{number}]: layout {layout} cuts shape {short(str(list(shape)))} into too many boxes, "
                f"up to {short(boxes)}; a writer may hold {MAX_BOXES}."
            )
        try:
            layouts[layout].check(shape)
        except LayoutError as error:
            raise FormatError(f"{at}: kinds[{number}]: layout {layout} does not fit: {error}") from None
    columns = fields.inner("tensors", "name kind")
    names = columns.strings("name", NAME_CHARS)
    numbers = columns.ints("kind", 0, len(kinds) - 1, len(names))
    return tuple(TensorRecord(name, *kinds[number]) for name, number in zip(names, numbers, strict=True))


def _writers(fields: Fields) -> tuple[WriterRecord, ...]:
    index_bytes = fields.ints("index_bytes", 1, INDEX_BYTES)
    count = len(index_bytes)
    digests = fields.blob("index_sha256", 32 * count).hex()
    data_bytes = fields.ints("data_bytes", length=count)
    chunks = fields.ints("chunks", length=count)
    return tuple(
        WriterRecord(digests[64 * n : 64 * n + 64], *row)
        for n, row in enumerate(zip(index_bytes, data_bytes, chunks, strict=True))
    )
