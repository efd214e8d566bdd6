"""Reads chunks in runs of neighbours, decodes them and compares checksums, on worker threads."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from .. import _codec
from .._save.content import HEADER
from .._storage import Source, Storage
from ..errors import CheckpointError, CorruptionError, StorageError

__all__ = ["NO_CODEC", "ChunkChecker", "Wanted"]

NO_CODEC = "cannot be decoded here"
"""How an outcome begins that says nothing of the chunk, since its codec is not there."""

RUN_BYTES = 8 << 20
"""Neighbouring chunks are read together up to this many bytes."""
GAP_BYTES = 64 << 10
"""Gaps up to this many bytes are read rather than skipped."""


class Wanted(NamedTuple):
    """A chunk that is to be checked. Equal ones are checked once."""

    file: str
    """Path of its file."""
    offset: int
    """First byte in the file."""
    stored: int
    """Bytes in the file."""
    raw: int
    """Bytes when decoded."""
    codec: str
    """Name of the codec; "" for none."""
    crc: int
    """CRC-32 of the decoded bytes."""
    itemsize: int
    """Bytes of one number; a complex element is two."""


class ChunkChecker:
    """Checks chunks and remembers the outcome, so that those that several steps share are read once.

    Args:
        storage: the store.
        threads: that read and decode.
        progress: called with the number of bytes that were read since the last call, from any thread.
    """

    def __init__(self, storage: Storage, threads: int, progress: Callable[[int], None] | None) -> None:
        self._storage, self._threads, self._progress = storage, threads, progress
        self._outcome: dict[Wanted, str] = {}  # the empty string where all is well
        self._lock = threading.Lock()
        self.bytes = 0
        """Bytes that were read."""

    def outcome(self, wanted: Wanted) -> str:
        """Return what is wrong with a chunk that was checked; an empty string where nothing is."""
        return self._outcome[wanted]

    def check(self, wanted: Iterable[Wanted]) -> None:
        """Check chunks, and all of them."""
        left = sorted(set(wanted) - self._outcome.keys())
        with ThreadPoolExecutor(self._threads, thread_name_prefix="vescale-ckpt verify") as pool:
            waiting: deque[Future[None]] = deque()
            for run in _runs(left):
                waiting.append(pool.submit(self._run, run))
                if len(waiting) > 2 * self._threads:  # memory is bounded by threads, not by the checkpoint
                    waiting.popleft().result()
            while waiting:
                waiting.popleft().result()

    def _run(self, run: list[Wanted]) -> None:
        low, high = run[0].offset, max(w.offset + w.stored for w in run)
        if run[0].file.startswith("chunks/"):
            low = 0  # what the file says of itself is read by saves that share it
        try:
            source = self._storage.open(run[0].file)
        except FileNotFoundError:
            self._note(run, "the file is missing", 0)
            return
        except CheckpointError as error:
            self._note(run, str(error), 0)
            return
        try:
            data = self._bytes(source, low, min(high, source.size))
            for wanted in run:
                self._note([wanted], self._fault(wanted, data, low), wanted.stored)
        except (StorageError, CorruptionError) as error:
            # One bad sector must not hide what else can be read.
            if len(run) == 1:
                self._note(run, str(error), 0)
            else:
                for wanted in run:
                    self._run([wanted])
        finally:
            source.close()

    def _bytes(self, source: Source, low: int, high: int) -> torch.Tensor:
        data = torch.empty(max(0, high - low), dtype=torch.uint8, device="cpu")
        if data.numel():
            source.read_into(low, [_codec.memory(data)])
        return data

    def _fault(self, wanted: Wanted, data: torch.Tensor, low: int) -> str:
        begin = wanted.offset - low
        stored = data[begin : begin + wanted.stored] if begin < data.numel() else data[:0]
        if stored.numel() < wanted.stored:
            return "the file is too short"
        name = wanted.codec or "raw"
        if wanted.file.startswith("chunks/") and bytes(_codec.memory(data[:HEADER])) != name.encode().ljust(HEADER):
            return f"the file does not say that it is encoded as {name}"
        raw = stored
        if wanted.codec:
            if wanted.codec not in _codec.codec_names():
                return (
                    f"{NO_CODEC}: the codec {wanted.codec!r} is not known (there are "
                    f"{', '.join(_codec.codec_names())}); install the plugin that brings it, or switch it on "
                    "(python -m vescale_ckpt plugins)"
                )
            raw = torch.empty(wanted.raw, dtype=torch.uint8, device="cpu")
            try:
                _codec.codec(wanted.codec).decode(_codec.memory(stored), raw, wanted.itemsize)
            except CheckpointError as error:
                return str(error)
        crc = _codec.crc32(raw)
        if crc != wanted.crc:
            return f"CRC-32 is {crc:08x}, but {wanted.crc:08x} was saved"
        if wanted.file.startswith("chunks/") and hashlib.sha256(_codec.memory(raw)).hexdigest() not in wanted.file:
            return "the content is not what the file is named after"
        return ""

    def _note(self, run: list[Wanted], outcome: str, count: int) -> None:
        with self._lock:
            self._outcome.update(dict.fromkeys(run, outcome))
            self.bytes += count
        if self._progress is not None:
            self._progress(sum(wanted.stored for wanted in run))


def _runs(wanted: list[Wanted]) -> Iterator[list[Wanted]]:
    """Cut sorted chunks into runs that are read at once."""
    run: list[Wanted] = []
    for chunk in wanted:
        end = run[-1].offset + run[-1].stored if run else 0
        if run and (
            chunk.file != run[0].file
            or chunk.offset - end > GAP_BYTES
            or chunk.offset + chunk.stored - run[0].offset > RUN_BYTES
        ):
            yield run
            run = []
        run.append(chunk)
    if run:
        yield run
