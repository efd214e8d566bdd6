"""Reads chunks, decodes them, checks their checksums and puts them where they are wanted, on worker threads.

A chunk whose bytes are one run of a target's memory is read or decoded straight into it. Everything else goes through
scratch buffers of the threads, so memory is bounded by threads, not by tensors.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _codec
from .._state import dtype_of
from .._storage import Source, Storage
from .._threads import Workers
from .._words import counted
from ..errors import CorruptionError, FormatError
from .jobs import GAP_BYTES, JOB_BYTES, Extent, Job, jobs_of
from .plan import Inline, Part, Plan, Want, select
from .target import copy

__all__ = ["Damage", "ReadStats", "Reader", "corruption"]

THREADS = 2
LOCAL_BYTES = 1 << 20
"""One job on local files; object stores need larger ones."""
ALIGNMENT = 64
OPEN_FILES = 128
"""Files that are kept open at a time."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A chunk that cannot be read as it was saved."""

    tensor: str
    """Name of its tensor."""
    writer: int
    """Whose index lists it."""
    file: str
    """Data file, relative to the store."""
    offset: int
    """First byte in the file."""
    reason: str
    """What is wrong."""

    def __str__(self) -> str:
        return f"{self.tensor} (writer {self.writer}, {self.file} at byte {self.offset}): {self.reason}"


@dataclass(slots=True)
class ReadStats:
    """What was read."""

    wanted: int = 0
    """Bytes of tensors that were asked for."""
    read: int = 0
    """Bytes that were read from data files."""
    chunks: int = 0
    """Chunks that were read."""


class Scratch:
    """Buffers of one thread."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._buffers: dict[str, Tensor] = {}

    def take(self, use: str, size: int) -> Tensor:
        """Return `size` bytes for one of the uses, valid until they are taken again."""
        buffer = self._buffers.get(use)
        if buffer is None or buffer.numel() < size:
            rounded = 1 << max(20, (size - 1).bit_length())
            buffer = self._buffers[use] = torch.empty(rounded, dtype=torch.uint8, pin_memory=self._pinned)
        return buffer[:size]


class Files:
    """Open files of a store; the one that was not used for longest is closed when there are too many."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._idle: OrderedDict[str, Source] = OrderedDict()
        self._used: dict[str, tuple[Source, int]] = {}

    def take(self, path: str) -> Source:
        """Return the file, open until it is given back."""
        with self._lock:
            source, users = self._used.get(path, (self._idle.pop(path, None), 0))
            if source is not None:
                self._used[path] = (source, users + 1)
                return source
        opened = self._storage.open(path)  # not under the lock: it may take long
        with self._lock:
            # Meanwhile another thread may have opened it, and even given it back.
            source, users = self._used.get(path) or (self._idle.pop(path, opened), 0)
            self._used[path] = (source, users + 1)
        if source is not opened:
            opened.close()
        return source

    def give(self, path: str) -> None:
        """Give a file back."""
        closing = None
        with self._lock:
            source, users = self._used.pop(path)
            if users > 1:
                self._used[path] = (source, users - 1)
                return
            self._idle[path] = source
            if len(self._idle) + len(self._used) > OPEN_FILES:
                closing = self._idle.popitem(last=False)[1]
        if closing is not None:
            closing.close()

    def close(self) -> None:
        """Close all files that nobody uses."""
        with self._lock:
            idle, self._idle = list(self._idle.values()), OrderedDict()
        for source in idle:
            source.close()


