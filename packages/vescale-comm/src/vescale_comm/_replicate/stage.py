"""Data parallelism around a stage of a pipeline: micro-batches add up, and the engine says when a step is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from .groups import trainable
from .replica import Replica, ReplicaOptions

__all__ = ["StageModule", "stage_wrapper"]

DATA = ("dp", "data", "data_parallel", "ddp", "replicate", "dp_replicate")
"""Names of mesh dimensions along which ranks see different data."""

_REPLICA = "_vescale_comm_replica"


class StageModule(nn.Module):
    """A stage whose gradients `finish_grad_sync` averages.

    Args:
        module: of the stage.
        replica: of its parameters.
    """

    def __init__(self, module: nn.Module, replica: Replica) -> None:
        super().__init__()
        self.module = module
        self._replica = replica

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.module(*args, **kwargs)

    def finish_grad_sync(self) -> None:
        """Reduce what the micro-batches of a step added; at once if that is done."""
        self._replica.finish_grad_sync()


def stage_wrapper(module: nn.Module, mesh: Any) -> Callable[[nn.Module], nn.Module] | None:
    """Return what wraps a stage, if its mesh has dimensions for data parallelism, known by their names.

    Args:
        module: of the stage.
        mesh: of the ranks that hold the stage.
    """
    names = mesh.mesh_dim_names or ()
    found = tuple(name for name in names if name in DATA)
    if not found or not trainable(module):
        return None
    along = mesh[found]
    return None if along.size() == 1 else lambda inner: _wrap(inner, along)


def _wrap(module: nn.Module, mesh: Any) -> StageModule:
    """Wrap a module; modules made of the same parameters, for batches of other shapes, share what reduces them."""
    parameters = [param for _, param in trainable(module)]
    replica: Replica | None = getattr(parameters[0], _REPLICA, None)
    if replica is None:
        replica = Replica(module, mesh, ReplicaOptions(manual=True))
        setattr(parameters[0], _REPLICA, replica)
    else:
        replica.attach(module)
    return StageModule(module, replica)
