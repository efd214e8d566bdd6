"""Data parallelism around a stage of a pipeline: micro-batches add up, and the engine says when a step is over."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from .._taken import refuse_taken, taker_of
from ..errors import PlanError
from .groups import trainable
from .replica import Replica, ReplicaOptions

__all__ = ["StageModule", "stage_wrapper"]

DATA = ("dp", "data", "data_parallel", "ddp", "replicate", "dp_replicate")
"""Names of mesh dimensions along which ranks see different data."""

_of_stages: weakref.WeakSet[Replica] = weakref.WeakSet()
"""What was made for stages; other replicas are not told when a step is over."""


class StageModule(nn.Module):
    """A stage whose gradients `finish_grad_sync` averages.

    Args:
        module: of the stage.
        replicas: of its parameters.
    """

    def __init__(self, module: nn.Module, replicas: Sequence[Replica]) -> None:
        super().__init__()
        self.module = module
        self._replicas = tuple(replicas)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.module(*args, **kwargs)

    def finish_grad_sync(self) -> None:
        """Reduce what the micro-batches of a step added; at once if that is done."""
        for replica in self._replicas:
            replica.finish_grad_sync()


def stage_wrapper(module: nn.Module, mesh: Any) -> Callable[[nn.Module], nn.Module] | None:
    """Return what wraps a stage, if its mesh has dimensions for data parallelism, known by their names.

    Args:
        module: of the stage.
        mesh: of the ranks that hold the stage.

    Raises:
        PlanError: something else reduces gradients of the stage already.
    """
    names = mesh.mesh_dim_names or ()
    found = tuple(name for name in names if name in DATA)
    if not found or not trainable(module):
        return None
    along = mesh[found]
    if along.size() == 1:
        return None
    shared = _shared(module, along)
    refuse_taken("The data parallelism of stages", module, [one for one in trainable(module) if one[0] not in shared])
    return lambda inner: _wrap(inner, along)


def _shared(module: nn.Module, mesh: Any) -> dict[str, Replica]:
    """Return what reduces those parameters that are in a stage that was wrapped before, such as tied ones, by name.

    Raises:
        PlanError: that does so over other ranks.
    """
    found = {}
    for name, parameter in trainable(module):
        replica = taker_of(parameter)
        if isinstance(replica, Replica) and replica in _of_stages:
            ranks, wanted = dist.get_process_group_ranks(replica.group), sorted(mesh.mesh.flatten().tolist())
            if sorted(ranks) != wanted:
                raise PlanError(
                    f"{name}: another stage here has it too, and its gradient is reduced over the ranks {ranks}, but "
                    f"those of this stage are {wanted}. Stages that share parameters need the same ranks."
                )
            found[name] = replica
    for replica in found.values():
        if replica.module is module:  # which was wrapped before; the replica finds by itself what is new in it
            return dict.fromkeys((name for name, _ in trainable(module)), replica)
    return found


def _wrap(module: nn.Module, mesh: Any) -> StageModule:
    """Wrap a module; what it shares with modules that were wrapped before is reduced by what reduces it there."""
    shared = _shared(module, mesh)
    replicas = list(dict.fromkeys(shared.values()))
    for replica in replicas:
        replica.attach(module)
    if len(shared) < len(trainable(module)):
        others = {re.escape(name): None for name in shared}
        replica = Replica(module, mesh, ReplicaOptions(manual=True, groups=others))
        _of_stages.add(replica)
        replicas.append(replica)
    return StageModule(module, replicas)
