"""Parameters that were made on the meta device: they get their values module by module, one whole unit in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..errors import PlanError
from .unit import Unit

__all__ = ["fill", "meta_modules"]

Initialize = Callable[[nn.Module], object]


def meta_modules(root: nn.Module) -> list[nn.Module]:
    """Return the modules with parameters or buffers of their own on the meta device, in the order of the tree."""
    return [
        module
        for module in root.modules()
        if any(value is not None and value.is_meta for values in _own(module) for value in values)
    ]


def _own(module: nn.Module) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    return list(module._parameters.values()), list(module._buffers.values())


def fill(
    units: Sequence[Unit], modules: Sequence[nn.Module], initialize: Initialize | None, device: torch.device
) -> None:
    """Initialize modules whose parameters or buffers were on the meta device.

    Every rank draws the numbers of whole parameters and keeps its part, so the values are those of one device that
    calls the same functions in the order of the module tree.

    Args:
        units: the units, sharded.
        modules: what `meta_modules` returned before they were.
        initialize: called with each of these modules; None: `module.reset_parameters()`.
        device: where buffers are made.

    Raises:
        PlanError: a module has no `reset_parameters`, and no other way was given.
    """
    holders: dict[int, dict[int, Unit]] = {}
    for unit in units:
        for flat in unit.flats:
            for entry in flat.entries:
                for use in entry.uses:
                    holders.setdefault(id(use.module), {})[unit.index] = unit
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
        needed = list(holders.get(id(module), {}).values())
        for unit in needed:
            for flat in unit.flats:
                flat.allocate()
            unit.show()
        try:
            with torch.no_grad():
                _call(initialize, module)
            for unit in needed:
                unit.accept_writes(module)
        finally:
            for unit in needed:
                unit.free()


def _call(initialize: Initialize | None, module: nn.Module) -> None:
    if initialize is not None:
        initialize(module)
        return
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise PlanError(
            f"{type(module).__name__} was made on the meta device and has no reset_parameters(), so its values are "
            f"not known. Pass initialize=function, which is called with each such module; initialize=lambda module: "
            f"None if all values are loaded afterwards."
        )
    reset()
