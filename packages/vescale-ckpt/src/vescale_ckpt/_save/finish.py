"""The background half of a save: write this rank's part, then commit in two phases.

First every rank makes its files durable and reports; then member 0, and only if all reported, writes the manifest and
last of all `COMMIT`. Whatever happens before that leaves a folder that no reader takes for a step.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .. import _codec
from .._format import (
    Commit,
    Index,
    Manifest,
    TensorRecord,
    WriterRecord,
    index_path,
)
from .._format.paths import CHUNKS, REMOVED
from .._storage import Storage
from .._threads import Workers
from .._trace import span
from ..errors import CheckpointError, CorruptionError, RanksError
from .base import Base, remember
from .begin import Start
from .content import ContentStore
from .engine import Batch, Writing, batches_of, choose_codec, is_inline
from .files import Packs
from .handle import Meter, SaveInfo
from .lease import LeaseKeeper
from .options import SaveOptions
from .plain import PlainFile
from .plan import records, total_bytes
from .stage import Staged, Task

if TYPE_CHECKING:
    from .._coordination import Coordinator
    from .._state import TensorSpec

__all__ = ["Part", "finish"]

log = logging.getLogger("vescale_ckpt")


@dataclass(slots=True)
class Part:
    """What one rank knows of a save when its bytes are staged."""

    storage: Storage
    """Where to."""
    start: Start
    """What member 0 said."""
    specs: Sequence[TensorSpec]
    """All tensors."""
    tree: Any
    """The state without its tensors."""
    metadata: Any
    """The caller's, of member 0."""
    local: list[Any]
    """This rank's own values."""
    local_tensors: list[TensorRecord]
    """This rank's own tensors."""
    tasks: list[Task]
    """What this rank writes."""
    names: Mapping[int, tuple[str, str]]
    """Per tensor number its name and dtype."""
    options: SaveOptions
    """How."""
    base: Base | None
    """Chunks that may be referred to."""
    staged: list[Staged] = field(default_factory=list)
    """The tasks with their bytes, once they are staged."""
    lower_priority: bool = False
    """Whether training runs beside."""
    content: ContentStore | None = None
    """The shared chunks that were used, if there are any."""
    lease: LeaseKeeper | None = None
    """Renews the lease, on member 0."""
    committing: bool = False
    """Whether `COMMIT` was tried: from then on the folder may be a step."""


def finish(part: Part, session: Coordinator, meter: Meter) -> SaveInfo:
    """Write, report, commit; return when the step is durable on all ranks.

    Raises:
        CheckpointError: the save failed here or on another rank; there is no such step then.
    """
    start, storage = part.start, part.storage
    writer = session.rank
    meter.enter("write")
    with span("write", start.folder):
        index, report = write_part(part, writer, meter)
    meter.enter("commit")
    with span("commit", start.folder):
        reports = session.gather("written", json.dumps(report).encode())
        told = None
        if reports is not None:
            try:
                told = json.dumps(commit(part, [json.loads(r) for r in reports])).encode()
            except BaseException as error:
                session.fail(error)
                raise
        totals = json.loads(_tell(session, told, start.folder))
    if part.options.dedup_mode == "position":
        base = Base(start.folder)
        base.add(index, part.names, part.options.chunk_bytes)
        remember(start.store, writer, session.world, base)
    meter.enter("done")
    return SaveInfo(
        storage.url,
        start.step,
        start.folder,
        totals["raw"],
        totals["written"],
        totals["reused"],
        meter.seconds(),
    )


def _tell(session: Coordinator, told: bytes | None, folder: str) -> bytes:
    """Tell all ranks that the step is committed; return what member 0 says of it."""
    try:
        return session.broadcast("committed", told)
    except RanksError as error:
        if told is None:
            raise RanksError(f"{error} ({folder} may be committed all the same: `vescale-ckpt ls` tells.)") from error
        log.warning("%s is committed, but a rank cannot be told: %s", folder, error)
        return told


