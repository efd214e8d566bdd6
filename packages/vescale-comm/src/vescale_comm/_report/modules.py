"""Units of a module of torch, as `fully_shard` would choose them."""

from __future__ import annotations

from torch import nn

from .._fsdp.choose import choose_units
from .._plan import Unit
from ..errors import PlanError

__all__ = ["module_units"]


def module_units(module: nn.Module) -> tuple[Unit, ...]:
    """Return the units of a module: that of the root first, then its repeated blocks in their order.

    Args:
        module: with parameters on any device, "meta" too. A shared parameter counts once, where it comes first.

    Raises:
        PlanError: it is no module.
    """
    if not isinstance(module, nn.Module):
        raise PlanError(f"model: needs a module, a name, a config or units; got {type(module).__name__}.")
    tensors: dict[str, list[tuple[str, tuple[int, ...]]]] = {name: [] for name in choose_units(module, "auto")}
    for name, parameter in module.named_parameters():
        around = [unit for unit in tensors if not unit or name.startswith(f"{unit}.")]
        tensors[max(around, key=len)].append((name, tuple(parameter.shape)))
    return tuple(Unit(name, tuple(inside)) for name, inside in tensors.items() if inside)
