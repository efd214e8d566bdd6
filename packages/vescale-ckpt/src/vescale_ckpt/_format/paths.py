"""Names of the files of a store. A path that a file names is accepted only in the two forms that data has."""

from __future__ import annotations

import re

from .limits import MAX_STEP

__all__ = [
    "CHUNKS",
    "CHUNKS_GO",
    "COMMIT",
    "DATA_PATH",
    "LEASE",
    "MANIFEST",
    "MARKER",
    "PIN",
    "REMOVED",
    "SAVE_ID",
    "STEPS",
    "chunk_path",
    "data_path",
    "index_path",
    "parse_step_folder",
    "step_folder",
    "step_path",
]

MARKER = "vckpt.json"
STEPS = "steps"
CHUNKS = "chunks"
CHUNKS_GO = "gc-chunks-"
"""Files at the root begin with this while a garbage collection removes shared chunks."""
MANIFEST = "manifest.json"
COMMIT = "COMMIT"
LEASE = "LEASE"
PIN = "PIN"
REMOVED = "REMOVED"
"""In the folder of a step that is being removed, or of which only data is left that later steps refer to."""

SAVE_ID = re.compile(r"[0-9a-f]{8,64}", re.ASCII)
DATA_PATH = re.compile(
    r"steps/[0-9]{8,16}-[0-9a-f]{8}/data/[0-9A-Za-z][0-9A-Za-z._-]{0,127}"
    r"|chunks/(?P<fan>[0-9a-f]{2})/(?P=fan)[0-9a-f]{62}",
    re.ASCII,
)
"""Where data may lie, relative to the store."""
_FOLDER = re.compile(r"([0-9]{8,16})-([0-9a-f]{8})", re.ASCII)


def step_folder(step: int, save_id: str) -> str:
    """Return the folder of a save, relative to the store.

    Args:
        step: from 0 to 10**15.
        save_id: at least 8 hex digits.

    Example:
        >>> step_folder(1000, "3f2a9c1b5d6e7f80")
        'steps/00001000-3f2a9c1b'
    """
    if not 0 <= step <= MAX_STEP:
        raise ValueError(f"step: must be from 0 to {MAX_STEP}, but got {step}.")
    if not SAVE_ID.fullmatch(save_id):
        raise ValueError(f"save_id: must be 8 to 64 lower-case hex digits, but got {save_id!r}.")
    return f"{STEPS}/{step:08d}-{save_id[:8]}"


def parse_step_folder(folder: str) -> tuple[int, str] | None:
    """Return (step, first 8 digits of the save id) of a folder or of its name alone; None if it is no such name.

    Example:
        >>> parse_step_folder("steps/00001000-3f2a9c1b")
        (1000, '3f2a9c1b')
        >>> parse_step_folder("latest")
    """
    match = _FOLDER.fullmatch(folder.removeprefix(f"{STEPS}/"))
    if match is None or int(match[1]) > MAX_STEP or (len(match[1]) > 8 and match[1][0] == "0"):
        return None
    return int(match[1]), match[2]


def step_path(folder: str, name: str = "") -> str:
    """Return the path of a file in a step's folder, or of the folder, which may be given with or without `steps/`.

    Example:
        >>> step_path("00001000-3f2a9c1b", COMMIT)
        'steps/00001000-3f2a9c1b/COMMIT'
    """
    path = f"{STEPS}/{folder.removeprefix(f'{STEPS}/')}"
    return f"{path}/{name}" if name else path


def index_path(folder: str, writer: int) -> str:
    """Return the path of a writer's index.

    Example:
        >>> index_path("steps/00001000-3f2a9c1b", 3)
        'steps/00001000-3f2a9c1b/index/w00003.json'
    """
    return step_path(folder, f"index/w{writer:05d}.json")


def data_path(folder: str, writer: int, number: int = 0, suffix: str = "pack") -> str:
    """Return the path of a data file of a writer.

    Example:
        >>> data_path("steps/00001000-3f2a9c1b", 3)
        'steps/00001000-3f2a9c1b/data/w00003-0.pack'
    """
    return step_path(folder, f"data/w{writer:05d}-{number}.{suffix}")


def chunk_path(digest: bytes) -> str:
    """Return the path of a chunk that is named by the SHA-256 of its raw bytes.

    Example:
        >>> chunk_path(bytes(32))[:12]
        'chunks/00/00'
    """
    return f"{CHUNKS}/{digest.hex()[:2]}/{digest.hex()}"