class Reader:
    """Carries out plans on one store."""

    def __init__(self, storage: Storage) -> None:
        """Take the store."""
        self._storage = storage
        self.files = Files(storage)

    def read(
        self,
        plan: Plan,
        *,
        verify: bool,
        threads: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> tuple[ReadStats, list[Damage]]:
        """Fill the targets of a plan.

        Args:
            plan: what to read, and where it goes.
            verify: check the checksum of every chunk; else read of raw chunks only what is wanted.
            threads: that read at the same time; None: 2.
            progress: called with numbers of bytes that have been read, by any thread.

        Returns:
            What was read, and the chunks that are damaged; the targets of those hold no valid values.

        Raises:
            StorageError: the storage failed.
        """
        for value in plan.inline:
            _put_inline(value)
        jobs = jobs_of(plan.parts, whole=verify, most=LOCAL_BYTES if self._storage.random_write else JOB_BYTES)
        stats = ReadStats(plan.wanted, sum(extent.size for job in jobs for extent in job.extents), len(plan.parts))
        run = _Run(self.files, verify, progress, _devices(plan.parts))
        if len(jobs) == 1 or threads == 1:
            for job in jobs:
                run.job(job)
        elif jobs:
            with Workers(min(threads or THREADS, len(jobs))) as workers:
                workers.map(run.job, jobs)
        return stats, run.damages


class _Run:
    """One call of `read`."""

    def __init__(
        self,
        files: Files,
        verify: bool,
        progress: Callable[[int], None] | None,
        devices: Iterable[torch.device],
    ) -> None:
        self._files, self._verify, self._progress = files, verify, progress
        self._devices = list(devices)
        self._scratch: list[Scratch] = []
        self._junk = memoryview(bytearray(GAP_BYTES))  # what is read into it is never looked at
        self.damages: list[Damage] = []
        self._wait()  # for what was queued before on the memory that is going to be written

    def job(self, job: Job) -> None:
        """Read some chunks and put them where they are wanted."""
        try:
            scratch = self._scratch.pop()
        except IndexError:
            scratch = Scratch(pinned=bool(self._devices))
        try:
            slots, sums = self._fetch(job, scratch)
        except (CorruptionError, FileNotFoundError) as error:
            reason = "the file is missing" if isinstance(error, FileNotFoundError) else str(error)
            self.damages += [_damage(extent, job.path, reason) for extent in job.extents]
            return
        for extent, slot, crc in zip(job.extents, slots, sums, strict=True):
            try:
                self._finish(extent, slot, crc, scratch)
            except CorruptionError as error:
                self.damages.append(_damage(extent, job.path, str(error)))
        self._wait()
        self._scratch.append(scratch)
        if self._progress is not None:
            self._progress(sum(extent.size for extent in job.extents))

    def _fetch(self, job: Job, scratch: Scratch) -> tuple[list[Tensor], list[int | None]]:
        """Read the bytes of a job; return those of each chunk, in scratch or in the memory of a target, and CRCs."""
        places, size = [], 0
        for extent in job.extents:
            direct = None if _codec_of(extent.part) else _direct(extent)
            places.append((direct, size))
            if direct is None:
                size += -(-extent.size // ALIGNMENT) * ALIGNMENT
        room = scratch.take("stored", size)
        memory = _codec.memory(room)
        views, slots = [], []
        for extent, (direct, begin) in zip(job.extents, places, strict=True):
            if direct is None:
                views.append(memory[begin : begin + extent.size])
                slots.append(room[begin : begin + extent.size])
            else:
                want, first, last = direct
                target = want.target
                assert target.memory is not None
                assert target.bytes is not None
                views.append(target.memory[first:last])
                slots.append(target.bytes[first:last])
        source = self._files.take(job.path)
        try:
            checked = getattr(source, "read_checked", None) if self._verify else None
            if checked is None:
                self._read_at_once(source, job, views)
                return slots, [None] * len(slots)
            sums: list[int | None] = []
            for extent, view in zip(job.extents, views, strict=True):
                if _codec_of(extent.part):  # its checksum is that of what is decoded
                    source.read_into(extent.offset, [view])
                    sums.append(None)
                else:
                    sums.append(checked(extent.offset, view))
            return slots, sums
        finally:
            self._files.give(job.path)

    def _read_at_once(self, source: Source, job: Job, views: list[memoryview]) -> None:
        """Fill buffers by one read, and drop what lies between the chunks."""
        buffers = []
        at = job.extents[0].offset
        for extent, view in zip(job.extents, views, strict=True):
            if extent.offset > at:
                buffers.append(self._junk[: extent.offset - at])
            buffers.append(view)
            at = extent.offset + extent.size
        source.read_into(job.extents[0].offset, buffers)

    def _finish(self, extent: Extent, slot: Tensor, crc: int | None, scratch: Scratch) -> None:
        """Decode, check and hand out one chunk."""
        part, chunks = extent.part, extent.part.index.chunks
        name, data = _codec_of(part), slot
        direct = _direct(extent)
        if name:
            if direct is None:
                data = scratch.take("raw", part.count * part.itemsize)
            else:
                want, first, last = direct
                assert want.target.bytes is not None
                data = want.target.bytes[first:last]
            _codec.codec(name).decode(_codec.memory(slot), data, _codec.number_width(part.dtype))
        if self._verify:
            crc = _codec.crc32(data) if crc is None else crc
            if crc != chunks.crc[part.row]:
                raise CorruptionError(
                    f"its {part.count * part.itemsize} bytes have the CRC {crc:08x}, but were saved with "
                    f"{chunks.crc[part.row]:08x}"
                )
        filled = direct[0] if direct is not None else None
        for want in part.wants:
            if want is not filled:
                _hand_out(extent, want, data)

    def _wait(self) -> None:
        """Wait until the copies to other devices that this thread has asked for are done."""
        for device in self._devices:
            torch.accelerator.current_stream(device).synchronize()


def corruption(damages: list[Damage], store: str, folder: str, what: str) -> CorruptionError:
    """Return the error that tells what is damaged.

    Args:
        damages: at least one.
        store: where.
        folder: folder of the step that was read.
        what: what that means for the caller.
    """
    tensors = list(dict.fromkeys(damage.tensor for damage in damages))
    lines = []
    for damage in damages[:8]:
        elsewhere = not damage.file.startswith((folder + "/", "chunks/"))
        note = f"; the chunk was saved with an earlier step, {damage.file.split('/')[1]}" if elsewhere else ""
        lines.append(f"  {damage}{note}")
    if len(damages) > len(lines):
        lines.append(f"  ... and {len(damages) - len(lines)} more")
    count = counted(len(damages), "chunk")
    where = counted(len(tensors), "tensor")
    return CorruptionError(
        f"{store}, {folder}: {count} of {where} {'is' if len(damages) == 1 else 'are'} damaged:\n"
        + "\n".join(lines)
        + f"\n{what}",
        tensors,
    )


def _codec_of(part: Part) -> str | None:
    number = part.index.chunks.codec[part.row]
    return part.index.codecs[number - 1] if number else None


def _direct(extent: Extent) -> tuple[Want, int, int] | None:
    """Return who wants all that is read, in memory where it can stand as it is, and the first and last byte there."""
    for want in extent.part.wants:
        if want.at >= 0 and want.start == extent.low and want.stop == extent.high and want.target.memory is not None:
            size = extent.part.itemsize
            return want, want.at * size, (want.at + want.stop - want.start) * size
    return None


def _hand_out(extent: Extent, want: Want, data: Tensor) -> None:
    """Copy what a target wants of a chunk; nothing, where the chunk has been read into it."""
    target, part = want.target, extent.part
    if target.out is None:
        return
    size = part.itemsize
    if want.at >= 0 and target.bytes is not None:
        goal = target.bytes[want.at * size : (want.at + want.stop - want.start) * size]
        source = data[(want.start - extent.low) * size : (want.stop - extent.low) * size]
        if goal.data_ptr() != source.data_ptr():
            ctypes.memmove(goal.data_ptr(), source.data_ptr(), goal.numel())  # lets other threads run
        return
    typed = data.view(part.dtype)
    if want.at >= 0 and target.flat is not None:
        copy(
            target.flat[want.at : want.at + want.stop - want.start],
            typed[want.start - extent.low : want.stop - extent.low],
        )
        return
    for goal, source in select(typed, part, want, extent.low):
        copy(goal, source)


def _put_inline(value: Inline) -> None:
    target = value.target
    if target.out is None:
        return
    data = bytearray(value.data)
    if len(data) != value.record.nbytes:
        raise FormatError(f"{value.record.name}: {len(data)} bytes in the index, but must be {value.record.nbytes}.")
    dtype = dtype_of(value.record.dtype)
    whole = torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(value.record.shape)
    source = whole[tuple(slice(o, o + s) for o, s in zip(target.box.offset, target.box.shape, strict=True))]
    copy(target.out, source)


def _devices(parts: Iterable[Part]) -> set[torch.device]:
    return {device for part in parts for want in part.wants if (device := want.target.device) is not None}


def _damage(extent: Extent, path: str, reason: str) -> Damage:
    part = extent.part
    return Damage(part.name, part.index.writer, path, part.index.chunks.offset[part.row], reason)
