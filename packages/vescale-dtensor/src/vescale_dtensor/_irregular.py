"""Axis types of irregular cuts: what a rank holds along the axis is not one block of one dim.

They are negative integers, one object per value, so that `t >= 0` stays the test for `Shard(t)` and axis types
stay cheap to compare and to hash. `is_cut` is the test for "ranks hold different elements".
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

_FIRST = -4
"""Below R, I and P."""

AxisTypes = tuple[int, ...]
"""One axis type per mesh axis."""


class Irregular(int):
    """An axis type that stands for a cut other than `Shard`; equal ones are the same object."""

    dims: tuple[int, ...]
    """Tensor dims that it cuts."""

    def __copy__(self) -> Irregular:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Irregular:
        return self


class Interleaved(Irregular):
    """Dim `dim` is `blocks` equal blocks, each of which is cut as `Shard` would cut it."""

    dim: int
    blocks: int

    def __reduce__(self) -> tuple[Any, ...]:
        return interleaved, (self.dim, self.blocks)

    def __repr__(self) -> str:
        return f"IS({self.dim},{self.blocks})"

    __str__ = __repr__


class Ragged(Irregular):
    """The leading `lead` dims, flattened, are cut in proportion to `units`."""

    lead: int
    units: tuple[int, ...]
    stops: tuple[int, ...]
    """Units before each rank, and all of them."""

    def part(self, start: int, stop: int, index: int) -> tuple[int, int]:
        """What rank `index` keeps of the rows from `start` to `stop`; borders inside of a row are rounded down."""
        rows, total = stop - start, self.stops[-1]
        return start + rows * self.stops[index] // total, start + rows * self.stops[index + 1] // total

    def __reduce__(self) -> tuple[Any, ...]:
        return ragged, (self.lead, self.units)

    def __repr__(self) -> str:
        return f"RS({self.lead};{','.join(map(str, self.units))})"

    __str__ = __repr__


_known: dict[tuple[Any, ...], Irregular] = {}
_lock = threading.Lock()
_T = TypeVar("_T", bound=Irregular)


def _interned(cls: type[_T], key: tuple[Any, ...], fill: Callable[[_T], None]) -> _T:
    with _lock:
        found = _known.get(key)
        if not isinstance(found, cls):
            found = cls(_FIRST - len(_known))
            fill(found)
            _known[key] = found
    return found


def interleaved(dim: int, blocks: int) -> int:
    """Axis type of a dim cut block by block; one block is a plain shard, none (an empty dim) too."""
    if blocks <= 1:
        return dim

    def fill(made: Interleaved) -> None:
        made.dim, made.blocks, made.dims = dim, blocks, (dim,)

    return _interned(Interleaved, (Interleaved, dim, blocks), fill)


def ragged(lead: int, units: Sequence[int]) -> Ragged:
    """Axis type of a contiguous piece of the leading dims."""
    units = tuple(units)

    def fill(made: Ragged) -> None:
        made.lead, made.units, made.dims = lead, units, tuple(range(lead))
        made.stops = tuple(itertools.accumulate(units, initial=0))

    return _interned(Ragged, (Ragged, lead, units), fill)


def is_cut(axis_type: int) -> bool:
    """Whether ranks along an axis of this type hold different elements."""
    return axis_type >= 0 or axis_type <= _FIRST


def is_irregular(types: Sequence[int]) -> bool:
    """Whether one of `types` is an irregular cut."""
    return min(types, default=0) <= _FIRST


def cut_dims_of(axis_type: int) -> tuple[int, ...]:
    """Tensor dims that an axis of this type cuts."""
    if axis_type >= 0:
        return (axis_type,)
    return axis_type.dims if isinstance(axis_type, Irregular) else ()


def with_dim(axis_type: int, dim: int) -> int:
    """The same cut of another dim; `axis_type` is a shard or an interleaved one."""
    return interleaved(dim, axis_type.blocks) if isinstance(axis_type, Interleaved) else dim


def clash(types: Sequence[int]) -> str | None:
    """Why axes of these types cannot stand together; None where they can.

    Blocks of a dim can be cut by several axes if all cut the same blocks. A ragged axis cuts what the shards leave,
    whichever comes first in the mesh; what it flattens must be in one piece.
    """
    by_dim: dict[int, int] = {}
    lead = 0
    for t in types:
        if isinstance(t, Ragged):
            if lead not in (0, t.lead):
                return f"two ragged shards flatten {lead} and {t.lead} leading dims; both must flatten the same"
            lead = t.lead
            continue
        for dim in cut_dims_of(t):
            if by_dim.setdefault(dim, t) != t:
                return f"dim {dim} is cut as {by_dim[dim]!r} and as {t!r}; interleaved cuts of a dim must be the same"
    torn = [d for d, t in by_dim.items() if isinstance(t, Interleaved) and d < lead]
    return f"dim {torn[0]} is interleaved, so a ragged shard cannot flatten it" if torn else None
