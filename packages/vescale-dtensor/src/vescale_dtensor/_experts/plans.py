"""`expert_parallel`: a plan that spreads a model's experts over mesh axes, found by structure and not by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .._modules.registry import register_plan
from ..errors import PlanError
from ..placements import Shard
from .blocks import listed_experts, place_block
from .stacked import let_travel, stacked_experts, state_of


def expert_parallel(
    axes: str | Sequence[str] = "ep", *, modules: str = ".*"
) -> Callable[[nn.Module, DeviceMesh], dict[str, Any]]:
    """Return a plan for `parallelize_module` that spreads experts over mesh axes, and lets tokens travel to them.

    Merge it with the plan for the rest of the model. The model's code stays: where it calls its experts, each
    rank sends its tokens to the ranks of the experts that the router chose, in one all-to-all of uneven parts, and
    gets the sums back. There is no capacity, and no token is dropped. Along the axes the batch should be cut too,
    ``{"forward": {"input": {"ep": Shard(0)}}}``; tokens that are whole there are cut for the experts and gathered
    afterwards. The gradient of an expert is that of the loss over the whole batch, as on one device.

    Found are modules that keep their experts in stacked parameters [experts, ...] and whose forward takes hidden
    states [tokens, features], chosen experts [tokens, top-k] and weights [tokens, top-k], in any order of the last two;
    and blocks that have a `nn.ModuleList` of modules built alike and a router, a matrix with a row for each of
    them. Such a block runs twice on this rank's tokens, once to see what its experts are given, and must treat
    every token by itself.

    Args:
        axes: names of mesh axes to spread experts over. Stacked parameters are cut as `Shard(0)`; of listed experts
            each lies whole on one rank. With ``()`` every rank holds all experts, for its own tokens.
        modules: regular expression for whole names of modules, to spread some of them only.

    Raises:
        PlanError: when used: the mesh lacks an axis, or no module matches.

    >>> plan = [{"forward": {"input": {"ep": Shard(0)}}}, expert_parallel("ep")]
    >>> parallelize_module(model, mesh, plan)  # doctest: +SKIP
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    pattern = re.compile(modules)

    def plan(module: nn.Module, device_mesh: DeviceMesh) -> dict[str, Any]:
        _require_axes(names, device_mesh)
        found = {
            name: (owner, count)
            for name, owner in module.named_modules()
            if pattern.fullmatch(name) and (count := stacked_experts(owner)) is not None
        }
        blocks = {n: m for n, m in module.named_modules() if pattern.fullmatch(n) and listed_experts(m) is not None}
        if not found and not blocks:
            raise PlanError(
                f"expert_parallel found no experts in {type(module).__name__} among the modules that match "
                f"{modules!r}: no module keeps parameters [experts, ...] of three dims and takes hidden states, chosen "
                "experts and weights, and none has a ModuleList of experts built alike and a router"
            )
        parameter: dict[str, Any] = {}
        for name, (owner, count) in found.items():
            prefix = re.escape(name) + r"\." if name else ""
            for own, tensor in owner._parameters.items():
                if tensor is not None and tensor.ndim > 1:
                    parameter[prefix + re.escape(own)] = dict.fromkeys(names, Shard(0))
            if state_of(owner) is None:
                let_travel(owner, count)
        for name, block in blocks.items():
            parameter |= place_block(name, block, names, device_mesh)
        return {"parameter": {key: placed for key, placed in parameter.items() if placed}}

    return plan


def _require_axes(names: Sequence[str], mesh: DeviceMesh) -> None:
    known = mesh.mesh_dim_names or ()
    missing = [n for n in names if n not in known]
    if missing:
        raise PlanError(
            f"expert_parallel was asked to spread experts over {missing}; the axes of the mesh are {list(known)}"
            + ("" if known else ", it has no names: make it with mesh_dim_names")
        )


def _named(module: nn.Module, device_mesh: DeviceMesh) -> dict[str, Any]:
    """The plan "experts": experts over "ep" where the mesh has such an axis."""
    return expert_parallel()(module, device_mesh) if "ep" in (device_mesh.mesh_dim_names or ()) else {}


register_plan("experts", _named)
