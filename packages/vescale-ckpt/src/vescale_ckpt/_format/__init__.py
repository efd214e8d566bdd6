"""The format on disk: JSON files that are checked number by number, and names of files. FORMAT.md describes it."""

from __future__ import annotations

from .chunks import Chunk, ChunkTable, FileRecord
from .commit import Commit, Committed, bases_in, bases_of, read_commit, read_manifest
from .cover import check_cover
from .index import Index, PieceRecord
from .layouts import layouts_from_json, layouts_to_json
from .lease import Lease
from .limits import FORMAT, INLINE_BYTES, ITEMSIZE, MAX_STEP
from .manifest import LOCAL, Manifest, TensorRecord, WriterRecord
from .paths import chunk_path, data_path, index_path, parse_step_folder, step_folder, step_path
from .steps import Problem, StepFolders, committed, find, newest, problems
from .store import ensure_store, read_index, read_store

__all__ = [
    "FORMAT",
    "INLINE_BYTES",
    "ITEMSIZE",
    "LOCAL",
    "MAX_STEP",
    "Chunk",
    "ChunkTable",
    "Commit",
    "Committed",
    "FileRecord",
    "Index",
    "Lease",
    "Manifest",
    "PieceRecord",
    "Problem",
    "StepFolders",
    "TensorRecord",
    "WriterRecord",
    "bases_in",
    "bases_of",
    "check_cover",
    "chunk_path",
    "committed",
    "data_path",
    "ensure_store",
    "find",
    "index_path",
    "layouts_from_json",
    "layouts_to_json",
    "newest",
    "parse_step_folder",
    "problems",
    "read_commit",
    "read_index",
    "read_manifest",
    "read_store",
    "step_folder",
    "step_path",
]
