"""What vescale_comm asks plugins.

Write a plugin with `pluggy.HookimplMarker("vescale_comm")` and an entry point in the group `vescale`:
docs/plugins.md has an example. Specs and implementations take positional arguments without defaults;
an implementation may leave out arguments that it does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

hookspec = pluggy.HookspecMarker("vescale_comm")


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


class CompressorRegistry(Protocol):
    """Takes gradient compressors."""

    def register(self, name: str, factory: Callable[..., Any]) -> None:
        """Add a compressor under a name that is not taken yet.

        Args:
            name: what the user writes to choose it.
            factory: called once per bucket with its plan, the dtype and the device of its buffer, and the user's
                options by name; returns the compressor of that bucket, see `vescale_comm.Compressor`.
        """


class Timeline(Protocol):
    """Records spans of time; spans may overlap, since communication is asynchronous."""

    def begin(self, category: str, name: str) -> object:
        """Open a span and return a token for `end`; called on the thread that starts the work."""

    def end(self, token: object) -> None:
        """Close the span of `token`; may be called on another thread."""


@hookspec(firstresult=True)
def vescale_layout(tensor: torch.Tensor) -> Layout | None:
    """Tell how a tensor is sharded.

    Called once per tensor when a parameter or gradient is put into a bucket. Must not communicate.
    torch's own DTensor and plain tensors are this package's business: a plugin is asked for other classes.

    Args:
        tensor: a tensor of any class.

    Returns:
        The layout of this rank's part, or None if the tensor is not of a class that the plugin knows.
    """


@hookspec(firstresult=True)
def vescale_gradient_reduction(param: torch.nn.Parameter) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """Tell over which mesh axes the gradient of a parameter still has to be summed.

    Called once per parameter when buckets are planned. Must not communicate, and must give the same answer
    on every rank.

    Args:
        param: a parameter of any tensor class.

    Returns:
        The mesh, and the indices of its axes over which the gradient that backward leaves in `param.grad` is
        a partial sum, in increasing order (an empty tuple if it is whole). None if the plugin does not know
        the class of the parameter.
    """


@hookspec
def vescale_register_compressors(registry: CompressorRegistry) -> None:
    """Add ways to compress gradients.

    Called once, when a compressor is first asked for by name.

    Args:
        registry: where to register; a name that is taken is an error.
    """


@hookspec(firstresult=True)
def vescale_timeline() -> Timeline | None:
    """Hand out the recorder of spans.

    Called once, at the first operation that could be recorded; the answer is kept.

    Returns:
        The recorder, which tells by itself whether it records; None: this plugin has none.
    """
