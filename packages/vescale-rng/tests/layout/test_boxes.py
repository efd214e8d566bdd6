"""Parts by slices and by boxes, beside torch's own indexing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale_rng._layout import Box, Part, part_of_boxes, part_of_slices
from vescale_rng.errors import LayoutError

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def region(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))]


@given(st.data())
def test_slices_are_those_of_torch(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    whole = torch.arange(math.prod(shape)).view(shape)
    slices, indices = [], []
    for size in shape:
        bounds = sorted(data.draw(st.lists(st.integers(0, size), max_size=6)))
        pairs = list(zip(bounds[::2], bounds[1::2], strict=False))
        order = data.draw(st.permutations(pairs))
        slices.append([slice(a - size if data.draw(st.booleans()) and a < size else a, b) for a, b in order])
        indices.append([i for a, b in order for i in range(a, b)])
    part = part_of_slices(shape, slices)
    local = whole
    for dim, index in enumerate(indices):
        local = local.index_select(dim, torch.tensor(index, dtype=torch.long))
    assert part.local_shape == tuple(local.shape)
    for box, view in zip(part.boxes, part.views(local), strict=True):
        assert torch.equal(view, region(whole, box))
    assert sum(box.numel for box in part.boxes) == local.numel()


def test_slices_in_short() -> None:
    assert part_of_slices((4, 6), (slice(None), slice(-2, None))).boxes == (Box((0, 4), (4, 2)),)
    assert part_of_slices((4,), [slice(3, 1)]) == part_of_slices((4,), [[]])
    assert part_of_slices((4,), [[slice(0, 1), slice(1, 3)]]) == part_of_slices((4,), [slice(np.int64(0), np.int32(3))])
    assert part_of_slices((2, 3), [slice(None)] * 2, stride=(1, 2)) == Part.whole((2, 3), (1, 2))
    assert part_of_slices((), []) == Part.whole(())


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([slice(0, 2)], r"needs 2, one per dim; got \[slice\(0, 2, None\)\]"),
        (slice(0, 2), r"needs 2, one per dim; got slice"),
        ([slice(0, 4, 2), slice(0, 2)], r"slices\[0\]: expected slices of step 1"),
        ([slice(0, 4), 3], r"slices\[1\]: expected slices of step 1, but got 3"),
        ([slice(0, 4), [3]], r"slices\[1\]: expected slices of step 1, but got 3"),
        ([slice(0, 5), slice(0, 2)], r"slices\[0\]: bound 5 is outside of a dim of size 4"),
        ([slice(-5, 4), slice(0, 2)], r"slices\[0\]: bound -5 is outside"),
        ([slice(0, 4), slice(0.0, 2)], r"slices\[1\]: expected integers as bounds, but got 0.0"),
        ([slice(0, 4), slice(True, 2)], r"slices\[1\]: expected integers as bounds"),
        ([[slice(0, 2), slice(1, 3)], slice(0, 2)], r"overlap"),
    ],
)
def test_slices_that_are_refused(slices: list[slice], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        part_of_slices((4, 6), slices)


def test_one_box_keeps_its_shape() -> None:
    part = part_of_boxes((4, 6), [Box((1, 2), (3, 4))])
    assert part == part_of_slices((4, 6), [slice(1, 4), slice(2, 6)])
    assert part_of_boxes((4, 6), [((1, 2), np.array([3, 4]))]) == part
    empty = part_of_boxes((4, 6), [Box((4, 0), (0, 6))])
    assert (empty.local_shape, empty.boxes) == ((0, 6), ())


def test_several_boxes_stand_one_after_the_other() -> None:
    whole = torch.arange(24).view(4, 6)
    boxes = [Box((3, 1), (1, 2)), Box((0, 0), (0, 3)), Box((0, 0), (2, 3))]
    part = part_of_boxes((4, 6), iter(boxes), stride=(1, 4))
    assert part.local_shape == (8,)
    assert part.global_stride == (1, 4)
    assert part.boxes == (boxes[0], boxes[2])
    local = torch.cat([region(whole, box).flatten() for box in boxes])
    for box, view in zip(part.boxes, part.views(local), strict=True):
        assert torch.equal(view, region(whole, box))
    assert part_of_boxes((4, 6), []).local_shape == (0,)


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([3], r"expected boxes or \(offset, shape\) pairs, but got 3"),
        ([((0, 0), (1, 1), (2, 2))], r"expected boxes or \(offset, shape\) pairs"),
        ([((0, 0), (1, 1.5))], r"boxes: shape: expected a tuple of integers"),
        ([((0, 0), 3)], r"boxes: shape: expected one integer per dim, but got 3"),
        ([((0,), (1,))], r"needs 2 numbers each"),
        ([((0, 0), (4, 7))], r"is not inside"),
        ([((5, 0), (0, 1))], r"is not inside"),
        ([((5, 0), (0, 1)), ((0, 0), (1, 1))], r"is not inside"),
        ([((0, 0), (1, 1)), ((0, 0), (1, 1))], r"overlap"),
    ],
)
def test_boxes_that_are_refused(boxes: list[Box], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        part_of_boxes((4, 6), boxes)