def write_part(part: Part, writer: int, meter: Meter) -> tuple[Index, dict[str, Any]]:
    """Write the data files and the index of one writer; return the index and what is reported of it."""
    options, folder = part.options, part.start.folder
    inline = {s.task.number: bytes(_codec.memory(s.data)) for s in part.staged if is_inline(s)}
    staged = [item for item in part.staged if not is_inline(item)]
    pieces, batches = batches_of(staged, options.chunk_bytes, lambda item: choose_codec(item, options.compress))
    if options.layout == "plain":
        packs: Packs | PlainFile = PlainFile(part.storage, folder, writer, pieces, batches, part.names)
    else:
        packs = Packs(part.storage, folder, writer, options.file_bytes)
    base = part.base.without_waste(part.start.gone) if part.base is not None else None
    writing = Writing(part.storage, packs, part.names, options, base, meter, share=part.start.share)
    try:
        # Safetensors files have a fixed order, which storage that takes streams has to be given.
        threads = options.threads if part.storage.random_write or options.layout == "packed" else 1
        part.content = writing.content

        def write(batch: Batch) -> None:
            writing.write(batch)
            if part.lease is not None:
                part.lease.renew()

        with Workers(threads, low_priority=part.lower_priority) as workers:
            workers.map(write, batches)
        packs.close()
        if writing.content is not None and (lost := writing.content.lost()):
            raise CorruptionError(f"{len(lost)} shared chunks went during the save, e.g. {lost[0]}; save again.")
    except BaseException:
        packs.abort()
        raise
    files, codecs, chunks = writing.table(packs.records())
    index = Index(writer, codecs, files, pieces, chunks, inline, part.local, part.local_tensors)
    data = index.to_bytes()
    part.storage.put(index_path(folder, writer), data)
    folders = {file.path.rpartition("/data/")[0] for file in files if file.path.startswith("steps/")}
    if part.lease is not None:  # the other ranks are waited for next, perhaps as long as a lease lives
        part.lease.renew(older=30.0)
    report = {
        "sha256": hashlib.sha256(data).hexdigest(),
        "index_bytes": len(data),
        "data_bytes": sum(record.bytes for record in packs.records()),
        "chunks": len(chunks),
        "bases": sorted(folders - {folder}),
        "shares": any(file.path.startswith(f"{CHUNKS}/") for file in files),
        "files": [record.path for record in packs.records()],
        "raw": sum(s.task.nbytes for s in part.staged if s.task.number < len(part.specs)),
        "raw_local": sum(s.task.nbytes for s in part.staged if s.task.number >= len(part.specs)),
        "written": meter.written + len(data),
        "reused": meter.reused,
    }
    return index, report


