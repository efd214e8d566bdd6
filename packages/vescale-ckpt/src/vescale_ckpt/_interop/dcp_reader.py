"""A StorageReader for torch.distributed.checkpoint over our format: `dcp.load` plans, ranks read just their boxes."""

from __future__ import annotations

import io
import os
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from .._geometry import Box
from .._load import Checkpoint, Request, TensorView, open_checkpoint
from .._save.running import wait_for
from .._state import Local
from .._storage import Storage, open_storage
from ..errors import CheckpointError, FormatError, MismatchError, RanksError, StateError
from .dcp_plan import names_step, step_of

__all__ = ["VescaleReader"]


class VescaleReader(StorageReader):
    """Lets `torch.distributed.checkpoint.load` read steps of a store, whoever saved them, on any ranks.

    Args:
        path: the store: a folder, a URL, or a storage.
        step: number of the step, or "latest"; `checkpoint_id` of `dcp.load` means another one ("step-1000").
        cast: convert tensors whose dtype is another one in the state; else that is an error.
        verify: check the checksums of all that is read.
        threads: of each rank that read at the same time.

    Example:
        >>> import tempfile, warnings
        >>> import torch.distributed.checkpoint as dcp
        >>> from vescale_ckpt import save
        >>> folder = tempfile.mkdtemp()
        >>> warnings.simplefilter("ignore")
        >>> _ = save(folder, {"model": {"w": torch.ones(2)}, "epoch": 3})
        >>> state = {"model": {"w": torch.zeros(2)}, "epoch": 0}
        >>> dcp.load(state, storage_reader=VescaleReader(folder), no_dist=True)
        >>> state
        {'model': {'w': tensor([1., 1.])}, 'epoch': 3}
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Storage,
        *,
        step: int | str = "latest",
        cast: bool = False,
        verify: bool = True,
        threads: int | None = None,
    ) -> None:
        super().__init__()
        self._path, self._step, self._cast, self._verify, self._threads = path, step, cast, verify, threads
        self._asked: int | str = step
        self._checkpoint: Checkpoint | None = None
        self._leaves: dict[str, Any] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load; of the step that `checkpoint_id` ends in, if there is one."""
        self._asked = self._step if checkpoint_id is None else step_of(checkpoint_id)
        self._close()

    def read_metadata(self, *_args: Any, **_ignored: Any) -> Metadata:
        """Return what the step holds. Each tensor is one chunk for DCP, of which any box can be read."""
        self._close()
        storage = open_storage(self._path)
        wait_for(storage)
        checkpoint = self._checkpoint = open_checkpoint(storage, self._asked, threads=self._threads)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        state = _for_planner(checkpoint.tree(rank if rank < checkpoint.manifest.world else None))
        if not isinstance(state, dict):
            raise StateError(f"state: torch.distributed.checkpoint loads dicts, but this is a {type(state).__name__}.")
        planner = DefaultSavePlanner()  # it knows best how torch flattens
        try:
            planner.set_up_planner(state, None, True)
        except ValueError as error:
            raise StateError(f"state: torch.distributed.checkpoint cannot hold it: {error}.") from None
        self._leaves = {
            name: leaf.view_of if isinstance(leaf, _Meta) else leaf for name, leaf in planner.state_dict.items()
        }
        entries: dict[str, Any] = {}
        for name, leaf in self._leaves.items():
            if isinstance(leaf, TensorView):
                chunk = ChunkStorageMetadata(torch.Size([0] * leaf.ndim), leaf.shape)
                entries[name] = TensorStorageMetadata(TensorProperties(dtype=leaf.dtype), leaf.shape, [chunk])
            else:
                entries[name] = BytesStorageMetadata()
        meta = StorageMeta(checkpoint.folder, checkpoint.commit.save_id)
        return Metadata(entries, planner_data=dict(planner.mappings), storage_data={}, storage_meta=meta)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `read_metadata` has opened the step."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Tell the coordinator which step this rank has opened."""
        return LoadPlan(plan.items, self._opened().folder, plan.planner_data)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raise RanksError if ranks have opened different steps: one was saved in between."""
        for rank, plan in enumerate(plans):
            if plan.storage_data != plans[0].storage_data:
                raise RanksError(
                    f"step: rank 0 has opened {plans[0].storage_data}, rank {rank} {plan.storage_data}; a step was "
                    f"saved in between. Name the step, or load again."
                )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for into the planner's tensors."""
        try:
            self._read(self._opened(), plan, planner)
        finally:
            self._close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Tell whether a `checkpoint_id` names a step."""
        return names_step(checkpoint_id)

    def _read(self, checkpoint: Checkpoint, plan: LoadPlan, planner: LoadPlanner) -> None:
        requests, targets = list[Request](), []
        for item in plan.items:
            name = item.storage_index.fqn
            if name not in self._leaves:
                raise FormatError(f"{name}: not in {checkpoint.folder}.")
            leaf = self._leaves[name]
            if item.type is LoadItemType.BYTE_IO:
                data = io.BytesIO()
                torch.save(_read(leaf, self._verify), data)
                data.seek(0)
                planner.load_bytes(item, data)
                continue
            target = planner.resolve_tensor(item).detach()
            box = Box(tuple(item.storage_offsets), tuple(item.lengths))
            if tuple(target.shape) != box.shape:
                raise MismatchError(f"{name}: the target is {tuple(target.shape)}, but the plan asks for {box.shape}.")
            if target.dtype != leaf.dtype and not self._cast:
                raise MismatchError(
                    f"{name}: {leaf.dtype} in the checkpoint, {target.dtype} in the state. Pass cast=True to convert."
                )
            number = leaf.number + (0 if leaf.writer is None else len(checkpoint.names))
            requests.append(Request(number, box, target, leaf.writer))
            targets.append((item, target))
        checkpoint.read_many(requests, verify=self._verify, threads=self._threads)
        for item, target in targets:
            planner.commit_tensor(item, target)

    def _opened(self) -> Checkpoint:
        if self._checkpoint is None:
            raise CheckpointError("no step is open on this rank; let torch.distributed.checkpoint call the reader.")
        return self._checkpoint

    def _close(self) -> None:
        if self._checkpoint is not None:
            self._checkpoint.close()
        self._checkpoint = None


class _Meta(Tensor):
    """A tensor without memory that stands for a view while torch flattens the state."""

    view_of: TensorView


def _for_planner(value: Any) -> Any:
    """Return a state with meta tensors where torch looks for tensors, and without values of other ranks."""
    if isinstance(value, TensorView):
        made = torch.empty(value.shape, dtype=value.dtype, device="meta").as_subclass(_Meta)
        made.view_of = value
        return made
    if isinstance(value, dict):
        return {key: _for_planner(child) for key, child in value.items() if not isinstance(child, Local)}
    if isinstance(value, list):
        return [None if isinstance(child, Local) else _for_planner(child) for child in value]
    return value


def _read(value: Any, verify: bool) -> Any:
    """Return a value with its tensors, where it is a tuple or the like that torch does not look into."""
    if isinstance(value, TensorView):
        return value.read(verify=verify)
    if isinstance(value, _Meta):
        return value.view_of.read(verify=verify)
    if isinstance(value, dict):
        return {key: _read(child, verify) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_read(child, verify) for child in value)
    return value
