"""The root of a store: the marker that says what the folder is; and the index files of a step."""

from __future__ import annotations

import re
import secrets

from .._storage import Storage
from ..errors import CorruptionError, FormatError, MissingStepError
from .commit import Committed, check_digest, digest_of_fields
from .fields import Fields, by, check_format
from .index import Index
from .jsonio import dumps, loads, refuse
from .limits import COMMIT_BYTES, FORMAT, INDEX_BYTES
from .manifest import Manifest
from .paths import MANIFEST, MARKER, index_path

__all__ = ["ensure_store", "read_index", "read_store"]

_STORE = re.compile(r"[0-9a-f]{8,64}", re.ASCII)


def ensure_store(storage: Storage) -> str:
    """Return the id of a store, after making it one if it is none.

    Raises:
        FormatError: the marker is damaged or of a newer format.
        StorageError: the storage failed.
    """
    value = {"format": FORMAT, "by": by(), "store": secrets.token_hex(16)}
    try:
        return read_store(storage)
    except MissingStepError:
        pass
    try:
        storage.put(MARKER, dumps({**value, "sha256": digest_of_fields(value)}, MARKER), exclusive=True)
    except FileExistsError:  # another saver was first
        return read_store(storage)
    return str(value["store"])


def read_store(storage: Storage) -> str:
    """Return the id of a store.

    Raises:
        MissingStepError: there is no store.
        FormatError: the marker is damaged or of a newer format.
        StorageError: the storage failed.
    """
    at = f"{storage.url}: {MARKER}"
    try:
        data = storage.get(MARKER, COMMIT_BYTES)
    except FileNotFoundError:
        raise MissingStepError(f"{storage.url}: no checkpoints here: there is no file {MARKER}.") from None
    value = loads(data, at, COMMIT_BYTES)
    check_format(value, at)
    fields = Fields(value, at, "format by store sha256")
    store = fields.text("store", _STORE, "8 to 64 lower-case hex digits")
    said = fields.value("sha256")
    if said != digest_of_fields({key: entry for key, entry in value.items() if key != "sha256"}):
        rule = (
            "must be the digest of the other fields; the file is damaged: remove it, and the next save writes another"
        )
        refuse(fields.at("sha256"), said, rule)
    return store


def read_index(storage: Storage, step: Committed | str, manifest: Manifest, writer: int) -> Index:
    """Return the index of a writer, after its digest was compared.

    Args:
        storage: the store.
        step: a step of it, or its folder.
        manifest: the step's.
        writer: number of the writer.

    Raises:
        CorruptionError: it is not the file that was committed, or it is gone.
        FormatError: it is the file that was committed, and is not valid.
    """
    path = index_path(step if isinstance(step, str) else step.folder, writer)
    at = f"{storage.url}: {path}"
    record = manifest.writers[writer]
    try:
        data = storage.get(path, INDEX_BYTES)
    except FileNotFoundError:
        raise CorruptionError(f"{at}: missing, though the step is committed.") from None
    check_digest(data, record.index_sha256, record.index_bytes, at, MANIFEST)
    index = Index.from_bytes(data, manifest, at)
    if (index.writer, len(index.chunks)) != (writer, record.chunks):
        raise FormatError(
            f"{at}: writer, chunks: must be {(writer, record.chunks)} as in the manifest, "
            f"but are {(index.writer, len(index.chunks))}."
        )
    return index
