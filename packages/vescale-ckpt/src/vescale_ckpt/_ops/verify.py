"""Verify: is every byte of a checkpoint what was saved? Goes on after damage, and names every damaged tensor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .._codec import number_width
from .._format import (
    Committed,
    Index,
    Manifest,
    check_cover,
    committed,
    data_path,
    find,
    newest,
    problems,
    read_index,
    read_manifest,
    read_store,
    step_path,
)
from .._format.paths import MARKER
from .._format.safetensors_file import plain_header
from .._state import dtype_of
from .._state.nodes import check as check_tree
from .._storage import Storage, open_storage
from ..errors import CheckpointError, CorruptionError, FormatError, MissingStepError, StorageError
from .chunkcheck import NO_CODEC, ChunkChecker, Wanted
from .names import Rows, name_of, tensor_of
from .references import bases_of

__all__ = ["Finding", "StepReport", "VerifyReport", "verify"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it was saved."""

    folder: str
    """Folder of the step in the store, or the file at its root."""
    text: str
    """What is wrong, and where."""
    tensors: tuple[str, ...] = ()
    """Names of the tensors that are damaged by it, as far as that can be told."""

    def __str__(self) -> str:
        return f"{self.folder}: {self.text}"


@dataclass(slots=True)
class StepReport:
    """What was looked at in one step."""

    step: int
    """Number of the step."""
    folder: str
    """Its folder in the store."""
    tensors: int = 0
    """Number of tensors, rank-local ones too."""
    chunks: int = 0
    """Number of chunks."""
    bytes: int = 0
    """Bytes of the chunks as they are stored, in this step and in earlier ones."""
    problems: list[Finding] = field(default_factory=list)
    """What is wrong."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


@dataclass(slots=True)
class VerifyReport:
    """The outcome; true where nothing is wrong."""

    path: str
    """The store."""
    steps: list[StepReport] = field(default_factory=list)
    """Per step that was looked at."""
    others: list[Finding] = field(default_factory=list)
    """A damaged or missing marker of the store; and where all steps were asked for, folders that should be steps and
    are none."""
    bytes: int = 0
    """Bytes of chunks that were read; a chunk that several steps share is read once."""

    @property
    def problems(self) -> list[Finding]:
        """All that is wrong."""
        return [finding for step in self.steps for finding in step.problems] + self.others

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the damaged tensors."""
        return tuple(dict.fromkeys(name for finding in self.problems for name in finding.tensors))

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def raise_if_damaged(self) -> None:
        """Raise CorruptionError with all that is wrong, if anything is."""
        from ..errors import CorruptionError

        if not self.ok:
            found = self.problems
            more = f"\n  and {len(found) - 20} more" if len(found) > 20 else ""
            lines = "".join(f"\n  {finding}" for finding in found[:20])
            raise CorruptionError(f"{self.path}: {len(found)} problems:{lines}{more}", self.tensors)


