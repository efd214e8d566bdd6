"""What vescale_ckpt asks plugins.

Write a plugin with `pluggy.HookimplMarker("vescale_ckpt")` and an entry point in the group `vescale`:
docs/plugins.md has examples. Specs and implementations take positional arguments without defaults;
an implementation may leave out arguments that it does not need. What a codec and a storage must bring is in
`vescale_ckpt.protocols`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import pluggy

from .protocols import Codec, Storage

if TYPE_CHECKING:
    import torch

hookspec = pluggy.HookspecMarker("vescale_ckpt")


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


class StorageRegistry(Protocol):
    """Takes places to keep bytes."""

    def register(self, scheme: str, factory: Callable[..., Storage]) -> None:
        """Add a storage for the paths that begin with `scheme://`.

        Args:
            scheme: what stands before `://`, in small letters; must not be taken yet. "*" stands for all schemes that
                nobody else takes, which is what this package registers fsspec for.
            factory: called with the whole URL, and with `fsync` (bool) and `retries` (int) if it has arguments of these
                names, each time a path is opened; returns the storage, see `vescale_ckpt.protocols.Storage`. What it
                raises reaches whoever opened the path.
        """


class CodecRegistry(Protocol):
    """Takes ways to encode chunks."""

    def register(self, name: str, codec: Codec) -> None:
        """Add a codec under a name that is not taken yet.

        Args:
            name: what `compress=` takes; 1 to 16 of a-z, 0-9, "_", ".", "-", a letter first. It is written into the
                index, so it must stay the same for good.
            codec: an object with `encode(data, itemsize)` and `decode(stored, out, itemsize)`, see
                `vescale_ckpt.protocols.Codec`; one for all chunks and threads.

        Raises:
            ValueError: the name is not allowed or taken.
            TypeError: a member is absent or does not take these arguments.
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

    Called once per tensor when a state is saved or loaded. Must not communicate.
    torch's own DTensor and plain tensors are this package's business: a plugin is asked for other classes.

    Args:
        tensor: a tensor of any class.

    Returns:
        The layout of this rank's part, or None if the tensor is not of a class that the plugin knows.
    """


@hookspec(firstresult=True)
def vescale_from_layout(like: torch.Tensor, boxes: Sequence[Box]) -> torch.Tensor | None:
    """Allocate a tensor of the class of `like` whose local part has the given boxes.

    Called once per tensor when a state is loaded into a layout that does not exist yet. Must not communicate.

    Args:
        like: tells class, global shape, dtype and device.
        boxes: the elements that this rank is to hold, in local storage order.

    Returns:
        The tensor with uninitialized values, or None if the plugin does not know the class of `like`.
    """


@hookspec
def vescale_register_storage(registry: StorageRegistry) -> None:
    """Add places to keep checkpoints.

    Called once, when a path is first opened.

    Args:
        registry: where to register; a scheme that is taken is an error.
    """


@hookspec
def vescale_register_codecs(registry: CodecRegistry) -> None:
    """Add ways to encode chunks.

    Called once, when a chunk is first encoded or decoded.

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
