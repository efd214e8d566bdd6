"""A distributed tensor with single-device semantics and almost no eager overhead.

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
x = distribute_tensor(torch.randn(8, 6), mesh, [Shard(0), Replicate()])
y = (x @ w).relu().sum()      # the single-device program, on local shards
"""

from . import _methods, _rules
from ._api import distribute_tensor
from ._comm.move import Pending
from ._dispatch.engine import debug_checks
from ._dispatch.policy import implicit_communication, plain_tensors, set_implicit_communication
from ._tensor import DTensor
from .placements import Partial, Replicate, Shard, Varying

__all__ = [
    "DTensor",
    "Partial",
    "Pending",
    "Replicate",
    "Shard",
    "Varying",
    "debug_checks",
    "distribute_tensor",
    "implicit_communication",
    "plain_tensors",
    "set_implicit_communication",
]
_methods.install()
del _methods, _rules
