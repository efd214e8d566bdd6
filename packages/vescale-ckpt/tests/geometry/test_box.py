"""Boxes and runs against index arithmetic on a tensor that holds its own flat indices."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale_ckpt._geometry import Box, Piece, normal

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def boxes(draw, shape):
    offset = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return Box(offset, tuple(draw(st.integers(1, size - o)) for size, o in zip(shape, offset, strict=True)))


@st.composite
def shape_and_pieces(draw):
    shape = draw(shapes)
    box = draw(boxes(shape))
    start = draw(st.integers(0, box.numel))
    return shape, Piece(box, start, draw(st.integers(start, box.numel)))


def numbered(shape):
    return torch.arange(math.prod(shape)).reshape(shape)


def elements(shape, piece):
    whole = numbered(shape)
    return whole[piece.box.slices(Box.whole(shape))].reshape(-1)[piece.start : piece.stop].tolist()


@given(shape_and_pieces())
def test_boxes_of_a_piece_are_its_elements_in_order(case):
    shape, piece = case
    whole = numbered(shape)
    found = [i for box in piece.boxes() for i in whole[box.slices(Box.whole(shape))].reshape(-1).tolist()]
    assert found == elements(shape, piece)
    assert len(piece.boxes()) <= max(1, 2 * len(shape) - 1)


@given(shape_and_pieces())
def test_a_normal_piece_holds_the_same_elements(case):
    shape, piece = case
    assert elements(shape, normal(piece, shape)) == elements(shape, piece)


@given(shape_and_pieces())
def test_a_run_of_the_whole_tensor_is_written_as_one(case):
    shape, piece = case
    found = elements(shape, Piece(piece.box, 0, piece.box.numel))
    one_run = found == list(range(found[0], found[0] + len(found)))
    assert (normal(piece, shape).box == Box.whole(shape)) == one_run


@given(st.data(), shapes)
def test_intersection_is_that_of_the_elements(data, shape):
    a, b = data.draw(boxes(shape)), data.draw(boxes(shape))
    whole = numbered(shape)
    both = set(elements(shape, Piece(a, 0, a.numel))) & set(elements(shape, Piece(b, 0, b.numel)))
    common = a.intersect(b)
    assert both == (set(whole[common.slices(Box.whole(shape))].reshape(-1).tolist()) if common else set())
    assert a.contains(b) == (common == b)


@pytest.mark.parametrize(
    ("box", "other"), [(Box((0,), (0,)), Box((0,), (4,))), (Box((2, 0), (2, 2)), Box((0, 0), (2, 2)))]
)
def test_nothing_in_common(box, other):
    assert box.intersect(other) is None
