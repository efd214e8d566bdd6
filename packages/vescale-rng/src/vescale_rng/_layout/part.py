"""`Part`: which elements of a whole tensor one rank holds, and where they lie in its local tensor.

A part is a list of disjoint boxes of global coordinates. It knows nothing of meshes or of DTensor classes; the other
modules of this folder make parts from those. It is hashable, so that a plan for drawing it is made once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from numbers import Integral
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from ..errors import LayoutError

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST = 2**63 - 1
Window = tuple[tuple[int, int], ...]
"""Per local dim (start, stop)."""


@dataclass(frozen=True, slots=True)
class Box:
    """Elements of the whole tensor: those with `offset[d] <= i[d] < offset[d] + shape[d]` in every dim `d`.

    Args:
        offset: global coordinates of the first element.
        shape: number of elements per dim; 0 in some dim for an empty box.

    Raises:
        LayoutError: if one is not a tuple of integers that are not negative.

    Example:
        >>> Box((0, 4), (2, 3)).numel
        6
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        check_numbers("offset", self.offset)
        check_numbers("shape", self.shape)

    @property
    def numel(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Part:
    """Which elements of a whole tensor one rank holds, and where they lie in its local tensor.

    Every element of the local tensor belongs to exactly one box. Equal parts have equal hashes, also across processes.

    Args:
        global_shape: shape of the whole tensor.
        global_stride: strides that the whole tensor has on one device, in elements; they decide the order of draws.
        local_shape: shape of the local tensor.
        boxes: the elements in global coordinates, disjoint; none for a rank that holds nothing.
        windows: per box and per dim of the local tensor (start, stop) of the box in it. None: the boxes stand in the
            local tensor one after the other, each of them contiguous (the local part of a ragged shard).

    Raises:
        LayoutError: for lengths, numbers or boxes that do not fit together.

    Example:
        >>> import torch
        >>> part = Part((2, 4), (4, 1), (2, 2), (Box((0, 2), (2, 2)),), (((0, 2), (0, 2)),))
        >>> [view.shape for view in part.views(torch.empty(2, 2))]
        [torch.Size([2, 2])]
    """

    global_shape: tuple[int, ...]
    global_stride: tuple[int, ...]
    local_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    windows: tuple[Window, ...] | None
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check(self)
        # `None` hashes to an address in older Pythons, and a pickled part must keep its hash.
        windows = () if self.windows is None else self.windows
        boxes = tuple((box.offset, box.shape) for box in self.boxes)
        key = hash((self.global_shape, self.global_stride, self.local_shape, boxes, windows))
        object.__setattr__(self, "_hash", key)

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def whole(cls, shape: Sequence[int], stride: Sequence[int] | None = None) -> Part:
        """Return the part that is the whole tensor, as one device or a replicated tensor has it.

        Args:
            shape: shape of the tensor.
            stride: its strides in elements; contiguous if None.

        Raises:
            LayoutError: for negative or non-integer numbers, sizes beyond those of torch, or a stride of another length
                than the shape.

        Example:
            >>> Part.whole((2, 3)).boxes
            (Box(offset=(0, 0), shape=(2, 3)),)
        """
        sizes = integers("shape", shape)
        check_size("shape", sizes)
        return whole(sizes, contiguous_stride(sizes) if stride is None else integers("stride", stride))

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.global_shape)

    @property
    def is_whole(self) -> bool:
        """True if the local tensor is the whole tensor, element by element."""
        return self.local_shape == self.global_shape and (
            self.numel == 0 or (len(self.boxes) == 1 and self.boxes[0].shape == self.global_shape)
        )

    def fits(self, local: Tensor) -> bool:
        """Tell whether `local` has the shape of this rank's local tensor, or as many elements if only those matter."""
        if self.windows is None:
            return local.numel() == math.prod(self.local_shape)
        return local.shape == self.local_shape

    def views(self, local: Tensor) -> list[Tensor]:
        """Return for each box the view of `local` that holds it, of the shape of the box.

        Args:
            local: the local tensor: of shape `local_shape` and any strides; where the boxes stand one after the other
                (`windows` is None), contiguous or 1-D and of any shape with as many elements.

        Raises:
            LayoutError: if `local` is another kind of tensor.
        """
        if not self.fits(local):
            raise LayoutError(
                f"local: this rank's part has local shape {self.local_shape}, but the tensor given has shape "
                f"{tuple(local.shape)}. Give the local tensor of this rank, or make the part from its layout."
            )
        if self.windows is not None:
            views = []
            for window in self.windows:
                view = local
                for dim, (start, stop) in enumerate(window):
                    if stop - start != self.local_shape[dim]:
                        view = view.narrow(dim, start, stop - start)
                views.append(view)
            return views
        if local.dim() != 1:
            if not local.is_contiguous():
                raise LayoutError(
                    f"local: the boxes of this part stand one after the other in a contiguous local tensor, but the "
                    f"one given has shape {tuple(local.shape)} and strides {local.stride()}. Give `local.contiguous()`."
                )
            local = local.view(-1)
        views, start = [], 0
        for box in self.boxes:
            views.append(local.narrow(0, start, box.numel).view(box.shape))
            start += box.numel
        return views


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor as torch gives them (a dim of size 0 counts as 1).

    Example:
        >>> contiguous_stride((2, 3, 4))
        (12, 4, 1)
    """
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


@functools.lru_cache(maxsize=4096)
def whole(shape: tuple[int, ...], stride: tuple[int, ...]) -> Part:
    """Return the part that is the whole tensor, of numbers that are known to be right: plain tensors take this way."""
    if 0 in shape:
        return Part(shape, stride, shape, (), ())
    return Part(shape, stride, shape, (Box((0,) * len(shape), shape),), (tuple((0, size) for size in shape),))


def check_numbers(what: str, numbers: Any) -> None:
    """Check that `numbers` is a tuple of plain integers (no bool, no symbol) that are not negative.

    Raises:
        LayoutError: naming `what` and the numbers.
    """
    if not isinstance(numbers, tuple) or any(type(number) is not int or number < 0 for number in numbers):
        raise LayoutError(f"{what}: expected a tuple of integers that are not negative, but got {numbers!r}.")


def integers(what: str, numbers: Any) -> tuple[int, ...]:
    """Return `numbers`, any iterable of integers (also numpy's), as a tuple of plain integers.

    Raises:
        LayoutError: naming `what` and the numbers, if one is no integer or is negative.
    """
    try:
        found = tuple(numbers)
    except TypeError:
        raise LayoutError(f"{what}: expected one integer per dim, but got {numbers!r}.") from None
    plain = tuple(int(n) if isinstance(n, Integral) and not isinstance(n, bool) else n for n in found)
    check_numbers(what, plain)
    return plain


def check_size(what: str, shape: tuple[int, ...]) -> None:
    """Check that torch can number the elements of a tensor of this shape.

    Raises:
        LayoutError: naming `what` and the shape.
    """
    # Also of a tensor without elements: its strides are counted as if no size were 0.
    if max(math.prod(max(size, 1) for size in shape[1:]), *shape, math.prod(shape), 0) > _LARGEST:
        raise LayoutError(f"{what}: {shape} is larger than any tensor of torch, whose elements are counted in 63 bits.")


def check_inside(box: Box, shape: tuple[int, ...]) -> None:
    """Check that `box` has a number per dim of `shape` and lies inside of it.

    Raises:
        LayoutError: naming the box and the shape.
    """
    if len(box.offset) != len(shape) or len(box.shape) != len(shape):
        raise LayoutError(f"boxes: {box} needs {len(shape)} numbers each, as the whole shape {shape} has.")
    if any(start + size > limit for start, size, limit in zip(box.offset, box.shape, shape, strict=True)):
        raise LayoutError(f"boxes: {box} is not inside the whole tensor of shape {shape}.")


def _check(part: Part) -> None:
    for name in ("global_shape", "global_stride", "local_shape"):
        check_numbers(name, getattr(part, name))
    ndim, total = len(part.global_shape), 0
    if len(part.global_stride) != ndim:
        raise LayoutError(
            f"global_stride: the whole tensor has shape {part.global_shape}, but the stride {part.global_stride} has "
            f"{len(part.global_stride)} numbers. Give one stride per dim."
        )
    for box in part.boxes:
        check_inside(box, part.global_shape)
        total += box.numel
    _check_disjoint("boxes", [tuple((o, o + s) for o, s in zip(b.offset, b.shape, strict=True)) for b in part.boxes])
    if part.windows is not None:
        _check_windows(part, part.windows)
    if total != math.prod(part.local_shape):
        raise LayoutError(
            f"boxes: they hold {total} elements, but a local tensor of shape {part.local_shape} has "
            f"{math.prod(part.local_shape)}. Every element of the local tensor must belong to one box."
        )


def _check_windows(part: Part, windows: tuple[Window, ...]) -> None:
    if len(windows) != len(part.boxes):
        raise LayoutError(f"windows: {len(part.boxes)} boxes need as many windows, but got {len(windows)}.")
    for box, window in zip(part.boxes, windows, strict=True):
        check_numbers("windows", tuple(number for pair in window for number in pair))
        if tuple(stop - start for start, stop in window) != box.shape:
            raise LayoutError(f"windows: {window} has not the shape of its box {box}.")
        if len(window) != len(part.local_shape) or any(
            stop > size for (_, stop), size in zip(window, part.local_shape, strict=True)
        ):
            raise LayoutError(f"windows: {window} is not inside the local tensor of shape {part.local_shape}.")
    _check_disjoint("windows", windows)


def _check_disjoint(what: str, windows: Sequence[Window]) -> None:
    """Raise if two windows share an element.

    Windows are parted dim by dim into clusters that cannot meet, which settles grids in n log n; only what no dim can
    part is compared in pairs.
    """
    clusters = [[window for window in windows if all(start < stop for start, stop in window)]]
    ndim = len(windows[0]) if windows else 0
    for dim in range(ndim):
        clusters = [piece for cluster in clusters for piece in _parted(cluster, dim)]
    for cluster in clusters:
        for one, two in combinations(cluster, 2):
            if all(a[0] < b[1] and b[0] < a[1] for a, b in zip(one, two, strict=True)):
                raise LayoutError(
                    f"{what}: {one} and {two} (start, stop per dim) overlap. Each element may be held once only."
                )


def _parted(cluster: list[Window], dim: int) -> list[list[Window]]:
    if len(cluster) < 2:
        return []
    pieces: list[list[Window]] = []
    reach = -1
    for window in sorted(cluster, key=itemgetter(dim)):
        start, stop = window[dim]
        if start >= reach:
            pieces.append([])
        pieces[-1].append(window)
        reach = max(reach, stop)
    return pieces
