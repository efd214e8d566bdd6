"""Every element has one writer, loads are even, and readers find the writers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_ckpt._geometry import Assignment, Box, Explicit, Geometry, Mesh, Rule


@st.composite
def tensors(draw):
    world = draw(st.sampled_from([1, 2, 3, 4, 8]))
    sizes = (2, world // 2) if world % 2 == 0 and world > 2 and draw(st.booleans()) else (world,)
    layouts = []
    for _ in range(draw(st.integers(1, 3))):
        texts = [draw(st.sampled_from(["R", "S(0)", "S(1)", "SS(0,2)"])) for _ in sizes]
        layouts.append(Rule(Mesh(sizes, range(world)), tuple(texts)))
    sides = st.sampled_from([1, 2, 3, 17, 130, 300])
    found = [
        Geometry((draw(sides), draw(sides)), draw(st.sampled_from([1, 2, 4, 8, 16])), draw(st.sampled_from(layouts)))
        for _ in range(draw(st.integers(1, 5)))
    ]
    return world, found


@settings(max_examples=150, deadline=None)
@given(tensors())
def test_every_element_is_written_once(case):
    world, group = case
    assignment = Assignment(group)
    seen = [torch.zeros(tensor.shape, dtype=torch.int64) for tensor in group]
    for rank in range(world):
        for number, piece in assignment.pieces(rank):
            assert piece.numel
            for box in piece.boxes():
                seen[number][box.slices(Box.whole(group[number].shape))] += 1
    assert all(bool((count == 1).all()) for count in seen)


@settings(max_examples=150, deadline=None)
@given(tensors(), st.data())
def test_a_rank_writes_only_what_it_holds(case, data):
    world, group = case
    rank = data.draw(st.integers(0, world - 1))
    for number, piece in Assignment(group).pieces(rank):
        shape = group[number].shape
        held = torch.zeros(shape, dtype=torch.bool)
        for box in group[number].layout.boxes(shape, rank):
            held[box.slices(Box.whole(shape))] = True
        assert all(bool(held[box.slices(Box.whole(shape))].all()) for box in piece.boxes())


@settings(max_examples=150, deadline=None)
@given(tensors(), st.data())
def test_readers_find_the_writers(case, data):
    world, group = case
    assignment = Assignment(group)
    number = data.draw(st.integers(0, len(group) - 1))
    shape = group[number].shape
    offset = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    box = Box(offset, tuple(data.draw(st.integers(1, s - o)) for s, o in zip(shape, offset, strict=True)))
    want = {
        rank
        for rank in range(world)
        for n, piece in assignment.pieces(rank)
        if n == number and any(mine.intersect(box) for mine in piece.boxes())
    }
    assert want <= set(assignment.writers(number, box))


def llama(layers=32, hidden=4096, inner=14336, vocabulary=128256):
    """Shapes of the 291 tensors of Llama-3-8B."""
    layer = [(hidden, hidden), (1024, hidden), (1024, hidden), (hidden, hidden), (inner, hidden), (inner, hidden)]
    layer += [(hidden, inner), (hidden,), (hidden,)]
    return [(vocabulary, hidden), *(layer * layers), (hidden,), (vocabulary, hidden)]


@pytest.mark.parametrize("world", [8, 64, 256])
def test_replicas_are_balanced(world):
    replicated = Rule(Mesh((world,), range(world)), ("R",))
    assignment = Assignment([Geometry(shape, 4, replicated) for shape in llama() * 3])
    loads = [sum(piece.numel * 4 for _, piece in assignment.pieces(rank)) for rank in range(world)]
    assert sum(loads) == sum(math.prod(shape) * 4 for shape in llama() * 3)
    assert max(loads) <= 1.05 * sum(loads) / world


def test_small_tensors_have_one_writer():
    replicated = Rule(Mesh((4,), range(4)), ("R",))
    assignment = Assignment([Geometry((5056,), 1, replicated) for _ in range(12)])
    pieces = [entry for rank in range(4) for entry in assignment.pieces(rank)]
    assert sorted(number for number, _ in pieces) == list(range(12))
    assert all(piece.numel == 5056 for _, piece in pieces)


def test_ranks_that_know_more_tensors_agree():
    # Which rank writes what depends on the list alone, so two ranks that build it anew find the same.
    first = Rule(Mesh((2,), (0, 1)), ("R",))
    group = [Geometry((100, 100), 4, first), Geometry((64, 64), 8, Rule(Mesh((2,), (2, 3)), ("S(0)",)))]
    assert [Assignment(group).pieces(rank) for rank in range(4)] == [
        Assignment(list(group)).pieces(r) for r in range(4)
    ]
    assert Assignment(group).pieces(4) == []


def test_explicit_boxes_are_shared_by_their_holders():
    top, bottom = Box((0, 0), (100, 300)), Box((100, 0), (200, 300))
    layout = Explicit(((0, (top,)), (1, (bottom,)), (2, (top,))))
    assignment = Assignment([Geometry((300, 300), 4, layout)])
    sizes = [sum(piece.numel for _, piece in assignment.pieces(rank)) for rank in range(3)]
    assert sizes[1] == 60000
    assert sizes[0] + sizes[2] == 30000
    assert abs(sizes[0] - sizes[2]) < 2 * 1024  # the cut lies on a multiple of 4096 bytes
    assert assignment.writers(0, Box((150, 0), (1, 1))) == [1]