def commit(part: Part, reports: list[dict[str, Any]]) -> dict[str, int]:
    """Write the manifest and `COMMIT`; return the sums. Called on member 0 when all ranks have reported."""
    start, storage, options = part.start, part.storage, part.options
    wanted, written = total_bytes(part.specs), sum(report["raw"] for report in reports)
    if wanted != written:
        raise CheckpointError(
            f"the ranks wrote {written} bytes of tensors where the state has {wanted}: they do not agree on who writes "
            f"what. Nothing was committed; please report this with the layouts of your tensors."
        )
    layouts, tensors = records(part.specs)
    writers = tuple(WriterRecord(r["sha256"], r["index_bytes"], r["data_bytes"], r["chunks"]) for r in reports)
    bases = sorted({base for report in reports for base in report["bases"]})
    chosen = {
        "compress": options.compress,
        "dedup": options.dedup_mode,
        "layout": options.layout,
        "chunk_bytes": options.chunk_bytes,
        "bases": bases,
    }
    manifest = Manifest(
        start.save_id,
        start.step,
        start.created,
        len(reports),
        layouts,
        tensors,
        part.tree,
        part.metadata,
        writers,
        chosen,
    )
    data = manifest.to_bytes()
    storage.put(f"{start.folder}/manifest.json", data)
    for name in ("data", "index", ""):
        storage.sync(f"{start.folder}/{name}".rstrip("/"))
    record = Commit(
        start.save_id,
        start.step,
        start.generation,
        hashlib.sha256(data).hexdigest(),
        len(data),
        sum(w.data_bytes for w in writers),
        sum(w.chunks for w in writers),
    )
    # First the lease, then the look: a garbage collection puts its mark, then looks at the lease. So either it leaves
    # the save alone, or no COMMIT is written, and no reader sees a step that is taken back.
    assert part.lease is not None
    part.lease.renew(older=0.0)
    if _was_taken(part) or (part.lease.ran_out and _may_lack(part, reports)):
        raise _outlived(part)
    part.committing = True
    storage.put(f"{start.folder}/COMMIT", record.to_bytes(), exclusive=True)
    _look_back(part)
    try:
        storage.remove(f"{start.folder}/LEASE")
    except (OSError, CheckpointError) as error:  # the step is committed; a lease that stays runs out by itself
        log.warning("%s: the lease could not be removed: %s", start.folder, error)
    sums = {key: sum(report[key] for report in reports) for key in ("written", "reused", "raw", "raw_local")}
    return {"raw": sums["raw"] + sums["raw_local"], "written": sums["written"] + len(data), "reused": sums["reused"]}


def _look_back(part: Part) -> None:
    """Take `COMMIT` back if a garbage collection came before it.

    Only a process that slept for a whole lease just before it has to; and it does only if parts are seen to be gone,
    for by now others may have removed older steps because of this one.
    """
    folder = part.start.folder
    assert part.lease is not None
    slept = not part.lease.lives
    try:
        taken = _was_taken(part)
    except (OSError, CheckpointError) as error:
        if slept:
            raise CheckpointError(
                f"{folder}: the save outlived its lease, and it cannot be looked whether a garbage collection has "
                f"removed parts of it: {error}. It is committed; `vescale-ckpt verify` tells whether it is whole."
            ) from error
        # While the lease lives nobody takes a save for dead, so the look would have found nothing.
        log.warning("%s is committed, though the storage fails: %s", folder, error)
        return
    if not taken:
        return
    try:
        part.storage.remove(f"{folder}/COMMIT")
    except (OSError, CheckpointError) as error:
        raise CheckpointError(
            f"{folder}: the save outlived its lease, and a garbage collection has removed parts of it, but its COMMIT "
            f"cannot be taken back: {error}. Remove the file {folder}/COMMIT by hand, and save again."
        ) from error
    raise _outlived(part)


def _was_taken(part: Part) -> bool:
    """Tell whether a garbage collection takes the save for dead: there is its mark, or what it removes before that."""
    folder = part.start.folder
    return REMOVED in {e.name for e in part.storage.list(folder)} or not part.storage.list(f"{folder}/index")


def _may_lack(part: Part, reports: list[dict[str, Any]]) -> bool:
    """Tell whether a save whose lease ran out for a time may lack something of what it wrote or refers to."""
    # What it refers to was free to go; that does not show in its own folder, which may be a new one by now.
    if any(report["bases"] or report["shares"] for report in reports):
        return True
    folder = part.start.folder
    inner = [f"{folder}/{name}" for name in ("data", "index")]
    there = {f"{path}/{entry.name}" for path in inner for entry in part.storage.list(path)}
    own = {path for report in reports for path in report["files"]}
    return not own | {index_path(folder, writer) for writer in range(len(reports))} <= there


def _outlived(part: Part) -> CheckpointError:
    return CheckpointError(
        f"{part.start.folder}: the save outlived its lease, so that a garbage collection may have removed parts of it. "
        f"Nothing was committed; save again, with a timeout above {part.options.timeout:g} s if saves take that long."
    )