def verify(
    path: str | os.PathLike[str] | Storage,
    step: int | str | None = None,
    *,
    threads: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Compare everything in a checkpoint with its checksums.

    Args:
        path: the store.
        step: number of a step, "latest" (also None), or "all".
        threads: that read and decode.
        progress: called with (bytes done, bytes in total so far), from any thread.

    Returns:
        What was looked at and what is wrong: files that are missing or have other digests, tensors that are not
        covered, chunks that cannot be read or decoded or have another checksum, in this step or in an earlier one.

    Raises:
        MissingStepError: there is no such step.
        StorageError: the storage failed as a whole.

    Example:
        >>> import vescale_ckpt as ck, tempfile, torch
        >>> root = tempfile.mkdtemp()
        >>> _ = ck.save(root, {"weight": torch.ones(8)}, step=1)
        >>> bool(ck.verify(root))
        True
    """
    if type(threads) is not int or threads < 1:
        raise ValueError(f"threads: expected an integer of at least 1, but got {threads!r}.")
    storage = open_storage(path)
    report = VerifyReport(storage.url)
    if step == "all":
        there = newest(committed(storage))
        bad = {"commit", "newer"}
        report.others = [Finding(step_path(p.name), f"no step: {p.text}") for p in problems(storage) if p.kind in bad]
        if not there and not report.others:
            raise MissingStepError(f"{storage.url}: no committed checkpoint.")
    else:
        there = [find(storage, "latest" if step is None else step)]
    report.others += _marker(storage)
    work = _Verifier(storage, threads, progress)
    for entry in there:
        report.steps.append(work.step(entry))
    report.bytes = work.checker.bytes
    return report


def _marker(storage: Storage) -> list[Finding]:
    """Return what is wrong with the file that says what the store is."""
    try:
        read_store(storage)
    except StorageError:
        raise
    except CheckpointError as error:
        return [Finding(MARKER, str(error))]
    return []


class _Verifier:
    def __init__(self, storage: Storage, threads: int, progress: Callable[[int, int], None] | None) -> None:
        self._storage, self._progress = storage, progress
        self._done = self._total = 0
        self.checker = ChunkChecker(storage, threads, self._advance if progress is not None else None)

    def _advance(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, max(self._done, self._total))

    def step(self, entry: Committed) -> StepReport:
        report = StepReport(entry.step, entry.folder)
        say = report.problems.append
        try:
            manifest = read_manifest(self._storage, entry)
        except StorageError:
            raise
        except CheckpointError as error:
            say(Finding(entry.folder, str(error)))
            return report
        indexes = []
        for writer in range(manifest.world):
            try:
                indexes.append(read_index(self._storage, entry, manifest, writer))
            except StorageError:
                raise
            except CheckpointError as error:
                say(Finding(entry.folder, str(error)))
        report.tensors = len(manifest.tensors) + sum(len(index.local_tensors) for index in indexes)
        keys = {f"tensor {record.name!r}": record.name for record in manifest.tensors}
        report.problems += [Finding(entry.folder, text, _named(text, keys)) for text in check_cover(manifest, indexes)]
        report.problems += self._whole(entry, manifest, indexes)
        self._sizes(entry, indexes, report)
        report.problems += self._headers(entry, manifest, indexes)
        chunks = [list(_wanted(manifest, index)) for index in indexes]
        report.chunks = sum(map(len, chunks))
        report.bytes = sum(wanted.stored for rows in chunks for wanted in rows)
        self._total = self._done + report.bytes
        self.checker.check(wanted for rows in chunks for wanted in rows)
        for index, rows in zip(indexes, chunks, strict=True):
            report.problems += self._damaged(entry, manifest, index, rows)
        return report

    def _whole(self, entry: Committed, manifest: Manifest, indexes: list[Index]) -> Iterator[Finding]:
        """Yield where the files of a step do not go together."""
        slots = max((len(index.local) for index in indexes), default=0)
        try:
            check_tree(manifest.tree, len(manifest.tensors), slots)
        except CheckpointError as error:
            yield Finding(entry.folder, str(error))
        for name in ("chunks", "data_bytes"):
            said = entry.commit.chunks if name == "chunks" else entry.commit.bytes
            found = sum(getattr(writer, name) for writer in manifest.writers)
            if said != found:
                yield Finding(entry.folder, f"COMMIT counts {said} {name}, the manifest {found}.")
        bases = bases_of(manifest)
        used = {f.path.partition("/data/")[0] for i in indexes for f in i.files if f.path.startswith("steps/")}
        if bases is not None and (more := used - bases - {entry.folder}):
            yield Finding(entry.folder, f"chunks lie in {sorted(more)}, which the manifest does not list as bases.")

    def _sizes(self, entry: Committed, indexes: list[Index], report: StepReport) -> None:
        """Compare the sizes of files that are longer than they should be; shorter ones show in their chunks."""
        sizes = {file.path: file.bytes for index in indexes for file in index.files}
        folders = {path.rpartition("/")[0] for path in sizes}
        there = {f"{folder}/{e.name}": e.size for folder in folders for e in self._storage.list(folder)}
        for path, size in sizes.items():
            actual = there.get(path)
            if actual is not None and actual != size:
                report.problems.append(Finding(entry.folder, f"{path} has {actual} bytes, but {size} were saved."))

    def _headers(self, entry: Committed, manifest: Manifest, indexes: list[Index]) -> Iterator[Finding]:
        """Yield which safetensors files of a step have another header than what was saved.

        No checksum covers it, for the index says where every byte is; but other programs go by it.
        """
        for index in indexes:
            path = data_path(entry.folder, index.writer, 0, "safetensors")
            if path not in {file.path for file in index.files}:
                continue
            records = {piece.tensor: tensor_of(manifest, index, piece.tensor) for piece in index.pieces}
            tensors = {n: (name_of(manifest, index, n), r.dtype, r.shape) for n, r in records.items()}
            pieces = sorted(index.pieces, key=lambda record: record.first)
            try:
                text = self._difference(path, plain_header(entry.folder, index.writer, pieces, tensors).data)
            except (CorruptionError, FormatError, StorageError) as error:
                text = str(error)
            if text:
                yield Finding(entry.folder, f"header of {path}: {text}")

    def _difference(self, path: str, wanted: bytes) -> str:
        """Return where a file does not begin as it should; nothing where it does, or is not there."""
        try:
            source = self._storage.open(path)
        except FileNotFoundError:
            return ""  # its chunks tell
        try:
            found = bytearray(min(source.size, len(wanted)))
            source.read_into(0, [memoryview(found)])
        finally:
            source.close()
        if found == wanted:
            return ""
        at = next((n for n, (one, other) in enumerate(zip(found, wanted, strict=False)) if one != other), len(found))
        return f"byte {at} is not what was saved: programs that read the file by itself may find other tensors in it."

    def _damaged(self, entry: Committed, manifest: Manifest, index: Index, rows: list[Wanted]) -> Iterator[Finding]:
        """Yield one finding per tensor, file and reason."""
        names = Rows(manifest, index)
        found: dict[tuple[str, str, str], list[Wanted]] = {}
        for row, wanted in enumerate(rows):
            reason = self.checker.outcome(wanted)
            if reason:
                kind = reason if not reason.startswith("CRC-32 is") else "CRC-32"
                found.setdefault((names.name(row), wanted.file, kind), []).append(wanted)
        for (name, file, _), bad in found.items():
            reason = self.checker.outcome(bad[0])
            more = f" (and {len(bad) - 1} more chunks)" if len(bad) > 1 else ""
            text = f"tensor {name!r}: {file} at byte {bad[0].offset}: {reason}{more}"
            # Without its codec nothing is known of a chunk, also not that it is damaged.
            yield Finding(entry.folder, text, () if reason.startswith(NO_CODEC) else (name,))


def _wanted(manifest: Manifest, index: Index) -> Iterator[Wanted]:
    table, paths = index.chunks, [file.path for file in index.files]
    codecs = ["", *index.codecs]
    for record in sorted(index.pieces, key=lambda record: record.first):
        width = number_width(dtype_of(tensor_of(manifest, index, record.tensor).dtype))
        for row in range(record.first, record.first + record.count):
            file, codec = paths[table.file[row]], codecs[table.codec[row]]
            yield Wanted(file, table.offset[row], table.stored[row], table.raw[row], codec, table.crc[row], width)


def _named(text: str, keys: dict[str, str]) -> tuple[str, ...]:
    """Return the tensor that a sentence like "tensor 'a.b': ..." is about."""
    at = text.find(": ")
    while at >= 0:
        if text[:at] in keys:
            return (keys[text[:at]],)
        at = text.find(": ", at + 1)
    return ()
