"""Classes of parameters: what of them is local, and how a parameter of the class is made of a view of a buffer."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .._hooks import gradient_reduction, plugin_layout
from .._shards import Box, Whole, whole_of
from ..errors import PlanError

__all__ = ["Kind", "kind_of"]


class Kind:
    """A plain parameter."""

    def __init__(self, parameter: nn.Parameter, name: str) -> None:
        """Take a parameter.

        Args:
            parameter: as the module has it.
            name: for messages.
        """
        self.name = name
        self.parameter = parameter

    @property
    def local(self) -> Tensor:
        """What this rank holds, without a graph."""
        return self.parameter.detach()

    @property
    def whole(self) -> Whole:
        """Shape of the whole, and which boxes of it are local."""
        return whole_of(self.parameter.shape)

    @property
    def spread(self) -> tuple[ProcessGroup, ...]:
        """Groups over whose ranks the elements are spread already."""
        return ()

    @property
    def copies(self) -> tuple[ProcessGroup, ...]:
        """Groups whose ranks hold the same elements already."""
        return ()

    @property
    def partial(self) -> tuple[ProcessGroup, ...]:
        """Groups over whose ranks the gradient still has to be summed, besides those of data parallelism."""
        return ()

    def full(self, view: Tensor) -> nn.Parameter:
        """Return what the module sees while its parameters are gathered.

        Args:
            view: of a buffer, of the shape of `local`; the parameter uses its memory.
        """
        return nn.Parameter(view, requires_grad=self.parameter.requires_grad)

    def shard(self, local: Tensor) -> nn.Parameter:
        """Return what the optimizer sees: the same object where it can be, so that who holds it keeps the parameter.

        Args:
            local: one-dimensional.
        """
        if type(self.parameter) is nn.Parameter and self.parameter.device == local.device:
            self.parameter.data = local
            return self.parameter
        return nn.Parameter(local, requires_grad=self.parameter.requires_grad)

    def gradient(self, full: Tensor, gradient: Tensor) -> Tensor:
        """Return the local part of the gradient of `full`."""
        del full
        return gradient


class _OfTorch(Kind):
    """A DTensor of torch, such as of tensor parallelism: its local part is what is sharded further."""

    def __init__(self, parameter: nn.Parameter, name: str) -> None:
        super().__init__(parameter, name)
        dtensor: Any = parameter
        self.mesh, self.placements = dtensor.device_mesh, dtensor.placements
        for placement in self.placements:
            if not (placement.is_replicate() or type(placement).__name__ == "Shard"):
                raise PlanError(
                    f"{name}: a DTensor placed {self.placements} cannot be sharded; use Shard or Replicate."
                )

    @property
    def local(self) -> Tensor:
        dtensor: Any = self.parameter
        found: Tensor = dtensor._local_tensor.detach()
        return found

    @property
    def whole(self) -> Whole:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape = tuple(self.parameter.shape)
        local, offset = compute_local_shape_and_global_offset(shape, self.mesh, self.placements)
        return Whole(shape, (Box(tuple(offset), tuple(local)),))

    def _groups(self, replicated: bool) -> tuple[ProcessGroup, ...]:
        axes = (axis for axis, placement in enumerate(self.placements) if placement.is_replicate() == replicated)
        return tuple(self.mesh.get_group(axis) for axis in axes)

    @property
    def spread(self) -> tuple[ProcessGroup, ...]:
        return self._groups(replicated=False)

    @property
    def copies(self) -> tuple[ProcessGroup, ...]:
        return self._groups(replicated=True)

    def full(self, view: Tensor) -> nn.Parameter:
        from torch.distributed.tensor import DTensor

        whole = self.parameter
        made = DTensor.from_local(
            view, self.mesh, self.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        return nn.Parameter(made, requires_grad=whole.requires_grad)

    def gradient(self, full: Tensor, gradient: Tensor) -> Tensor:
        found: Any = gradient
        if not hasattr(found, "placements"):
            raise PlanError(f"{self.name}: backward left a plain tensor as the gradient of a DTensor.")
        if found.placements != self.placements:
            found = found.redistribute(self.mesh, self.placements)
        return _plain(found._local_tensor)


class _OfPlugin(Kind):
    """A class that a plugin knows; the module goes on seeing the same object."""

    def __init__(self, parameter: nn.Parameter, name: str, layout: Any) -> None:
        super().__init__(parameter, name)
        self._local: Tensor = layout.local.detach()
        self._whole = Whole(
            tuple(layout.global_shape), tuple(Box(tuple(box.offset), tuple(box.shape)) for box in layout.boxes)
        )
        reduction = gradient_reduction(parameter)
        if reduction is None:
            raise PlanError(f"{name}: the plugin that knows a {type(parameter).__name__} does not tell its mesh.")
        mesh, axes = reduction
        self._partial = tuple(mesh.get_group(axis) for axis in axes)
        self._copies, self._spread = _split(
            [mesh.get_group(axis) for axis in range(mesh.ndim)], layout.replicas[1], name
        )

    @property
    def local(self) -> Tensor:
        return self._local

    @property
    def whole(self) -> Whole:
        return self._whole

    @property
    def spread(self) -> tuple[ProcessGroup, ...]:
        return self._spread

    @property
    def copies(self) -> tuple[ProcessGroup, ...]:
        return self._copies

    @property
    def partial(self) -> tuple[ProcessGroup, ...]:
        return self._partial

    def full(self, view: Tensor) -> nn.Parameter:
        with torch._C.DisableTorchFunctionSubclass():
            self.parameter.data = view
        return self.parameter

    def shard(self, local: Tensor) -> nn.Parameter:
        return nn.Parameter(local, requires_grad=self.parameter.requires_grad)

    def gradient(self, full: Tensor, gradient: Tensor) -> Tensor:
        layout = plugin_layout(gradient)
        return gradient if layout is None else layout.local.detach()


def kind_of(parameter: nn.Parameter, name: str) -> Kind:
    """Return what is to be known about the class of a parameter.

    Raises:
        PlanError: a class that nobody knows, or a placement that cannot be sharded.
    """
    if type(parameter) is nn.Parameter:
        return Kind(parameter, name)
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(parameter, distributed.DTensor):
        return _OfTorch(parameter, name)
    layout = plugin_layout(parameter)
    if layout is not None:
        return _OfPlugin(parameter, name, layout)
    raise PlanError(
        f"{name} is a {type(parameter).__name__}, a class that no plugin knows, so its memory cannot be sharded. "
        f"Make it a plain parameter, or implement the hook vescale_layout (see vescale_comm.hookspecs)."
    )


def _plain(tensor: Tensor) -> Tensor:
    return tensor.wait() if hasattr(tensor, "wait") else tensor  # of a collective that torch has not waited for


def _split(
    groups: Sequence[ProcessGroup], copies: int, name: str
) -> tuple[tuple[ProcessGroup, ...], tuple[ProcessGroup, ...]]:
    """Return the groups whose ranks hold copies, and the others, from the number of copies.

    Raises:
        PlanError: no choice of groups gives that number, or several do.
    """
    many = [group for group in groups if group.size() > 1]
    choices = [
        chosen
        for count in range(len(many) + 1)
        for chosen in itertools.combinations(many, count)
        if math.prod(group.size() for group in chosen) == copies
    ]
    if len(choices) != 1:
        raise PlanError(
            f"{name}: it is not clear along which axes of its mesh the {copies} ranks with copies of it lie."
        )
    return choices[0], tuple(group for group in many if all(group is not other for other in choices[0]))
