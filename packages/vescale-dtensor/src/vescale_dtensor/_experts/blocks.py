"""Finding blocks with a `nn.ModuleList` of experts, and giving them a forward in which tokens travel.

Every parameter of an expert keeps its name and its whole shape; all of it lies with the expert's owner
(`RaggedShard` with all units on one rank).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .._dispatch import policy
from .._mesh import mesh_info
from .._spec import replicated
from .._tensor import DTensor, make
from ..errors import PlanError, UnsupportedOperationError
from ..placements import Placement, RaggedShard
from .lists import ListState, owner_of, run_block
from .subclass import give_forward


def _forward_of(base: type[nn.Module]) -> Callable[..., Any]:
    """The forward of a block whose listed experts live on several ranks."""

    def forward(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        own = functools.partial(base.forward, self)
        placed = next((p for p in self.parameters() if isinstance(p, DTensor)), None)
        if placed is None:  # not distributed
            return own(x, *args, **kwargs)
        if not isinstance(x, Tensor) or any(isinstance(a, Tensor) for a in (*args, *kwargs.values())):
            raise UnsupportedOperationError(
                f"{base.__name__} was called with other tensors than the hidden states; expert parallelism serves "
                "blocks with a list of experts that take hidden states alone"
            )
        if not isinstance(x, DTensor):
            policy.check_plain("experts", tuple(x.shape))
            x = make(x, replicated(placed._spec.mesh, x.shape))
        return run_block(self, self._vescale_block, own, x, args, kwargs)

    return forward


def listed_experts(module: nn.Module) -> tuple[str, int] | None:
    """Name of a block's list of experts and their number; None if it is no such block.

    A block has one list of modules that are built alike, and among its other parameters a matrix with one row or
    column for each of them, the router.
    """
    lists = [(n, m) for n, m in module._modules.items() if isinstance(m, nn.ModuleList) and len(m) > 1]
    if len(lists) != 1 or "_vescale_block" in module.__dict__:
        return None
    name, experts = lists[0]
    kinds = {(type(e), tuple((n, p.shape) for n, p in e.named_parameters())) for e in experts}
    if len(kinds) != 1 or not next(iter(kinds))[1]:
        return None
    others = [p for n, p in module.named_parameters() if not n.startswith(name + ".")]
    routed = any(p.ndim == 2 and len(experts) in p.shape for p in others)
    return (name, len(experts)) if routed else None


def place_block(name: str, block: nn.Module, axes: Sequence[str], mesh: DeviceMesh) -> dict[str, dict[str, Placement]]:
    """Let a block's tokens travel, and return the placements of its experts' parameters by full name pattern."""
    found = listed_experts(block)
    assert found is not None
    child, count = found
    info = mesh_info(mesh)
    numbers = [(mesh.mesh_dim_names or ()).index(a) for a in axes]
    sizes = [info.sizes[a] for a in sorted(numbers)]
    names = [n for _, n in sorted(zip(numbers, axes, strict=True))]
    total = info.size_of(tuple(numbers))
    plan: dict[str, dict[str, Placement]] = {}
    experts: Any = getattr(block, child)
    for e, expert in enumerate(experts):
        owner = owner_of(e, count, total)
        placed: dict[str, Placement] = {}
        for axis, size in reversed(list(zip(names, sizes, strict=True))):
            owner, digit = divmod(owner, size)
            placed[axis] = RaggedShard((0,), tuple(int(r == digit) for r in range(size)))
        for own, p in expert.named_parameters():
            full = ".".join(filter(None, (name, child, str(e), own)))
            if not p.ndim:
                raise PlanError(f"expert parameter {full!r} is a single number, which cannot lie on one rank alone")
            plan[re.escape(full)] = placed
    give_forward(block, _forward_of)
    block.__dict__["_vescale_block"] = ListState(child, count, tuple(names))
    return plan
