"""torch's DistributedDataParallel around a module with DTensors.

It takes the parameters of its ranks for copies: overwrites them with those of the first rank, and averages gradients.
Over ranks that hold different shards both would be wrong, and nothing would tell.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ._irregular import is_cut
from ._patching import replace_once
from ._spec import Spec
from ._tensor import DTensor
from .errors import UnsupportedOperationError


def _parts_differ(spec: Spec, ranks: list[int]) -> bool:
    """Whether some of the ranks hold different parts."""
    every = spec.mesh.ranks_over(tuple(range(spec.mesh.ndim)))
    here = [every[r] for r in ranks if r in every]
    return any(is_cut(t) and len({c[axis] for c in here}) > 1 for axis, t in enumerate(spec.types))


def _check(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, DTensor) and _parts_differ(tensor._spec, ranks):
            raise UnsupportedOperationError(
                f"DistributedDataParallel over the ranks {ranks} would take their parts of {name!r} for copies of one "
                f"tensor, but it is {tensor._spec!r} on {tensor._spec.mesh!r}: the ranks hold different shards. Pass "
                "process_group= with ranks that hold the same shard, as a mesh axis of its own does, or leave it out: "
                "gradients of a parallelized module are reduced over its whole mesh already"
            )


def _guard(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        mesh = given.get("device_mesh")
        module = given["module"]
        if isinstance(module, nn.Module) and any(isinstance(p, DTensor) for p in module.parameters()):
            _check(module, mesh.get_group(0) if mesh is not None else given.get("process_group"))
        original(self, *args, **kwargs)

    return __init__


def install() -> None:
    """Guard the constructor; may be called again."""
    replace_once(DistributedDataParallel, "__init__", _guard)
