"""What vescale_rng asks plugins.

Write a plugin with `pluggy.HookimplMarker("vescale_rng")` and an entry point in the group `vescale`:
docs/plugins.md has an example. Specs and implementations take positional arguments without defaults;
an implementation may leave out arguments that it does not need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import pluggy

if TYPE_CHECKING:
    import torch

hookspec = pluggy.HookspecMarker("vescale_rng")


class Box(Protocol):
    """Elements of the whole tensor: those with `offset[d] <= i[d] < offset[d] + shape[d]` in every dim d."""

    @property
    def offset(self) -> tuple[int, ...]:
        """First element of the box, one number per dim."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of elements per dim; 0 in some dim for an empty box."""


class Layout(Protocol):
    """How the whole tensor and the part on this rank belong together."""

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""

    @property
    def global_stride(self) -> tuple[int, ...]:
        """Strides that the whole tensor would have on one device, in elements."""

    @property
    def boxes(self) -> Sequence[Box]:
        """The local elements in local storage order; a ragged shard has at most `2 * ndim - 1` boxes."""

    @property
    def local(self) -> torch.Tensor:
        """The local part; shares memory with the tensor that was asked about."""

    @property
    def replicas(self) -> tuple[int, int]:
        """`(index, count)`: which copy of these boxes this rank holds, and how many ranks hold one."""

    @property
    def partial(self) -> bool:
        """Whether the value still awaits a reduction over ranks."""


@hookspec(firstresult=True)
def vescale_layout(tensor: torch.Tensor) -> Layout | None:
    """Tell how a tensor is sharded.

    Called once per tensor when a random operator meets it. Must not communicate.
    torch's own DTensor and plain tensors are this package's business: a plugin is asked for other classes.

    Args:
        tensor: a tensor of any class.

    Returns:
        The layout of this rank's part, or None if the tensor is not of a class that the plugin knows.
    """
