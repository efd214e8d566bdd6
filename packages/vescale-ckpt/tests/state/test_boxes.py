"""Tensors without a rule: exact cover against counting every element, and what is refused."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_ckpt._geometry import Box, Explicit, Mesh, Rule
from vescale_ckpt._state import TensorSpec, covers, join_boxes, own_boxes
from vescale_ckpt.errors import LayoutError


def counted(shape, boxes):
    """The oracle: how often each element is held."""
    count = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        count[box.slices(Box.whole(shape))] += 1
    return bool((count == 1).all())


@st.composite
def cases(draw):
    """Boxes that cover a tensor, after some of them were moved, resized, dropped or doubled."""
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        if not shape:
            boxes.append(box)
            break
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, box.shape[dim]))
        for start, stop in ((0, cut), (cut, box.shape[dim])):
            offset = (*box.offset[:dim], box.offset[dim] + start, *box.offset[dim + 1 :])
            boxes.append(Box(offset, (*box.shape[:dim], stop - start, *box.shape[dim + 1 :])))
    change = draw(st.sampled_from(["none", "none", "drop", "double", "other"]))
    place = draw(st.integers(0, len(boxes) - 1))
    if change == "drop":
        boxes.pop(place)
    elif change == "double":
        boxes.append(boxes[place])
    elif change == "other":
        offset = tuple(draw(st.integers(0, size)) for size in shape)
        boxes[place] = Box(offset, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True)))
    return shape, draw(st.permutations(boxes))


@given(cases())
@settings(max_examples=500, deadline=None)
def test_exact_cover(case):
    shape, boxes = case
    assert covers(shape, boxes) == counted(shape, boxes)


def test_holes_and_overlaps_that_cancel_in_number():
    # 4 x 4: as many elements as the whole, but (0, 0) twice and (3, 3) never.
    cells = [Box(at, (1, 1)) for at in itertools.product(range(4), repeat=2)]
    boxes = [*cells[:-1], cells[0]]
    assert not covers((4, 4), boxes)
    assert not covers((2, 2), [Box((0, 0), (2, 1)), Box((0, 0), (1, 2))])


def test_a_tensor_of_many_dims():
    shape = (2,) * 14
    corners = [Box(at, (1,) * 14) for at in itertools.product((0, 1), repeat=6) for at in [(*at, *(0,) * 8)]]
    assert not covers(shape, corners)
    halves = [Box((n,) + (0,) * 13, (1,) + (2,) * 13) for n in (0, 1)]
    assert covers(shape, halves)
    assert covers((3,) * 14, [Box((0,) * 14, (3,) * 14)])


def explicit(*per_rank):
    return Explicit(tuple((rank, tuple(Box(*box) for box in boxes)) for rank, boxes in enumerate(per_rank) if boxes))


def joined(shape, *per_rank):
    """What `join_boxes` makes of ranks, each of which knows its own boxes only."""
    said = []
    for rank, boxes in enumerate(per_rank):
        layout = Explicit(((rank, tuple(Box(*box) for box in boxes)),))
        said.append(own_boxes([TensorSpec("layer.w", "float32", shape, layout)], rank))
    (spec,) = join_boxes([TensorSpec("layer.w", "float32", shape, Explicit(()))], said)
    return spec.layout


TOP, BOTTOM = ((0, 0), (2, 3)), ((2, 0), (1, 3))


def test_ranks_that_cover():
    assert joined((3, 3), [TOP], [BOTTOM]) == explicit([TOP], [BOTTOM])
    assert joined((3, 3), [], [TOP], [], [BOTTOM]).ranks() == [1, 3]
    assert joined((3, 3), [TOP, BOTTOM]).boxes((3, 3), 0) == (Box(*TOP), Box(*BOTTOM))
    assert joined((3, 3), [TOP], [((5, 0), (0, 3)), BOTTOM][1:], [((2, 1), (0, 2))]).ranks() == [0, 1]


def test_replicas():
    layout = joined((3, 3), [TOP], [BOTTOM], [TOP], [BOTTOM], [TOP])
    assert layout.holders((3, 3), 2) == (0, 2, 4)
    assert layout.holders((3, 3), 1) == (1, 3)


def test_empty_and_scalar_tensors():
    assert joined((0, 3), [], []) == Explicit(())
    assert joined((), [((), ())], [((), ())]).ranks() == [0, 1]
    with pytest.raises(LayoutError, match="no rank holds 1 of the 1 elements"):
        joined((), [], [])


@pytest.mark.parametrize(
    ("per_rank", "message"),
    [
        (
            [[TOP]],
            r"no rank holds 3 of the 9 elements of a tensor of shape \(3, 3\). 1 rank holds something of it: \[0\]",
        ),
        ([[], []], r"no rank holds 9 of the 9 elements .* 0 ranks"),
        ([[TOP], [], [((1, 0), (2, 3))]], r"rank 0 holds .* and rank 2 holds .*they overlap, but are not the same"),
        ([[((0, 0), (3, 2))], [((2, 1), (1, 2))]], "they overlap, but are not the same"),
        ([[TOP, BOTTOM], [TOP]], "ranks 0 and 1 both hold .* but not the same other boxes"),
        ([[TOP, BOTTOM], [BOTTOM, TOP]], "ranks 0 and 1 both hold .* in the same order"),
        ([[TOP, TOP], [BOTTOM]], "rank 0 holds .* twice"),
    ],
    ids=range(7),
)
def test_ranks_that_do_not_cover(per_rank, message):
    with pytest.raises(LayoutError, match=f"state: layer.w: .*{message}"):
        joined((3, 3), *per_rank)


def test_tensors_with_a_rule_say_nothing_and_stay():
    rule = TensorSpec("a", "float32", (4,), Rule(Mesh((2,), range(2)), ("S(0)",)))
    assert own_boxes([rule], 0) == {}
    assert join_boxes([rule], [{}, {}]) == [rule]
