"""A StorageWriter for torch.distributed.checkpoint that writes our format: `dcp.save` plans, this engine writes.

Ranks talk by torch's own collectives: the coordinator makes the step's folder while it plans globally, every rank
writes its data files and index, and the coordinator commits when all have reported.
"""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import weakref
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from .. import _state
from .._geometry import Piece, normal
from .._save.base import Base, load_base, recall, remember
from .._save.begin import Start, begin
from .._save.finish import Part, commit, write_part
from .._save.handle import Meter, SaveInfo
from .._save.options import SaveOptions
from .._save.plan import total_bytes
from .._save.running import wait_for
from .._save.save import check_metadata, check_step, clean_up
from .._save.stage import Task, stage
from .._save.staging import default_pool
from .._state import TensorSpec
from .._storage import Storage, open_storage
from ..errors import CheckpointError, RanksError, StateError
from .dcp_plan import Whole, box_of, names_step, step_of, whole_of

__all__ = ["VescaleWriter"]

log = logging.getLogger("vescale_ckpt")

REPORT = "vescale_ckpt report"
"""Key of the result that says what a rank wrote."""


class VescaleWriter(StorageWriter):
    """Lets `torch.distributed.checkpoint.save` and `async_save` write steps of a store.

    `vescale_ckpt.load` and `open` read them, and `dcp.load` by a `VescaleReader`. With chunks, checksums, references to
    the step before and an atomic commit, as `vescale_ckpt.save` has them. What a failed save has left is removed at
    once where the coordinator failed itself. It is not told of the failure of another rank, so that is cleared up when
    the writer is used again or is no longer in use, at the latest when the program ends.

    Args:
        path: the store: a folder, a URL, or a storage.
        step: number of the step; None: what `checkpoint_id` of `dcp.save` ends in ("step-1000"), or without one the
            step after the latest.
        metadata: JSON that is kept with the step.
        compress: as for `vescale_ckpt.save`.
        dedup: as for `vescale_ckpt.save`.
        overwrite: save a step again that is there.
        fsync: make files durable before the commit.
        threads: threads of each rank that checksum, compress and write.
        chunk_bytes: what is checked, compressed and shared as one; a multiple of 4096.
        timeout: seconds after which a save that has ended without a word is taken for dead.

    Example:
        >>> import tempfile, warnings
        >>> import torch.distributed.checkpoint as dcp
        >>> folder = tempfile.mkdtemp()
        >>> warnings.simplefilter("ignore")
        >>> _ = dcp.save({"w": torch.ones(2), "step": 3}, storage_writer=VescaleWriter(folder, step=1000), no_dist=True)
        >>> from vescale_ckpt import load_dict
        >>> load_dict(folder, step=1000)
        {'w': tensor([1., 1.]), 'step': 3}
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Storage,
        *,
        step: int | None = None,
        metadata: Any = None,
        compress: str | None = None,
        dedup: str | None = "position",
        overwrite: bool = False,
        fsync: bool = True,
        threads: int = 2,
        chunk_bytes: int = 1 << 20,
        timeout: float = 1800.0,
    ) -> None:
        super().__init__()
        check_step(step)
        check_metadata(metadata)
        self._path, self._step, self._metadata, self._fsync = path, step, metadata, fsync
        self._options = SaveOptions(
            compress, dedup, overwrite=overwrite, threads=threads, chunk_bytes=chunk_bytes, timeout=timeout
        )
        self.info: SaveInfo | None = None
        """What was written, on the coordinator once a save is committed."""
        self._asked: int | None = None
        self._storage: Storage | None = None
        self._part: Part | None = None
        self._end: weakref.finalize[Any, Any] | None = None
        self._whole: Whole | None = None
        self._plans: list[SavePlan] = []
        self._meter = Meter()

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs that saves: nothing of a save that runs."""
        idle = dict.fromkeys(("_storage", "_part", "_end", "_whole", "_meter"))
        return {**self.__dict__, **idle, "_plans": []}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save; the step is what `checkpoint_id` ends in, if the writer was not given one."""
        self._give_up()
        self._asked = None if checkpoint_id is None or self._step is not None else step_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Open the store."""
        del is_coordinator, args
        if not kwargs.get("use_collectives", True):
            raise ValueError(
                "use_collectives: False lets each rank save for itself, but a step needs one commit of all. Leave it."
            )
        self._meter = Meter()
        self._storage = open_storage(self._path, fsync=self._fsync)
        wait_for(self._storage)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the step's folder, number the tensors, and tell each rank. Called on the coordinator."""
        plans = self._complete(plans)
        storage, options = self._opened(), self._options
        self._give_up()
        whole = self._whole = whole_of(plans)
        step = self._step if self._step is not None else self._asked
        start = begin(storage, step, options, (tuple(range(len(plans))),), total_bytes(whole.specs))
        lease = start.lease(storage, options)
        part = Part(storage, start, whole.specs, None, self._metadata, [], [], [], {}, options, None, lease=lease)
        self._part, self._end = part, weakref.finalize(self, _end_of, part, os.getpid())
        told = []
        for writer, plan in enumerate(whole.plans):
            names = {item.index.fqn for item in plan.items if item.type is not WriteItemType.BYTE_IO}
            rows = {name: [whole.numbers[name], whole.specs[whole.numbers[name]].name] for name in sorted(names)}
            data = {
                "start": asdict(start),
                "writer": writer,
                "world": len(plans),
                "tensors": rows,
                "count": len(whole.specs),
            }
            told.append(SavePlan(plan.items, json.dumps(data), plan.planner_data))
        return told

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what the plan gives to this rank, durably."""
        try:
            return self._write(plan, planner)
        except BaseException:
            self._give_up()  # `finish` is not called then; on the other ranks this does nothing
            raise

    def _write(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        told = json.loads(plan.storage_data)
        start = Start.from_bytes(json.dumps(told["start"]).encode())
        writer, world, storage = told["writer"], told["world"], self._opened()
        tasks, values, names = [], {}, {}
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                values[item.index.fqn] = _node(planner, item)
                continue
            number, name = told["tensors"][item.index.fqn]
            task = _task(planner, item, number)
            names[number] = name, _state.dtype_name(task.dtype)
            if task.nbytes:
                tasks.append(task)
        own = self._part if self._part is not None and self._part.start.save_id == start.save_id else None
        part = Part(
            storage,
            start,
            cast("Sequence[TensorSpec]", range(told["count"])),  # here only their number counts
            None,
            None,
            [],
            [],
            tasks,
            names,
            self._options,
            None,
            lease=own.lease if own is not None else None,
        )
        if start.base is not None:
            part.base = recall(start.store, writer, world, start.base) or load_base(storage, start.base, writer, world)
        pool = default_pool()
        part.staged, buffers = stage(tasks, pool, copy=False)
        try:
            index, report = write_part(part, writer, self._meter)
        finally:
            for buffer in buffers:
                pool.give(buffer)
        if self._options.dedup_mode == "position":
            base = Base(start.folder)
            base.add(index, names, self._options.chunk_bytes)
            remember(start.store, writer, world, base)
        if own is not None:
            own.content = part.content
        results = [WriteResult(item.index, 0, None) for item in plan.items]
        sent = json.dumps({"writer": writer, "report": report, "values": values})
        results.append(WriteResult(MetadataIndex(REPORT), report["written"], sent))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the step, when all ranks have written. Called on the coordinator."""
        del metadata
        part, whole = self._part, self._whole
        if part is None or whole is None:
            raise CheckpointError("finish: no save has begun on this rank; let torch.distributed.checkpoint call it.")
        try:
            sent = [json.loads(r.storage_data) for rank in results for r in rank if r.index.fqn == REPORT]
            sent.sort(key=lambda said: int(said["writer"]))
            if [said["writer"] for said in sent] != list(range(len(whole.plans))):
                raise RanksError(
                    f"{len(whole.plans)} ranks planned, but the writers {[said['writer'] for said in sent]} reported."
                )
            values = {
                name: _state.unpack(node, lambda _: None, lambda _: None, tensors=0, locals=0)
                for said in sent
                for name, node in said["values"].items()
            }
            part.tree = whole.tree(values)
            self._meter.enter("commit")
            totals = commit(part, [said["report"] for said in sent])
        except BaseException:
            self._give_up()
            raise
        self._settle()
        self._meter.enter("done")
        self.info = SaveInfo(
            part.storage.url,
            part.start.step,
            part.start.folder,
            totals["raw"],
            totals["written"],
            totals["reused"],
            self._meter.seconds(),
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether a `checkpoint_id` names a step."""
        return names_step(checkpoint_id)

    def _give_up(self) -> None:
        """Remove what the last save has left, if it was neither committed nor given up; on the coordinator."""
        part = self._part
        self._settle()
        if part is not None:
            clean_up(part, 0)

    def _settle(self) -> None:
        """Forget the last save: nothing of it is left to be removed."""
        if self._end is not None:
            self._end.detach()
        self._part = self._end = self._whole = None

    def _opened(self) -> Storage:
        if self._storage is None:
            self._storage = open_storage(self._path, fsync=self._fsync)
        return self._storage

    def _complete(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return whole plans, where a planner that caches sends only what has changed."""
        if not all(plan.usable for plan in plans):
            if len(self._plans) != len(plans):
                raise StateError(
                    "planner: enable_plan_caching sends plans only once, and this writer has not seen them. Use one "
                    "VescaleWriter (step=None) for all saves, or a planner without caching: planning is cheap here."
                )
            plans = [plan if plan.usable else old for plan, old in zip(plans, self._plans, strict=True)]
        self._plans = list(plans)
        return plans


def _end_of(part: Part, process: int) -> None:
    """Remove what a save has left whose writer is no longer in use; in a forked child it is still the parent's."""
    if os.getpid() == process:
        clean_up(part, 0)


def _task(planner: SavePlanner, item: WriteItem, number: int) -> Task:
    name, box, data = item.index.fqn, box_of(item), item.tensor_data
    assert data is not None
    tensor = planner.resolve_data(item)
    if (
        not isinstance(tensor, torch.Tensor)
        or tuple(tensor.shape) != box.shape
        or tensor.dtype != data.properties.dtype
    ):
        found = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise StateError(
            f"state: {name}: the plan says {data.properties.dtype} {box.shape}, but the planner gives {found}. If it "
            f"caches plans, do not change dtypes or shapes between saves."
        )
    held = _state.plain(name, tensor)
    shape, itemsize = tuple(data.size), tensor.element_size()
    sources = tuple((normal(Piece(box, 0, box.numel), shape), view) for _, view in held.parts)
    return Task(number, normal(Piece(box, 0, box.numel), shape), sources, shape, tensor.dtype, itemsize)


def _node(planner: SavePlanner, item: WriteItem) -> Any:
    """Return the JSON of a value."""
    name, lookup = item.index.fqn, getattr(planner, "lookup_object", None)
    if lookup is not None:
        value = lookup(item.index)
    else:
        data = planner.resolve_data(item)
        if not isinstance(data, io.BytesIO):
            raise StateError(f"state: {name}: the planner gives a {type(data).__name__} where it planned bytes.")
        data.seek(0)
        try:
            value = torch.load(data, weights_only=True)
        except pickle.UnpicklingError:
            raise StateError(f"state: {name} is neither a tensor nor a value that is saved without pickle.") from None
    packed = _state.pack({name: value})
    if packed.tensors or packed.local:
        raise StateError(
            f"state: {name} is a {type(value).__name__} with tensors or arrays in it, which "
            f"torch.distributed.checkpoint takes for one value. Put the tensors into dicts and lists, or save with "
            f"vescale_ckpt.save."
        )
    (node,) = packed.tree.values() if not name.startswith("$") else [packed.tree["$dict"][0][1]]
    return node
