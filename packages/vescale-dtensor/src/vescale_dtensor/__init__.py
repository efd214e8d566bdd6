"""A distributed tensor with single-device semantics and almost no eager overhead.

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
x = distribute_tensor(torch.randn(8, 6), mesh, [Shard(0), Replicate()])
y = (x @ w).relu().sum()                        # the single-device program, on local shards
parallelize_module(model, mesh, "nanogpt")      # an unmodified module, by plan
"""

from . import _guards, _methods, _rules
from ._api import distribute_tensor
from ._auto import AutoPlan, Cost, Link, Machine, auto_plan, predict
from ._comm.move import Pending
from ._deferred import deferred_init, materialize
from ._dispatch.call import Call, Rewrite, Rule, Strategy
from ._dispatch.engine import debug_checks
from ._dispatch.policy import implicit_communication, plain_tensors, set_implicit_communication
from ._experts import ExpertsAllocator, expert_parallel
from ._explain import explain
from ._factories import arange, empty, eye, full, linspace, ones, rand, randint, randn, zeros
from ._interop import from_torch, to_torch
from ._local_map import local_map
from ._modules import parallelize_module, register_plan
from ._random import random_mode, set_random_mode
from ._register import register_op
from ._static import static, static_eager
from ._tensor import DTensor
from ._verify import verify_rule
from ._visualize import visualize
from .errors import (
    DTensorError,
    ImplicitCommunicationError,
    ImplicitCommunicationWarning,
    MeshMismatchError,
    PlainTensorError,
    PlanError,
    RuleError,
    UnsupportedOperationError,
)
from .placements import InterleavedShard, Partial, RaggedShard, Replicate, Shard, Varying

__all__ = [
    "AutoPlan",
    "Call",
    "Cost",
    "DTensor",
    "DTensorError",
    "ExpertsAllocator",
    "ImplicitCommunicationError",
    "ImplicitCommunicationWarning",
    "InterleavedShard",
    "Link",
    "Machine",
    "MeshMismatchError",
    "Partial",
    "Pending",
    "PlainTensorError",
    "PlanError",
    "RaggedShard",
    "Replicate",
    "Rewrite",
    "Rule",
    "RuleError",
    "Shard",
    "Strategy",
    "UnsupportedOperationError",
    "Varying",
    "__version__",
    "arange",
    "auto_plan",
    "debug_checks",
    "deferred_init",
    "distribute_tensor",
    "empty",
    "expert_parallel",
    "explain",
    "eye",
    "from_torch",
    "full",
    "implicit_communication",
    "linspace",
    "local_map",
    "materialize",
    "ones",
    "parallelize_module",
    "plain_tensors",
    "predict",
    "rand",
    "randint",
    "randn",
    "random_mode",
    "register_op",
    "register_plan",
    "set_implicit_communication",
    "set_random_mode",
    "static",
    "static_eager",
    "to_torch",
    "verify_rule",
    "visualize",
    "zeros",
]

__version__: str


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("vescale-dtensor")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_methods.install()
_guards.install()
del _guards, _methods, _rules
