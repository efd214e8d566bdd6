"""What vescale_dtensor gives to its siblings: it tells them about its DTensor.

The functions import on call: this module is loaded at the first hook call of any host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.distributed.device_mesh import DeviceMesh

for_rng = pluggy.HookimplMarker("vescale_rng")
for_comm = pluggy.HookimplMarker("vescale_comm")
for_ckpt = pluggy.HookimplMarker("vescale_ckpt")


@for_rng
@for_comm
@for_ckpt
def vescale_layout(tensor: torch.Tensor) -> Any:
    """Return the layout of one of our DTensors; None for other tensors."""
    from ._layout import layout_of

    return layout_of(tensor)


@for_ckpt
def vescale_from_layout(like: torch.Tensor, boxes: Sequence[Any]) -> torch.Tensor | None:
    """Allocate a DTensor like `like` that holds `boxes`; None for other tensors."""
    from ._layout import from_layout

    return from_layout(like, boxes)


@for_comm
def vescale_gradient_reduction(param: torch.nn.Parameter) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """Return mesh and axes over which the gradient of one of our parameters is partial; None for others."""
    from ._layout import gradient_reduction

    return gradient_reduction(param)
