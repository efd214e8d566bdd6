"""Mesh and placements -> part. The oracle cuts a real tensor: with the methods of torch's placements, or by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from vescale_rng._layout import Box, Part, part_of_mesh
from vescale_rng.errors import LayoutError


@dataclass(frozen=True)
class Interleaved:
    dim: int
    interleave: int


@dataclass(frozen=True)
class Ragged:
    dims: tuple[int, ...]
    local_units: tuple[int, ...]


def cut(local: torch.Tensor, placement: Any, count: int, index: int) -> torch.Tensor:
    """Return the part of `local` that one rank of a mesh axis gets."""
    if isinstance(placement, Replicate):
        return local
    if isinstance(placement, Ragged):
        rows = local.flatten(0, len(placement.dims) - 1)
        unit = len(rows) // max(1, sum(placement.local_units))
        return rows.split([unit * n for n in placement.local_units])[index]
    if isinstance(placement, Interleaved):
        blocks = local.tensor_split(placement.interleave, placement.dim)
        return torch.cat([cut(block, Shard(placement.dim), count, index) for block in blocks], placement.dim)
    pieces, _ = placement._split_tensor(local, count, with_padding=False, contiguous=False)
    return pieces[index]


def check(shape: tuple[int, ...], sizes: tuple[int, ...], placements: list[Any]) -> None:
    """Compare the parts of all ranks with the cut tensor, and with each other."""
    whole = torch.arange(math.prod(shape)).view(shape)
    seen = torch.zeros_like(whole)
    for at in itertools.product(*map(range, sizes)):
        local = whole
        for placement, count, index in zip(placements, sizes, at, strict=True):
            local = cut(local, placement, count, index)
        part = part_of_mesh(shape, sizes, placements, coordinate=at)
        if any(isinstance(placement, Ragged) for placement in placements):
            local = local.flatten()
            assert part.windows is None
        assert part.local_shape == tuple(local.shape)
        assert part.global_stride == whole.stride()
        for box, view in zip(part.boxes, part.views(local), strict=True):
            region = tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))
            assert box.numel > 0
            assert torch.equal(view, whole[region])
            seen[region] += 1
        assert sum(box.numel for box in part.boxes) == local.numel()
    copies = math.prod(n for n, p in zip(sizes, placements, strict=True) if isinstance(p, Replicate))
    assert (seen == copies).all()


@st.composite
def cases(draw: st.DrawFn, kinds: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[int, ...], list[Any]]:
    shape = draw(st.lists(st.integers(0, 9), max_size=3).map(tuple))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    placements: list[Any] = []
    for _ in sizes:
        kind = draw(st.sampled_from(kinds)) if shape else "replicate"
        dim = draw(st.integers(0, max(0, len(shape) - 1)))
        placements.append(
            {
                "replicate": Replicate(),
                "shard": Shard(dim),
                "strided": _StridedShard(dim, split_factor=draw(st.integers(1, 5))),
                "interleaved": Interleaved(dim, draw(st.integers(1, 3))),
            }[kind]
        )
    return shape, sizes, placements


@settings(max_examples=150)
@given(cases(("replicate", "shard", "strided")))
def test_every_rank_holds_what_torch_gives_it(case: tuple[tuple[int, ...], tuple[int, ...], list[Any]]) -> None:
    check(*case)


@settings(max_examples=100)
@given(cases(("replicate", "shard", "strided", "interleaved")))
def test_interleaved(case: tuple[tuple[int, ...], tuple[int, ...], list[Any]]) -> None:
    shape, sizes, placements = case
    torn = [at for at in itertools.product(*map(range, sizes)) if not blocks_are_equal(at, *case)]
    for at in torn:
        with pytest.raises(LayoutError, match="equal blocks"):
            part_of_mesh(shape, sizes, placements, coordinate=at)
    if not torn:
        check(*case)


def blocks_are_equal(
    at: tuple[int, ...], shape: tuple[int, ...], sizes: tuple[int, ...], placements: list[Any]
) -> bool:
    local = torch.empty(shape)
    for placement, count, index in zip(placements, sizes, at, strict=True):
        if isinstance(placement, Interleaved) and local.shape[placement.dim] % placement.interleave:
            return False
        local = cut(local, placement, count, index)
    return True


@settings(max_examples=100)
@given(st.data())
def test_ragged_beside_other_cuts(data: st.DataObject) -> None:
    leading = data.draw(st.integers(1, 3))
    trailing = data.draw(st.integers(0, 2))
    units = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple))
    first = data.draw(st.integers(1, 2)) * max(1, sum(units))
    shape = (*(data.draw(st.integers(0, 3)) for _ in range(leading - 1)), first)
    shape = (*data.draw(st.permutations(shape)), *(data.draw(st.integers(0, 4)) for _ in range(trailing)))
    assume(sum(units) or not math.prod(shape[:leading]))
    placements: list[Any] = [Ragged(tuple(range(leading)), units)]
    sizes: tuple[int, ...] = (len(units),)
    if trailing and data.draw(st.booleans()):
        dim = data.draw(st.integers(leading, leading + trailing - 1))
        kind = data.draw(st.sampled_from([Shard(dim), _StridedShard(dim, split_factor=2), Replicate()]))
        sizes = (2, *sizes)
        placements.insert(0, kind)
    if data.draw(st.booleans()):
        sizes, placements = (*sizes, 2), [*placements, Replicate()]
    check(shape, sizes, placements)


@pytest.mark.parametrize(
    ("shape", "sizes", "placements"),
    [
        ((8, 6), (2, 2), [Shard(0), Ragged((0,), (1, 3))]),  # a dim that is cut, then flattened
        ((8, 3, 6), (2, 2), [Shard(0), Ragged((0, 1), (1, 2))]),
        ((8, 3, 8), (2, 2), [_StridedShard(2, split_factor=2), Ragged((0, 1), (1, 2))]),  # torn inside a row
        ((8, 3, 2), (2, 2), [_StridedShard(0, split_factor=2), Ragged((0, 1), (1, 2))]),  # torn across rows
        ((12,), (2, 2), [Ragged((0,), (1, 2)), Ragged((0,), (3, 1))]),
        ((6, 4), (3,), [Ragged((0,), (0, 3, 0))]),
        ((0, 4), (2,), [Ragged((0, 1), (0, 0))]),
        ((8, 8), (2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),  # FSDP2 + TP
        ((7, 3), (2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
        ((10, 3), (2, 2), [_StridedShard(0, split_factor=2), Replicate()]),  # the local part is two intervals
        ((9,), (3,), [_StridedShard(0, split_factor=4)]),
        ((5, 5), (4,), [Shard(1)]),  # an empty shard
        ((1,), (4, 2), [Shard(0), Shard(0)]),
        ((12, 4), (2, 2), [Interleaved(0, 3), Shard(1)]),
        ((12, 8), (2, 2), [Interleaved(0, 3), Interleaved(1, 2)]),
        ((), (2, 3), [Replicate(), Replicate()]),
    ],
    ids=str,
)
def test_by_name(shape: tuple[int, ...], sizes: tuple[int, ...], placements: list[Any]) -> None:
    check(shape, sizes, placements)


@settings(max_examples=60)
@given(cases(("replicate", "shard", "strided")))
def test_shape_and_offset_are_those_that_torch_computes(
    case: tuple[tuple[int, ...], tuple[int, ...], list[Any]],
) -> None:
    shape, sizes, placements = case
    for at in itertools.product(*map(range, sizes)):
        part = part_of_mesh(shape, sizes, placements, coordinate=at)
        local_shape, offset = _compute_local_shape_and_global_offset(shape, sizes, list(at), placements)
        assert part.local_shape == tuple(local_shape)
        if part.boxes:
            assert part.boxes[0].offset == tuple(offset)


def test_adjacent_intervals_are_one_box() -> None:
    assert part_of_mesh((8,), (1,), [_StridedShard(0, split_factor=4)], coordinate=(0,)) == Part.whole((8,))
    part = part_of_mesh((8,), (2, 2), [_StridedShard(0, split_factor=2), Shard(0)], coordinate=(1, 0))
    assert part.boxes == (Box((2,), (2,)),)


def test_dims_of_any_size() -> None:
    part = part_of_mesh((10**12, 10**9), (4, 2), [_StridedShard(0, split_factor=2), Shard(1)], coordinate=(3, 1))
    eighth = 10**12 // 8
    rows = [Box((start, 5 * 10**8), (eighth, 5 * 10**8)) for start in (3 * eighth, 7 * eighth)]
    assert part.boxes == tuple(rows)
    assert part.local_shape == (2 * eighth, 5 * 10**8)


def test_negative_dims() -> None:
    a, b = ([Shard(-1), Interleaved(-2, 2)], [Shard(1), Interleaved(0, 2)])
    assert part_of_mesh((4, 6), (2, 2), a, coordinate=(1, 1)) == part_of_mesh((4, 6), (2, 2), b, coordinate=(1, 1))
    ragged = part_of_mesh((4, 6), (2,), [Ragged((-2, -1), (1, 2))], coordinate=(1,))
    assert ragged == part_of_mesh((4, 6), (2,), [Ragged((0, 1), (1, 2))], coordinate=(1,))


def test_the_stride_is_that_of_the_whole() -> None:
    part = part_of_mesh((4, 6), (2,), [Shard(0)], stride=(1, 4), coordinate=(1,))
    assert part.global_stride == (1, 4)
    assert part.boxes == part_of_mesh((4, 6), (2,), [Shard(0)], coordinate=(1,)).boxes
    assert part_of_mesh((4, 6), (2,), [Ragged((0,), (1, 3))], stride=(1, 4), coordinate=(1,)).global_stride == (1, 4)


class Odd(Shard):
    """A shard of somebody else, which may cut in another way."""


@pytest.mark.parametrize(
    ("sizes", "at", "placements", "message"),
    [
        ((2,), (0,), [Partial()], r"placements\[0\] = Partial\(sum\): a partial value .* Reduce it first"),
        ((1,), (0,), [Partial("max")], r"Reduce it first"),
        ((2, 2), (0, 0), [Shard(0)], r"a mesh of 2 axes needs 2 placements, but got 1"),
        ((2,), (0,), Shard(0), r"placements: expected a sequence with one per mesh axis"),
        ((2,), (0,), ["S"], r"placements\[0\] = 'S': builtins.str is not a placement that is known"),
        ((2,), (0,), [Odd(0)], r"Odd is not a placement that is known here"),
        ((2,), (0,), [Shard(2)], r"tensor dim 2 does not exist in a tensor of 2 dims"),
        ((2,), (0,), [Shard(-3)], r"tensor dim -3 does not exist"),
        ((2,), (0,), [Interleaved(0, 3)], r"needs dim 0 in 3 equal blocks, but 4 elements"),
        ((2,), (0,), [Interleaved(0, 0)], r"interleave: expected a positive integer, but got 0"),
        ((2,), (0,), [Ragged((1,), (1, 1))], r"flattens the leading dims 0, 1, ...; got \(1,\)"),
        ((2,), (0,), [Ragged((), (1, 1))], r"flattens the leading dims"),
        ((2,), (0,), [Ragged((0,), (1, 1, 2))], r"one number for each of the 2 ranks"),
        ((2,), (0,), [Ragged((0,), (1, -1))], r"local_units: .* not negative"),
        ((2,), (0,), [Ragged((0,), (1, 2))], r"3 units in all, which do not divide the 4 rows"),
        ((2,), (0,), [Ragged((0,), (0, 0))], r"0 units in all, which do not divide"),
        ((2, 2), (0, 0), [Ragged((0,), (1, 1)), Shard(0)], r"dim 0 is flattened by a ragged shard on an earlier"),
        ((2, 2), (0, 0), [Ragged((0,), (1, 1)), Ragged((0, 1), (1, 1))], r"must flatten the same dims"),
        ((2,), (2,), [Shard(0)], r"coordinate: \(2,\) is not inside of a mesh of sizes \(2,\)"),
        ((2,), (0, 0), [Shard(0)], r"coordinate: \(0, 0\) is not inside"),
        ((2,), (-1,), [Shard(0)], r"coordinate: .* not negative"),
        ((2,), (0.0,), [Shard(0)], r"coordinate: expected a tuple of integers"),
        ((2,), None, [Shard(0)], r"coordinate: needed where mesh is not a DeviceMesh"),
        (None, (0,), [Shard(0)], r"mesh: expected one integer per dim, but got None"),
    ],
)
def test_what_is_refused(sizes: Any, at: Any, placements: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        part_of_mesh((4, 6), sizes, placements, coordinate=at)


def test_wrong_shapes_and_strides() -> None:
    with pytest.raises(LayoutError, match=r"global_shape: expected .* but got \(4, -1\)"):
        part_of_mesh((4, -1), (2,), [Shard(0)], coordinate=(0,))
    with pytest.raises(LayoutError, match=r"global_stride: .* has 1 numbers"):
        part_of_mesh((4, 6), (2,), [Shard(0)], stride=(1,), coordinate=(0,))
