"""Where bytes are kept: one small interface, a local folder, object stores through fsspec, plugins by scheme."""

from __future__ import annotations

from .interface import Entry, Sink, Source, Storage, check_path, identity_of, is_temporary, leftovers
from .registry import open_storage

__all__ = [
    "Entry",
    "Sink",
    "Source",
    "Storage",
    "check_path",
    "identity_of",
    "is_temporary",
    "leftovers",
    "open_storage",
]
