"""Pieces that plans are made of: placements with names, patterns, and questions to a model about itself.

All plans of the zoo use the mesh axes "dp" and "tp", either of which may be missing. Along "dp" the batch
is cut; along "tp" heads, hidden features and the vocabulary are cut as in Megatron-LM, and between blocks
the sequence, so that norms and dropouts work on their share (sequence parallelism).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...errors import PlanError
from ...placements import Replicate, Shard, Varying

Entries = dict[str, Any]

PREFIX = r"(.*\.)?"
"""Whatever the model is wrapped in."""
BATCH = {"dp": Shard(0)}
COLUMN, ROW = {"tp": Shard(0)}, {"tp": Shard(1)}
"""A weight (out, in) cut by its outputs, and by its inputs."""
SEQUENCE = {"tp": Shard(1)}
"""Activations (batch, sequence, features) between blocks."""
GATHERED = {"tp": Varying()}
"""Input of a block that cuts features: as its gradient is a pending sum, the backward is a reduce-scatter."""
WHOLE = {"tp": Replicate()}
"""Input of a block that does the same on every rank."""
MASKS = ("attention_mask", "decoder_attention_mask")
"""Inputs that models of transformers read by index: cut, they would be gathered for it."""


def require(module: nn.Module, plan: str, parts: Iterable[str], serves: str) -> None:
    """Refuse a model that lacks a part of those that the plan is for.

    Args:
        module: the model.
        plan: name of the plan.
        parts: patterns of names of modules, after `PREFIX`.
        serves: what the plan is for.

    Raises:
        PlanError: no module of the model is called like one of the parts.
    """
    names = [n for n, _ in module.named_modules()]
    for part in parts:
        if not any(re.fullmatch(PREFIX + part, n) for n in names):
            raise PlanError(
                f'the plan "{plan}" found no module {part!r} in {type(module).__name__}; '
                f"it serves {serves}, here are {names[1:8]}"
            )


def has(module: nn.Module, part: str) -> bool:
    """Whether a module of the model is called like `part`, a pattern after `PREFIX`."""
    return any(re.fullmatch(PREFIX + part, n) for n, _ in module.named_modules())


def axis_size(mesh: DeviceMesh, name: str) -> int:
    """Number of ranks along an axis; 1 where the mesh has none of that name."""
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index(name)) if name in names else 1


def setting(module: nn.Module, names: Sequence[str], default: int) -> int:
    """The first of some settings that the model's configuration has.

    Args:
        module: a model with `config`, or one without, for which the default holds.
        names: names of the setting, in order of preference.
        default: what holds where there is none.
    """
    config = getattr(module, "config", None)
    found = next((getattr(config, n) for n in names if isinstance(getattr(config, n, None), int)), default)
    return int(found)


def cut(names: Iterable[str], placements: dict[str, Any], *, bias: bool = False) -> Entries:
    """Parameter entries for the weights of modules, and their biases where these are cut alike."""
    ending = "(weight|bias)" if bias else "weight"
    return {rf"{PREFIX}{name}\.{ending}": placements for name in names}


def inputs(*whole: str) -> Entries:
    """Forward entries for the model's inputs: cut by batch, but for those named, which stay whole."""
    return {"input": BATCH, **{f"input.{name}": {"dp": Replicate()} for name in whole}}
