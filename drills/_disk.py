"""What lies in a store, read by hand after FORMAT.md with nothing of the package: steps, references, garbage."""

from __future__ import annotations

import base64
import itertools
import json
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Chunk", "Disk", "chunks_of", "phase_of", "tensor_names"]

COLUMNS = {"file": "I", "offset": "Q", "stored": "I", "raw": "I", "codec": "B", "crc": "I"}


class Disk:
    """All files of a store, and which of them committed steps need."""

    def __init__(self, root: Path) -> None:
        """Look once; nobody may be at work in the store."""
        self.root = root
        self.files: set[str] = set()
        """Paths, relative to the store."""
        self.folders: set[str] = set()
        """Paths of folders."""
        for folder, folders, files in os.walk(root):
            at = Path(folder).relative_to(root)
            self.files |= {(at / name).as_posix() for name in files}
            self.folders |= {(at / name).as_posix() for name in folders}

    @property
    def all_step_folders(self) -> list[str]:
        """Return the folders of saves."""
        return sorted(folder for folder in self.folders if folder.count("/") == 1 and folder.startswith("steps/"))

    @property
    def committed(self) -> list[str]:
        """Return the folders of steps that exist: COMMIT is put whole or not at all."""
        return [folder for folder in self.all_step_folders if f"{folder}/COMMIT" in self.files]

    @property
    def steps(self) -> list[int]:
        """Return the numbers of steps that exist, rising."""
        return sorted({int(folder[6:].partition("-")[0]) for folder in self.committed})

    def needed(self) -> set[str]:
        """Return the files that have a reason to be there."""
        found = {"vckpt.json"}
        for folder in self.committed:
            found |= {f"{folder}/{name}" for name in ("COMMIT", "manifest.json", "PIN")}
            for name in [name for name in self.files if name.startswith(f"{folder}/index/")]:
                found |= {name, *json.loads((self.root / name).read_bytes())["files"]["path"]}
        # The mark of a removed step stays as long as its data does.
        return found | {f"{path.partition('/data/')[0]}/REMOVED" for path in found if "/data/" in path}

    def garbage(self) -> list[str]:
        """Return files and folders that no committed step needs."""
        needed = self.needed()
        extra = self.files - needed
        extra |= {
            folder
            for folder in self.folders
            if folder.startswith("steps/") and not any(path.startswith(f"{folder}/") for path in needed & self.files)
        }
        extra |= {f"{f}/REMOVED (of a step that is there)" for f in self.committed if f"{f}/REMOVED" in self.files}
        return sorted(extra)

    def missing(self) -> list[str]:
        """Return data files that a committed step needs and that are not there."""
        data = {path for path in self.needed() if "/data/" in path or path.startswith("chunks/")}
        return sorted(data - self.files)


def phase_of(disk: Disk) -> str:
    """Return what the saver was doing when it died, from what it left."""
    needed = disk.needed()
    for folder in disk.all_step_folders:
        left = {path.removeprefix(f"{folder}/") for path in disk.files if path.startswith(f"{folder}/")}
        if "REMOVED" in left and {path for path in left if f"{folder}/{path}" not in needed}:
            return "in gc"
    if any(path.startswith(("gc-probe-", "gc-chunks-")) for path in disk.files):
        return "in gc"
    for folder in reversed(disk.all_step_folders):
        left = {path.removeprefix(f"{folder}/") for path in disk.files if path.startswith(f"{folder}/")}
        if "COMMIT" in left and "LEASE" in left:
            return "after COMMIT"
        if "COMMIT" in left or "REMOVED" in left:
            continue
        if any(path.startswith(".tmp-") for path in left) and "manifest.json" in left:
            return "COMMIT"
        if "manifest.json" in left:
            return "manifest"
        if any(path.startswith("index/") for path in left):
            return "index"
        if any(path.startswith("data/") for path in left):
            return "data"
        if "LEASE" not in left:
            return "before LEASE"
        if any(path.startswith("chunks/") for path in disk.files - needed):
            return "data"
        return "after LEASE"
    return "between saves"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row of a chunk table."""

    folder: str
    """Of the step that lists it."""
    path: str
    """File that holds it."""
    start: int
    """First byte there."""
    stop: int
    """One past the last byte."""
    tensor: str
    """Name of its tensor, as errors give it."""
    encoded: bool
    """Whether it is compressed."""


def tensor_names(root: Path, folder: str, index: dict[str, Any]) -> list[str]:
    """Return the names by number, those of one writer after those of all."""
    manifest = json.loads((root / folder / "manifest.json").read_bytes())
    return [*manifest["tensors"]["name"], *(name for name, _, _ in index["local_tensors"])]


def chunks_of(root: Path, folder: str) -> Iterator[Chunk]:
    """Yield the rows of all chunk tables of a step."""
    for file in sorted((root / folder / "index").iterdir()):
        index = json.loads(file.read_bytes())
        names, table, pieces = tensor_names(root, folder, index), index["chunks"], index["pieces"]
        columns = {}
        for column, form in COLUMNS.items():
            data = base64.b64decode(table[column]) or bytes(table["count"] * struct.calcsize(form))
            columns[column] = struct.unpack(f"<{table['count']}{form}", data)
        owners = itertools.chain.from_iterable(
            [names[number]] * count for number, count in zip(pieces["tensor"], pieces["count"], strict=True)
        )
        for row, tensor in enumerate(owners):
            start = columns["offset"][row]
            path = index["files"]["path"][columns["file"][row]]
            encoded = columns["codec"][row] > 0
            yield Chunk(folder, path, start, start + columns["stored"][row], tensor, encoded)
