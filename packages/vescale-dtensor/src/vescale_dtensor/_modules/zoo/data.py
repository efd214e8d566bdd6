"""`data`: the batch, the first dim of every input, cut along all axes of the mesh. For CNNs and small models."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...placements import Shard
from ..registry import Plan


def data(module: nn.Module, mesh: DeviceMesh) -> Plan:
    """Plan for any module whose inputs all have the batch as their first dim."""
    return {"forward": {"input": [Shard(0)] * mesh.ndim}}
