"""What makes a step exist: its COMMIT file; and the manifest that it vouches for."""

from __future__ import annotations

import builtins
import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from .._storage import Storage
from ..errors import CorruptionError, FormatError, MissingStepError
from .fields import Fields, by, check_format
from .jsonio import dumps, loads, refuse
from .limits import COMMIT_BYTES, FORMAT, MANIFEST_BYTES, MAX_STEP
from .manifest import Manifest
from .paths import COMMIT, MANIFEST, SAVE_ID, parse_step_folder, step_path

__all__ = [
    "Commit",
    "Committed",
    "bases_in",
    "bases_of",
    "digest_of_fields",
    "read_commit",
    "read_manifest",
]

_KEYS = "format by save_id step generation manifest_sha256 manifest_bytes bytes chunks sha256"
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Commit:
    """The content of a COMMIT file."""

    save_id: str
    """Hex digits that no other save has."""
    step: int
    """Step of the training."""
    generation: int
    """How many saves of this step came before."""
    manifest_sha256: str
    """SHA-256 of the manifest, in hex."""
    manifest_bytes: int
    """Size of the manifest."""
    bytes: int
    """Bytes that this save put into data files."""
    chunks: int
    """Chunks of all writers."""

    def to_bytes(self) -> builtins.bytes:
        """Return the content of the file.

        Raises:
            FormatError: a reader would refuse it.
        """
        value = {"format": FORMAT, "by": by(), **{name: getattr(self, name) for name in self.__slots__}}
        data = dumps({**value, "sha256": digest_of_fields(value)}, COMMIT)
        Commit.from_bytes(data)
        return data

    @classmethod
    def from_bytes(cls, data: builtins.bytes, at: str = COMMIT) -> Commit:
        """Return the commit that `data` holds.

        Raises:
            FormatError: naming the field, what it holds and the rule; for a newer format, what to install.
        """
        value = loads(data, at, COMMIT_BYTES)
        check_format(value, at)
        fields = Fields(value, at, _KEYS)
        commit = cls(
            fields.text("save_id", SAVE_ID, "8 to 64 lower-case hex digits"),
            fields.integer("step", 0, MAX_STEP),
            fields.integer("generation"),
            fields.text("manifest_sha256", _SHA256, "64 lower-case hex digits"),
            fields.integer("manifest_bytes", 1, MANIFEST_BYTES),
            fields.integer("bytes"),
            fields.integer("chunks"),
        )
        said = fields.text("sha256", _SHA256, "64 lower-case hex digits")
        if said != digest_of_fields({key: entry for key, entry in value.items() if key != "sha256"}):
            refuse(fields.at("sha256"), said, "must be the digest of the other fields; the file is damaged")
        return commit


def digest_of_fields(fields: dict[str, Any]) -> str:
    """Return the SHA-256 of the other fields, as JSON with sorted keys and without spaces."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Committed:
    """A step that exists."""

    folder: str
    """Its folder in the store, such as `steps/00001000-3f2a9c1b`."""
    commit: Commit
    """What its COMMIT says."""

    @property
    def name(self) -> str:
        """Name of the folder, without `steps/`."""
        return self.folder.rpartition("/")[2]

    @property
    def step(self) -> int:
        """Step of the training."""
        return self.commit.step


def read_commit(storage: Storage, folder: str) -> Committed:
    """Return the step of a folder.

    Raises:
        MissingStepError: there is no COMMIT.
        FormatError: it is not valid, or that of another folder.
    """
    path = step_path(folder, COMMIT)
    at = f"{storage.url}: {path}"
    try:
        commit = Commit.from_bytes(storage.get(path, COMMIT_BYTES), at)
    except FileNotFoundError:
        raise MissingStepError(f"{at}: missing: the step is being saved, was never finished, or is gone.") from None
    if parse_step_folder(folder) != (commit.step, commit.save_id[:8]):
        raise FormatError(f"{at}: save_id, step: {commit.save_id} and {commit.step} are not those of the folder.")
    return Committed(step_path(folder), commit)


def read_manifest(storage: Storage, step: Committed | str) -> Manifest:
    """Return the manifest of a step, after its digest was compared.

    Args:
        storage: the store.
        step: a step, or its folder.

    Raises:
        CorruptionError: it is not the file that was committed, or it is gone.
        FormatError: it is the file that was committed, and is not valid.
        MissingStepError: the folder is no committed step.
    """
    if isinstance(step, str):
        step = read_commit(storage, step)
    path = step_path(step.folder, MANIFEST)
    at = f"{storage.url}: {path}"
    try:
        data = storage.get(path, MANIFEST_BYTES)
    except FileNotFoundError:
        raise CorruptionError(f"{at}: missing, though the step is committed.") from None
    commit = step.commit
    check_digest(data, commit.manifest_sha256, commit.manifest_bytes, at, COMMIT)
    manifest = Manifest.from_bytes(data, at)
    if (manifest.save_id, manifest.step) != (commit.save_id, commit.step):
        raise FormatError(
            f"{at}: save_id, step: must be {(commit.save_id, commit.step)} as in COMMIT, "
            f"but are {(manifest.save_id, manifest.step)}."
        )
    return manifest


def bases_of(storage: Storage, step: Committed | str) -> tuple[str, ...]:
    """Return the folders of the earlier steps in which data lies that a step refers to.

    Args:
        storage: the store.
        step: a step, or its folder.

    Raises:
        CorruptionError: the manifest is not the file that was committed, or it is gone.
        FormatError: the manifest is not valid, or its `options.bases` is no list of folders.
        MissingStepError: the folder is no committed step.
    """
    return bases_in(read_manifest(storage, step))


def bases_in(manifest: Manifest) -> tuple[str, ...]:
    """Return the folders of the earlier steps that a manifest lists.

    Raises:
        FormatError: its `options.bases` is no list of folders.
    """
    bases = manifest.options.get("bases", [])
    if not isinstance(bases, list):
        refuse("manifest.json: options: bases", bases, "must be a list of folders of steps")
    for number, folder in enumerate(bases):
        if not isinstance(folder, str) or parse_step_folder(folder) is None:
            refuse(f"manifest.json: options: bases[{number}]", folder, "must be the folder of a step")
    return tuple(bases)


def check_digest(data: bytes, sha256: str, size: int, at: str, by_whom: str) -> None:
    """Raise CorruptionError unless `data` is what another file says that it is."""
    actual = hashlib.sha256(data).hexdigest()
    if len(data) != size or actual != sha256:
        raise CorruptionError(
            f"{at}: {len(data)} bytes with SHA-256 {actual[:16]}..., but {by_whom} says {size} bytes with "
            f"{sha256[:16]}...: the file is damaged."
        )
