"""A tensor of a checkpoint that is read only where it is indexed."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._format import TensorRecord
from .._geometry import Box, Layout
from .._state import dtype_of

if TYPE_CHECKING:
    from .checkpoint import Checkpoint

__all__ = ["TensorView"]


class TensorView:
    """A tensor of a checkpoint; nothing of it is in memory.

    `view[...]` reads it whole, `view[index]` what an index of integers, slices with steps above 0 and "..." selects.
    Both return an ordinary CPU tensor with the shape that indexing the whole tensor would give. Only the chunks (of at
    most 1 MiB) in which the selected elements lie are read, and their checksums are compared. `read` has more choices.

    Example:
        >>> import tempfile, torch, vescale_ckpt as ck
        >>> folder = tempfile.mkdtemp()
        >>> _ = ck.save(folder, {"model": {"w": torch.arange(12).view(4, 3)}}, step=7)
        >>> with ck.open(folder) as checkpoint:
        ...     view = checkpoint["model.w"]
        ...     view.shape, view.dtype, view[1:3, 0], view[-1].tolist(), view[..., ::2].shape
        (torch.Size([4, 3]), torch.int64, tensor([3, 6]), [9, 10, 11], torch.Size([4, 2]))
    """

    __slots__ = ("_checkpoint", "_number", "_record", "_writer")

    def __init__(self, checkpoint: Checkpoint, number: int, record: TensorRecord, writer: int | None = None) -> None:
        self._checkpoint, self._number, self._record, self._writer = checkpoint, number, record, writer

    @property
    def name(self) -> str:
        """Name in the checkpoint."""
        return self._record.name

    @property
    def number(self) -> int:
        """Number in the manifest; of a writer's own tensor, among those."""
        return self._number

    @property
    def writer(self) -> int | None:
        """The writer to whom it belongs; None for a tensor of all."""
        return self._writer

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole."""
        return torch.Size(self._record.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return dtype_of(self._record.dtype)

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self._record.shape)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self._record.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return self._record.nbytes

    def numel(self) -> int:
        """Return the number of elements of the whole."""
        return self._record.nbytes // self._record.itemsize

    @property
    def layout(self) -> Layout | None:
        """How it was sharded when it was saved; None for a tensor of one writer."""
        return None if self._writer is not None else self._checkpoint.manifest.layouts[self._record.layout]

    def read(
        self,
        box: Box | None = None,
        out: Tensor | None = None,
        *,
        device: torch.device | str | None = None,
        verify: bool = True,
    ) -> Tensor:
        """Read a box of the tensor.

        Args:
            box: which elements; None: all.
            out: where they go, of the shape of the box; any strides and device; None: a new tensor.
            device: of the new tensor; None: the CPU.
            verify: check the checksums of all chunks that are read; else read fewer bytes where that is possible.

        Returns:
            `out`, or the new tensor.

        Raises:
            CorruptionError: a chunk is damaged.
            MismatchError: `out` has another dtype.
            StorageError: the storage failed.
        """
        box = Box.whole(self._record.shape) if box is None else box
        return self._checkpoint.read(self._number, box, out, writer=self._writer, device=device, verify=verify)

    def __getitem__(self, index: Any) -> Tensor:
        """Read what an index of integers, slices and "..." selects; only that is read."""
        box, local = _box_of(index, self._record.shape)
        return self.read(box)[local]

    def __len__(self) -> int:
        if not self._record.shape:
            raise TypeError(f"{self.name} is 0-d and has no length.")
        return self._record.shape[0]

    def __repr__(self) -> str:
        return f"TensorView({self.name!r}, shape={self._record.shape}, dtype={self.dtype})"


def _box_of(index: Any, shape: tuple[int, ...]) -> tuple[Box, tuple[Any, ...]]:
    """Return the box that holds what an index selects, and the index in that box.

    Example:
        >>> _box_of((slice(2, 9, 3), -1), (8, 4))
        (Box(offset=(2, 3), shape=(4, 1)), (slice(None, None, 3), 0))
    """
    items = list(index) if isinstance(index, tuple) else [index]
    dots = [at for at, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1 or len(items) - len(dots) > len(shape):
        raise IndexError(f"index {index!r} has too many entries for a tensor of shape {shape}.")
    at = dots[0] if dots else len(items)
    items[at : at + 1] = [slice(None)] * (len(shape) - len(items) + len(dots))
    offset: list[int] = []
    sizes: list[int] = []
    local: list[slice | int] = []
    for dim, (item, size) in enumerate(zip(items, shape, strict=True)):
        if isinstance(item, slice):
            start, stop, step = item.indices(size)
            if step < 0:
                raise IndexError(f"index {index!r}: dim {dim} goes backwards; steps must be above 0.")
            count = len(range(start, stop, step))
            offset.append(start if count else 0)
            sizes.append((count - 1) * step + 1 if count else 0)
            local.append(slice(None, None, step))
            continue
        try:
            place = operator.index(item)
        except TypeError:
            raise TypeError(
                f"index {index!r}: a tensor of a checkpoint takes integers, slices and '...', "
                f"but dim {dim} got a {type(item).__name__}. Read it first: view[...]."
            ) from None
        if not -size <= place < size:
            raise IndexError(f"index {index!r}: dim {dim} has {size} elements.")
        offset.append(place % size)
        sizes.append(1)
        local.append(0)
    return Box(tuple(offset), tuple(sizes)), tuple(local)
