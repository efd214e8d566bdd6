"""State dicts in terms of whole parameters: shards go out labelled with their place, and come in from anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._shards import ShardTensor, run_boxes
from .info import ShardInfo
from .unit import Unit

__all__ = ["install", "own_part"]


def install(units: Sequence[Unit]) -> None:
    """Install hooks on all modules that hold shards, so that state dicts of submodules are right as well."""
    holders = {id(use.module): use.module for unit in units for f in unit.flats for e in f.entries for use in e.uses}
    for module in holders.values():
        module.register_state_dict_post_hook(_label)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(_cut)  # type: ignore[no-untyped-call]


def _label(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
    del metadata
    for name, parameter in module._parameters.items():
        info = getattr(parameter, "vescale", None)
        if isinstance(info, ShardInfo) and parameter is not None and f"{prefix}{name}" in state:
            boxes = run_boxes(info.whole.boxes, info.start, info.stop)
            state[f"{prefix}{name}"] = ShardTensor.of_boxes(parameter, info.shape, boxes)  # the memory stays the same


def _cut(
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    del metadata, strict, missing, unexpected
    for name, parameter in module._parameters.items():
        info = getattr(parameter, "vescale", None)
        key = f"{prefix}{name}"
        if not isinstance(info, ShardInfo) or parameter is None or key not in state:
            continue
        part, problem = own_part(state[key], info)
        if part is None:
            errors.append(f"{key}: {problem}")
            part = parameter.detach()
        state[key] = part


def own_part(value: Any, info: ShardInfo) -> tuple[Tensor | None, str]:
    """Return what a rank keeps of a value in a state dict, or None and the reason why there is no telling.

    Args:
        value: the whole tensor; or a shard of the same elements.
        info: of the shard.
    """
    if isinstance(value, ShardTensor):
        mine = info.label(torch.empty(info.stop - info.start))
        if (value.global_shape, value.boxes) == (mine.global_shape, mine.boxes):
            return value.plain(), ""
        return None, (
            "it is a shard of other elements than this rank keeps now. Load it through vescale_ckpt, which reshards."
        )
    if not isinstance(value, Tensor):
        return None, f"expected a tensor, but got a {type(value).__name__}."
    if hasattr(value, "_local_tensor"):
        local = value._local_tensor
        if tuple(value.shape) == info.shape and local.numel() == sum(box.numel for box in info.whole.boxes):
            return local.reshape(-1)[info.start : info.stop], ""
    elif tuple(value.shape) == info.shape:
        parts = [value[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))] for box in info.whole.boxes]
        flat = torch.cat([part.reshape(-1) for part in parts]) if len(parts) != 1 else parts[0].reshape(-1)
        return flat[info.start : info.stop], ""
    return None, f"expected the whole tensor, of shape {info.shape}, or its shard, but got shape {tuple(value.shape)}."
