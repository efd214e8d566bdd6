"""From what the user passes to the transports of a sharded module."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .._transport import Transport, transport
from ..errors import PlanError
from .reduction import Channels

__all__ = ["Groups", "connect", "groups_of"]


@dataclass(frozen=True, slots=True)
class Groups:
    """Who shares parameters with whom."""

    shard: ProcessGroup
    """Ranks among which parameters are cut."""
    replicas: ProcessGroup | None
    """Ranks that hold the same shards; None: there are no others."""
    device: torch.device
    """Where parameters are gathered."""

    @property
    def size(self) -> int:
        """Number of ranks whose gradients are summed."""
        return self.shard.size() * (self.replicas.size() if self.replicas is not None else 1)


def groups_of(mesh_or_group: DeviceMesh | ProcessGroup | None) -> Groups:
    """Return the groups.

    Args:
        mesh_or_group: a group; a mesh of one axis; a mesh of two, (replicas, shards); None: all ranks.

    Raises:
        PlanError: another number of axes, or no process group.
    """
    if mesh_or_group is None:
        if not dist.is_initialized():
            raise PlanError("mesh_or_group: there is no default process group; call init_process_group first.")
        mesh_or_group = dist.distributed_c10d._get_default_group()
    if isinstance(mesh_or_group, ProcessGroup):
        return Groups(mesh_or_group, None, _device(mesh_or_group))
    if not isinstance(mesh_or_group, DeviceMesh) or mesh_or_group.ndim not in (1, 2):
        given = (
            f"a mesh of {mesh_or_group.ndim} axes" if isinstance(mesh_or_group, DeviceMesh) else f"{mesh_or_group!r}"
        )
        raise PlanError(
            f"mesh_or_group: expected a process group, a mesh of one axis, or one of two axes (replicas, shards), but "
            f"got {given}. Of a larger mesh pass those axes, such as mesh['dp']."
        )
    shard = mesh_or_group.get_group(mesh_or_group.ndim - 1)
    replicas = mesh_or_group.get_group(0) if mesh_or_group.ndim == 2 else None
    kind = mesh_or_group.device_type
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())
    return Groups(shard, replicas if replicas is not None and replicas.size() > 1 else None, device)


def _device(group: ProcessGroup) -> torch.device:
    kinds = {device.type for device in group._device_types}
    if "cpu" in kinds or not kinds:
        # A backend such as "fake" names devices of which torch has no module.
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if accelerator is None or accelerator.type not in kinds:
            return torch.device("cpu")
        kinds = {accelerator.type}
    kind = kinds.pop()
    return torch.device(kind, torch.get_device_module(kind).current_device())


def connect(groups: Groups, kind: str | Transport, order: str | None) -> Channels:
    """Make the transports; every rank of the groups calls this at the same time.

    Args:
        groups: the ranks.
        kind: name of a transport, or a transport of the shard group.
        order: of sums.
    """
    shard = transport(groups.shard, kind, order=order, device=groups.device)
    if groups.replicas is None:
        return Channels(shard, None, groups.device)
    name = kind if isinstance(kind, str) else "auto"
    return Channels(shard, transport(groups.replicas, name, order=order, device=groups.device), groups.device)
