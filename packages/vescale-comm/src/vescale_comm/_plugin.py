"""What vescale_comm gives to its siblings: it tells them which elements of the whole its shards hold.

The functions import on call: this module is loaded at the first hook call of any host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.distributed.device_mesh import DeviceMesh

for_ckpt = pluggy.HookimplMarker("vescale_ckpt")
for_pipe = pluggy.HookimplMarker("vescale_pipe")


@for_ckpt
def vescale_layout(tensor: torch.Tensor) -> Any:
    """Return the layout of a shard of ours, such as of an optimizer's state; None for other tensors."""
    from ._shards import layout_of_shard

    return layout_of_shard(tensor)


@for_pipe
def vescale_wrap_stage(module: torch.nn.Module, mesh: DeviceMesh) -> Callable[[Any], Any] | None:
    """Offer data parallelism around a stage, if its mesh has a dimension named for it, such as "dp"."""
    from ._replicate.stage import stage_wrapper

    return stage_wrapper(module, mesh)
