"""The walk, with a source that counts: every element goes where it belongs, and ranges are asked for as agreed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vescale_rng._draw.walk import CHUNK, LONG, memory_order, plan_of, walk
from vescale_rng._layout import Box, Part, part_of_boxes, part_of_flat, part_of_slices
from vescale_rng.errors import LayoutError


class Counting:
    """Element i of the draw is i; checks what every source may rely on."""

    def __init__(self, numel: int, grain: int = 1, seek_cost: float = 2500.0, skip_cost: float = 0.6) -> None:
        self.numel, self.grain, self.seek_cost, self.skip_cost = numel, grain, seek_cost, skip_cost
        self.ranges: list[tuple[int, int]] = []
        self.params: list[tuple[Any, ...]] = []

    def emit(self, out: Tensor, start: int, params: tuple[Any, ...]) -> None:
        stop = start + out.numel()
        assert out.dim() == 1
        assert out.is_contiguous()
        assert start % self.grain == 0
        assert stop % self.grain == 0 or stop == self.numel
        assert not self.ranges or start >= self.ranges[-1][1]
        for value in params:
            if isinstance(value, Tensor):
                assert value.shape == out.shape
                assert value.is_contiguous()
        self.ranges.append((start, stop))
        self.params.append(params)
        out.copy_(torch.arange(start, stop, dtype=out.dtype))

    def finish(self) -> None:
        raise AssertionError("the walk does not finish a draw")

    @property
    def produced(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


def whole_of(shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """The whole tensor of element indices, filled in memory order by hand."""
    whole = torch.empty(shape, dtype=torch.int64)
    places = torch.zeros(shape, dtype=torch.int64)
    for dim, step in enumerate(stride):
        places += (torch.arange(shape[dim]) * step).view([-1 if d == dim else 1 for d in range(len(shape))])
    whole.view(-1)[places.flatten().argsort()] = torch.arange(whole.numel())
    return whole


def expected_of(part: Part, whole: Tensor) -> list[Tensor]:
    return [whole[tuple(slice(o, o + s) for o, s in zip(b.offset, b.shape, strict=True))] for b in part.boxes]


def walked(part: Part, source: Counting, local: Tensor | None = None) -> Tensor:
    local = torch.full(part.local_shape, -1, dtype=torch.int64) if local is None else local
    walk(source, part, local, ())
    whole = whole_of(part.global_shape, part.global_stride)
    for view, expected in zip(part.views(local), expected_of(part, whole), strict=True):
        assert torch.equal(view, expected)
    return local


# ------------------------------------------------------------------ where elements go


@st.composite
def parts(draw: st.DrawFn) -> Part:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    order = draw(st.permutations(range(len(shape))))
    steps = draw(st.lists(st.integers(1, 3), min_size=len(shape), max_size=len(shape)))
    stride, step = [0] * len(shape), 1
    for dim in order:
        stride[dim] = step * steps[dim]
        step = stride[dim] * max(1, shape[dim])
    if draw(st.booleans()):
        start = draw(st.integers(0, math.prod(shape)))
        return part_of_flat(shape, start, draw(st.integers(start, math.prod(shape))), stride)
    chosen: list[Any] = []
    for size in shape:
        a, b, c, d = sorted(draw(st.lists(st.integers(0, size), min_size=4, max_size=4)))
        chosen.append(draw(st.sampled_from([slice(a, d), slice(0, size), [slice(a, b), slice(c, d)]])))
    return part_of_slices(shape, chosen, stride)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    part=parts(),
    grain=st.sampled_from([1, 2, 16]),
    seek=st.sampled_from([0.0, 3.0, 40.0, 2500.0]),
    skip=st.sampled_from([0.0, 0.6, 10.0]),
    reverse=st.booleans(),
)
def test_any_part_at_any_cost(part: Part, grain: int, seek: float, skip: float, reverse: bool) -> None:
    source = Counting(part.numel, grain, seek, skip)
    local = None
    if reverse and part.windows is not None:
        local = torch.full(part.local_shape[::-1], -1).permute(list(reversed(range(len(part.local_shape)))))
    walked(part, source, local)
    if not math.prod(part.local_shape):
        assert not source.ranges


def test_blocks_that_two_ranges_share_are_produced_once() -> None:
    """Three ranges in one block of 16, and a range over two blocks."""
    part = part_of_boxes((64,), [Box((1,), (3,)), Box((5,), (2,)), Box((12,), (9,)), Box((40,), (2,))])
    source = Counting(64, grain=16, seek_cost=0.0, skip_cost=10.0)
    walked(part, source)
    assert source.ranges == [(0, 16), (16, 32), (32, 48)]


@pytest.mark.parametrize("start", [0, 3, 16])
@pytest.mark.parametrize("stop", [LONG + 100, 3 * LONG, 3 * LONG + 5])
def test_long_ranges_of_blocks_go_directly(start: int, stop: int) -> None:
    part = part_of_flat((4 * LONG,), start, stop)
    source = Counting(4 * LONG, grain=16)
    local = walked(part, source)
    assert source.ranges[0][0] == start // 16 * 16
    assert local.numel() <= source.produced <= local.numel() + 30


# ------------------------------------------------------------------ how they are asked for


def test_rows_are_one_range() -> None:
    source = Counting(100 * 50)
    walked(part_of_slices((100, 50), (slice(20, 60), slice(0, 50))), source)
    assert source.ranges == [(1000, 3000)]


def test_narrow_columns_are_cut_from_rows() -> None:
    """A seek costs more than a short row."""
    source = Counting(100 * 50)
    walked(part_of_slices((100, 50), (slice(0, 100), slice(10, 20))), source)
    assert source.ranges == [(10, 99 * 50 + 20)]


def test_wide_columns_are_sought() -> None:
    """Rows of which a rank holds a small part of many elements are not produced whole."""
    source = Counting(8 * 100_000)
    walked(part_of_slices((8, 100_000), (slice(0, 8), slice(0, 5000))), source)
    assert source.ranges == [(row * 100_000, row * 100_000 + 5000) for row in range(8)]


def test_columns_of_a_transposed_tensor_are_rows() -> None:
    source = Counting(100 * 50)
    walked(part_of_slices((100, 50), (slice(0, 100), slice(10, 20)), (1, 100)), source)
    assert source.ranges == [(1000, 2000)]


def test_boxes_that_interleave_share_rows() -> None:
    source = Counting(64 * 64)
    walked(part_of_slices((64, 64), (slice(0, 64), [slice(0, 8), slice(32, 40)])), source)
    assert source.produced <= 64 * 64


def test_boxes_that_follow_one_another_are_two_groups() -> None:
    part = part_of_slices((1000, 100), ([slice(0, 10), slice(900, 950)], slice(0, 100)))
    source = Counting(100_000)
    walked(part, source)
    assert source.ranges == [(0, 1000), (90_000, 95_000)]


def test_blocks_are_no_longer_than_a_chunk() -> None:
    rows = 3 * CHUNK // 64
    part = part_of_slices((rows, 64), (slice(0, rows), slice(0, 63)))
    source = Counting(rows * 64)
    walked(part, source)
    assert all(stop - start <= CHUNK for start, stop in source.ranges)
    assert len(source.ranges) >= 3


def test_a_row_longer_than_a_chunk() -> None:
    shape = (3, CHUNK + 5)
    source = Counting(math.prod(shape))
    walked(part_of_slices(shape, (slice(0, 3), slice(1, CHUNK + 2))), source)
    assert len(source.ranges) >= 3


def test_plans_of_many_steps_are_not_kept() -> None:
    part = part_of_slices((300, 40_000), (slice(0, 300), slice(0, 3)))
    plan = plan_of(part, 1.0, 0.6, 1)
    assert plan.kept is None
    source = Counting(300 * 40_000, seek_cost=1.0)
    local = torch.empty(part.local_shape, dtype=torch.int64)
    walk(source, part, local, ())
    assert torch.equal(local, torch.arange(300).view(-1, 1) * 40_000 + torch.arange(3))
    assert len(source.ranges) == 300


def test_a_huge_whole_costs_the_part() -> None:
    part = part_of_slices((10**6, 10**6), (slice(999_990, 10**6), slice(5, 25)))
    source = Counting(10**12)
    local = torch.empty(part.local_shape, dtype=torch.int64)
    walk(source, part, local, ())
    assert torch.equal(local, torch.arange(999_990, 10**6).view(-1, 1) * 10**6 + torch.arange(5, 25))
    assert source.produced == 200


# ------------------------------------------------------------------ parameters, order and refusals


def test_parameters_of_other_ranks_are_zeros() -> None:
    part = part_of_slices((4, 6), (slice(1, 4), slice(2, 4)))
    chances = torch.arange(1.0, 7.0).view(2, 3).t()  # not contiguous
    source = Counting(24)
    local = torch.empty(3, 2, dtype=torch.int64)
    walk(source, part, local, (0.5, chances))
    assert torch.equal(local, torch.arange(24).view(4, 6)[1:4, 2:4])
    ((number, given),) = source.params
    row = [0.0] * 4
    assert number == 0.5
    assert given.tolist() == [1.0, 4.0, *row, 2.0, 5.0, *row, 3.0, 6.0]


def test_memory_order() -> None:
    assert memory_order((2, 3, 4), (12, 4, 1)) == (0, 1, 2)
    assert memory_order((2, 3, 4, 5), (60, 1, 15, 3)) == (0, 2, 3, 1)
    assert memory_order((1, 3, 1), (1, 1, 99)) == (1,)
    assert memory_order((), ()) == ()


def test_elements_that_share_their_place_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"global_stride: \(0, 1\) puts several elements of shape \(4, 2\) in one pl"):
        walk(Counting(8), part_of_slices((4, 2), (slice(0, 2), slice(0, 2)), (0, 1)), torch.empty(2, 2), ())
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        torch.empty(2).expand(4, 2).uniform_()  # and by torch


def test_elements_in_one_place_are_refused_unless_there_are_none() -> None:
    with pytest.raises(LayoutError, match="several elements of shape"):
        plan_of(Part.whole((2, 3), (0, 1)), 1.0, 1.0, 1)
    assert plan_of(Part.whole((1, 3, 0), (1, 0, 1)), 1.0, 1.0, 1).groups == ()


def test_a_box_of_no_elements_in_a_dim_of_size_one_is_passed_over() -> None:
    part = Part(
        (1, 5, 1, 4),
        (20, 4, 4, 1),
        (0, 5, 1, 4),
        (Box((0, 0, 0, 0), (0, 5, 1, 4)),),
        (((0, 0), (0, 5), (0, 1), (0, 4)),),
    )
    walk(Counting(20), part, torch.empty(part.local_shape), (torch.empty(part.local_shape),))
