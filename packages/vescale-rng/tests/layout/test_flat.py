"""Flat ranges, beside `flatten()[start:stop]` of torch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale_rng._layout import Box, Part, part_of_flat
from vescale_rng.errors import LayoutError


@given(st.lists(st.integers(0, 5), max_size=4).map(tuple), st.data())
def test_a_range_is_that_of_the_flat_tensor(shape: tuple[int, ...], data: st.DataObject) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, whole.numel())] * 2)))
    part = part_of_flat(shape, start, stop)
    local = whole.flatten()[start:stop]
    assert part.local_shape == (stop - start,)
    assert part.windows is None
    assert len(part.boxes) <= max(1, 2 * len(shape) - 1)
    assert sum(box.numel for box in part.boxes) == stop - start
    for box, view in zip(part.boxes, part.views(local), strict=True):
        expected = whole[tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))]
        assert torch.equal(view, expected)


def test_a_huge_tensor_takes_no_longer() -> None:
    part = part_of_flat((10**9, 10**6, 3), 10**6 * 3 * 7 + 4, 10**15)
    assert len(part.boxes) == 5
    assert part.boxes[0] == Box((7, 1, 1), (1, 1, 2))
    assert sum(box.numel for box in part.boxes) == 10**15 - 10**6 * 3 * 7 - 4


def test_whole_empty_and_strides() -> None:
    assert part_of_flat((3, 4), 0, 12).is_whole is False
    assert part_of_flat((12,), 0, 12).is_whole
    assert part_of_flat((), 0, 1).boxes == (Box((), ()),)
    assert part_of_flat((3, 4), 5, 5).boxes == ()
    assert part_of_flat((3, 4), 0, 12, stride=(1, 3)).global_stride == (1, 3)
    assert part_of_flat((3, 4), 0, 12).boxes == Part.whole((3, 4)).boxes


@pytest.mark.parametrize(("start", "stop"), [(0, 13), (5, 4), (-1, 3), (0, 1.5), (False, 1)])
def test_ranges_that_are_refused(start: int, stop: int) -> None:
    with pytest.raises(LayoutError, match=r"start, stop: "):
        part_of_flat((3, 4), start, stop)
