"""`save` and `async_save`: what happens in the caller's thread, and what in the background.

Every rank that takes part calls them. An error on one rank reaches all of them, before or after the state was staged.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .. import _state
from .._coordination import Coordinator, coordinator
from .._format import LOCAL, MAX_STEP, TensorRecord
from .._storage import Storage, open_storage
from .._trace import span
from ..errors import RanksError, StateError
from .base import load_base, names_by_number, recall
from .begin import Start, begin, drop, groups_of, writes_all
from .finish import Part, finish
from .handle import Meter, SaveHandle, SaveInfo
from .options import SaveOptions
from .plan import agree_on_keys, assign, describe_state, total_bytes
from .replicas import check_replicas
from .running import start as start_thread
from .running import wait_for
from .space import check_space
from .stage import stage
from .staging import StagingPool, default_pool

if TYPE_CHECKING:
    import torch.distributed as dist

    from .._state import TensorSpec

__all__ = ["async_save", "check_metadata", "check_step", "clean_up", "save"]


def save(
    path: str | os.PathLike[str] | Storage,
    state: Any,
    *,
    step: int | None = None,
    metadata: Any = None,
    compress: str | None = None,
    dedup: str | None = "position",
    layout: str = "packed",
    overwrite: bool = False,
    verify_replicas: bool = False,
    differing: str = "error",
    fsync: bool = True,
    threads: int = 2,
    chunk_bytes: int = 1 << 20,
    file_bytes: int = 4 << 30,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = 1800.0,
    pool: StagingPool | None = None,
) -> SaveInfo:
    """Save a state and return when it is committed and durable.

    Every rank of the process group calls this, with its own part of the state; without torch.distributed this process
    is the only one. Replicas are written once, evenly by all that hold them.

    Args:
        path: the store: a folder, a URL (`memory://...`, `s3://...`, with fsspec), or a storage. Holds many steps.
        state: nested dicts, lists and tuples of tensors (plain, torch's DTensor, or of a class that a plugin knows),
            Python values, and objects with `state_dict()`. Wrap what each rank keeps for itself in `local(...)`.
        step: number of the step; None: the one after the latest.
        metadata: JSON of yours that is kept with the step, e.g. `{"loss": 2.5}`; that of the first rank counts.
        compress: None writes chunks as they are, which is fastest on a local disk; "auto" compresses tensors of which a
            sample says that it saves bytes, for slow or dear storage; or the name of a codec.
        dedup: "position" refers to an earlier step for chunks that are still the same there; "content" shares equal
            chunks of the whole store by their SHA-256; None writes everything. A removed step leaves the data files
            that later steps refer to: "position" goes on to refer to such a file while a quarter of it or more is
            needed, else it writes those chunks again, as it always does with chunks below 16 KiB. So what lies in a
            store stays within a few times the steps that are kept.
        layout: "packed", or "plain": ordinary safetensors files, never deduplicated, and only with `compress=None`.
        overwrite: save a step again that is there; the old one stays valid until the new one is committed.
        verify_replicas: compare all replicas first. Always compared are Python values and of tensors that all ranks
            hold whole all bytes up to 16 KiB, and a sample of those of larger ones.
        differing: where such a tensor or value differs between ranks: "error", or "first" to save what the lowest rank
            has, whole, as for the running means of batch norm in DistributedDataParallel.
        fsync: make files durable before the commit. False is for tests and for storage that loses nothing.
        threads: threads that checksum, compress and write.
        chunk_bytes: what is checked, compressed and shared as one; a multiple of 4096.
        file_bytes: a rank starts another data file beyond this size.
        process_group: the ranks that save together; None: all.
        timeout: seconds to wait for other ranks.
        pool: where host buffers for copies come from; None: one that the process shares.

    Returns:
        What was written.

    Raises:
        StateError: something in the state cannot be saved; the message names it.
        LayoutError: a tensor is a pending sum, or its class is not known.
        RanksError: the ranks disagree, or one failed or did not answer.
        StorageError: the storage failed, or is full (ENOSPC). With `compress=None`, and no earlier step to refer to
            (the first step, `dedup=None` or `layout="plain"`), it is known how much is to be written, and nothing is
            if less than that is free; any other save finds out when it writes. Whatever went wrong, earlier steps
            are as they were. Once the step is committed a storage that fails is logged, and the save has succeeded.
        CheckpointError: the step is there already, or a garbage collection took the save for dead.

    Example:
        >>> import tempfile, torch, vescale_ckpt as ck
        >>> folder = tempfile.mkdtemp()
        >>> ck.save(folder, {"w": torch.arange(4.0), "epoch": 3}, step=10).step
        10
        >>> target = {"w": torch.zeros(4), "epoch": 0}
        >>> ck.load(folder, target).step, target["epoch"], target["w"].tolist()
        (10, 3, [0.0, 1.0, 2.0, 3.0])
    """
    options = SaveOptions(
        compress, dedup, layout, chunk_bytes, file_bytes, overwrite, verify_replicas, threads, differing, timeout
    )
    _, _, work = _prepare(path, state, step, metadata, options, fsync, process_group, pool, copy=False)
    return work()


def async_save(
    path: str | os.PathLike[str] | Storage,
    state: Any,
    *,
    step: int | None = None,
    metadata: Any = None,
    compress: str | None = None,
    dedup: str | None = "position",
    layout: str = "packed",
    overwrite: bool = False,
    verify_replicas: bool = False,
    differing: str = "error",
    fsync: bool = True,
    threads: int = 2,
    chunk_bytes: int = 1 << 20,
    file_bytes: int = 4 << 30,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = 1800.0,
    pool: StagingPool | None = None,
) -> SaveHandle:
    """Copy a state to host buffers, return, and save it in the background; arguments as for `save`.

    The call takes as long as one copy of this rank's share; the state may be changed as soon as it returns. If the save
    before, to the same store, still runs, it is waited for; if it failed and nobody has asked, its error is raised.

    Returns:
        A handle: `wait()`, `done()`, `progress()`, `exception()`.
    """
    options = SaveOptions(
        compress, dedup, layout, chunk_bytes, file_bytes, overwrite, verify_replicas, threads, differing, timeout
    )
    meter, storage, work = _prepare(path, state, step, metadata, options, fsync, process_group, pool, copy=True)
    return start_thread(storage, f"{storage.url} step {step if step is not None else '(next)'}", meter, work)


def _prepare(
    path: str | os.PathLike[str] | Storage,
    state: Any,
    step: int | None,
    metadata: Any,
    options: SaveOptions,
    fsync: bool,
    process_group: Any,
    pool: StagingPool | None,
    *,
    copy: bool,
) -> tuple[Meter, Storage, Callable[[], SaveInfo]]:
    """Do what has to be done in the caller's thread; return the meter, the store, and the rest of the work."""
    begun = time.perf_counter()
    # First of all, so that whatever goes wrong on this rank alone is told to those that wait for it.
    session = coordinator(process_group, timeout=options.timeout).session(
        "save" if step is None else f"save of step {step}"
    )
    meter, pool = Meter(), pool or default_pool()
    buffers: list[Tensor] = []
    part: Part | None = None
    try:
        check_step(step)
        storage = open_storage(path, fsync=fsync)
        wait_for(storage)
        with span("plan", storage.url):
            part = _plan(storage, state, step, metadata, options, session)
            part.lower_priority = copy
        meter.enter("stage")
        with span("stage", part.start.folder):
            part.staged, buffers = stage(part.tasks, pool, copy=copy)
        meter.total = sum(task.nbytes for task in part.tasks)
    except BaseException as error:
        session.fail(error)
        session.close()
        if part is not None:
            clean_up(part, session.rank)
        raise
    blocked = time.perf_counter() - begun

    def work() -> SaveInfo:
        try:
            info = finish(part, session, meter)
        except BaseException as error:
            session.fail(error)
            clean_up(part, session.rank)
            cause = _first_failure(session, error)
            if cause is error:
                raise
            raise cause from error
        finally:
            session.close()
            for buffer in buffers:
                pool.give(buffer)
            part.staged.clear()
        info.seconds["blocked"] = blocked if copy else time.perf_counter() - begun
        return info

    return meter, storage, work


def _plan(
    storage: Storage, state: Any, step: int | None, metadata: Any, options: SaveOptions, session: Coordinator
) -> Part:
    rank, world = session.rank, session.world
    check_metadata(metadata)
    content = describe_state(state, session.ranks, rank)
    told = {
        "digest": content.digest() if world > 1 else "",
        "step": step,
        "options": {**asdict(options), "threads": None},
        "url": storage.url,
        "bytes": total_bytes(content.specs),
        "local_bytes": total_bytes([held.spec for held in content.local]),
    }
    own = 0  # bytes of the tensors of single ranks, on member 0
    begun: Start | None = None  # on member 0, which clears up what it has begun

    def decide(messages: list[bytes]) -> bytes:
        nonlocal own, begun
        heard = [json.loads(message) for message in messages]
        kinds = groups_of(heard)
        own = sum(message["local_bytes"] for message in heard)
        # Exact where all ranks hold the same keys; else keys that only some of them hold are counted below.
        begun = begin(storage, step, options, kinds, own + max(message["bytes"] for message in heard))
        return begun.to_bytes()

    def check(specs: Sequence[TensorSpec]) -> None:
        if writes_all(options, start.base is not None):
            check_space(storage, start.step, own + total_bytes(specs))

    try:
        start = Start.from_bytes(session.agree("start", json.dumps(told).encode(), decide))
        specs, tree = agree_on_keys(session, content, start.kinds, check, options.differing)
        if options.verify_replicas and world > 1:
            specs = check_replicas(session, content, specs, options.differing)
        local = _state.renumber_local(content.packed, tree)
        records = [TensorRecord(h.spec.name, h.spec.dtype, h.spec.shape, LOCAL) for h in content.local]
        names = names_by_number(specs, records, rank)
        base = None
        if start.base is not None:
            base = recall(start.store, rank, world, start.base) or load_base(storage, start.base, rank, world)
        tasks = assign(specs, content, rank)
        lease = start.lease(storage, options) if rank == 0 else None
        return Part(storage, start, specs, tree, metadata, local, records, tasks, names, options, base, lease=lease)
    except BaseException:
        if begun is not None:
            drop(storage, begun.folder)
        raise


def check_step(step: int | None) -> None:
    """Raise ValueError unless `step` is the number of a step, or None."""
    if step is not None and (type(step) is not int or not 0 <= step <= MAX_STEP):
        raise ValueError(f"step: expected an integer from 0 to 10**15, or None, but got {step!r}.")


def check_metadata(metadata: Any) -> None:
    """Raise an error unless JSON can hold `metadata`."""
    try:
        json.dumps(metadata, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError(f"metadata: expected what JSON can hold, but got {metadata!r:.200}: {error}.") from None


def _first_failure(session: Coordinator, error: BaseException) -> BaseException:
    """Return the error of the rank that failed first, of which that of this rank may be a mere consequence.

    Once a save has failed its folder is removed, and a rank that still writes to it finds its files gone.
    """
    if session.world == 1 or isinstance(error, RanksError) or not isinstance(error, Exception):
        return error
    try:
        session.broadcast("failed", b"")  # raises the first failure, as any call does by now
    except RanksError as first:
        if not str(first).startswith(f"rank {session.ranks[session.rank]} failed:"):
            return first
    return error


def clean_up(part: Part, rank: int) -> None:
    """Remove what a failed save has left, as far as the storage lets us; a garbage collection gets the rest."""
    if rank != 0 or part.committing:  # a commit that failed half-way may have succeeded: never touch it
        return
    drop(part.storage, part.start.folder)
