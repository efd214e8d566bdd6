"""The pipeline as one dimension of a mesh; the other dimensions are for plugins."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from .._hooks import wrap_stage
from ..errors import PipeError

__all__ = ["pipeline_group", "wrapped"]


def pipeline_group(mesh: Any, dim: str) -> Any:
    """Return the process group along the pipeline.

    Args:
        mesh: a mesh, or the group itself.
        dim: name of the pipeline's dimension, for meshes of several.

    Raises:
        PipeError: the mesh has several dimensions, none of that name; or it is no mesh.
    """
    if not hasattr(mesh, "get_group"):
        if not isinstance(mesh, ProcessGroup):
            raise PipeError(
                f"mesh: {mesh!r:.100} given; it must be a DeviceMesh, a process group, or None for one process."
            )
        return mesh
    if mesh.ndim == 1:
        return mesh.get_group(0)
    names = mesh.mesh_dim_names
    if names is None or dim not in names:
        raise PipeError(
            f"the mesh has dimensions {names or mesh.ndim}; name that of the pipeline: PipePlan(mesh_dim=...)."
        )
    return mesh.get_group(dim)


def wrapped(module: nn.Module, mesh: Any, dim: str) -> nn.Module:
    """Return the module of a stage in the wrappers that plugins offer along the other dimensions of a mesh.

    Args:
        module: of the stage.
        mesh: as in `pipeline_group`, or None.
        dim: as in `pipeline_group`.
    """
    names = getattr(mesh, "mesh_dim_names", None)
    if names is None or len(names) < 2:
        return module
    return wrap_stage(module, mesh[tuple(name for name in names if name != dim)])
