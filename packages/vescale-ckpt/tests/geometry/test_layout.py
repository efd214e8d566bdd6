"""Rules against torch's own arithmetic of shards, and against lists of elements."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from vescale_ckpt._geometry import Box, Explicit, Mesh, Rule
from vescale_ckpt.errors import LayoutError

meshes = st.sampled_from([(1,), (2,), (3,), (2, 2), (2, 3), (2, 2, 2)])


@st.composite
def rules(draw, kinds=("R", "S", "SS", "RS")):
    sizes = draw(meshes)
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    placements, ragged = [], None
    for size in sizes:
        kind = draw(st.sampled_from(kinds))
        if kind == "RS" and ragged is None:
            ragged = draw(st.integers(1, len(shape)))
            units = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
            placements.append(f"RS({ragged},{','.join(map(str, units))})")
            continue
        dims = range(ragged or 0, len(shape))
        if kind in ("R", "RS") or not dims:
            placements.append("R")
        else:
            dim = draw(st.sampled_from(dims))
            placements.append(f"S({dim})" if kind == "S" else f"SS({dim},{draw(st.integers(1, 3))})")
    rule = Rule(Mesh(sizes, range(math.prod(sizes))), tuple(placements))
    return rule, shape


def fits(rule, shape):
    """Tell whether ragged units divide the rows that they cut, so that the rule means something."""
    for text in rule.placements:
        if text.startswith("RS"):
            leading, *units = map(int, text[3:-1].split(","))
            if not sum(units) or math.prod(shape[:leading]) % sum(units):
                return False
    try:
        return all(isinstance(rule.boxes(shape, rank), tuple) for rank in rule.mesh.ranks)
    except LayoutError:  # a dim that the ragged axis flattens was cut before, unevenly
        return False


@settings(max_examples=300)
@given(rules())
def test_distinct_shards_cover_the_tensor_once(case):
    rule, shape = case
    if not fits(rule, shape):
        return
    seen = torch.zeros(shape, dtype=torch.int64)
    for rank in rule.mesh.ranks:
        if rule.holders(shape, rank)[0] == rank:
            for box in rule.boxes(shape, rank):
                seen[box.slices(Box.whole(shape))] += 1
    assert bool((seen == 1).all())


@settings(max_examples=300)
@given(rules())
def test_holders_hold_the_same_and_nobody_else_does(case):
    rule, shape = case
    if not fits(rule, shape):
        return
    for rank in rule.mesh.ranks:
        boxes = rule.boxes(shape, rank)
        same = [other for other in rule.mesh.ranks if rule.boxes(shape, other) == boxes]
        if boxes:
            assert list(rule.holders(shape, rank)) == same
        assert rank in rule.holders(shape, rank)


@settings(max_examples=300)
@given(rules(), st.data())
def test_overlapping_finds_all_and_only_those_that_meet_a_box(case, data):
    rule, shape = case
    if not fits(rule, shape):
        return
    offset = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    box = Box(offset, tuple(data.draw(st.integers(1, s - o)) for s, o in zip(shape, offset, strict=True)))
    want = {
        rule.holders(shape, rank)
        for rank in rule.mesh.ranks
        if any(mine.intersect(box) for mine in rule.boxes(shape, rank))
    }
    found = rule.overlapping(shape, box)
    assert set(found) == want
    assert len(found) == len(want)


@settings(max_examples=200)
@given(rules(kinds=("R", "S")))
def test_shards_are_torchs(case):
    rule, shape = case
    sizes = rule.mesh.shape
    placements = [Replicate() if text == "R" else Shard(int(text[2:-1])) for text in rule.placements]
    for coordinate in itertools.product(*map(range, sizes)):
        local, offset = _compute_local_shape_and_global_offset(shape, sizes, list(coordinate), placements)
        boxes = rule.boxes(shape, rule.mesh.rank(coordinate))
        if 0 in local:
            assert boxes == ()
        else:
            assert boxes == (Box(tuple(offset), tuple(local)),)


@settings(max_examples=200)
@given(rules())
def test_windows_place_the_boxes_in_the_local_tensor(case):
    rule, shape = case
    if not fits(rule, shape):
        return
    for rank in rule.mesh.ranks:
        boxes, windows = rule.boxes(shape, rank), rule.windows(shape, rank)
        if windows is None:
            assert any(text.startswith("RS") for text in rule.placements)
            continue
        for box, window in zip(boxes, windows, strict=True):
            assert box.shape == tuple(stop - start for start, stop in window)


def test_ragged_storage_is_in_the_order_of_a_sharded_tensor():
    # 6 rows of 4; the second axis takes columns first, then rows are cut 1 : 2.
    rule = Rule(Mesh((2, 2), range(4)), ("S(1)", "RS(1,1,2)"))
    assert rule.boxes((6, 4), 1) == (Box((2, 0), (4, 2)),)
    assert rule.boxes((6, 4), 2) == (Box((0, 2), (2, 2)),)


def test_ten_thousand_ranks_are_not_listed():
    rule = Rule(Mesh((8, 10, 128), range(10240)), ("R", "S(1)", "S(0)"))
    found = rule.overlapping((4096, 4000), Box((32, 400), (32, 400)))
    assert found == [tuple(i * 1280 + 128 + 1 for i in range(8))]
    assert isinstance(rule.mesh.ranks, range)


def test_a_rank_outside_of_the_mesh_holds_nothing():
    rule = Rule(Mesh((2,), (4, 6)), ("S(0)",))
    assert rule.boxes((4,), 5) == ()
    assert rule.holders((4,), 5) == ()
    assert rule.boxes((4,), 6) == (Box((2,), (2,)),)


def test_scalars_and_empty_tensors():
    rule = Rule(Mesh((2,), range(2)), ("R",))
    assert rule.boxes((), 1) == (Box((), ()),)
    assert rule.overlapping((), Box((), ())) == [(0, 1)]
    assert Rule(Mesh((2,), range(2)), ("S(0)",)).boxes((0, 3), 0) == ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mesh((2, 2), range(3)), "hold 4 ranks, but got 3"),
        (lambda: Mesh((2,), (1, 1)), "stands twice"),
        (lambda: Rule(Mesh((2,), range(2)), ("R", "R")), "needs one for each"),
        (lambda: Rule(Mesh((2,), range(2)), ("X",)), "is none of"),
        (lambda: Rule(Mesh((2,), range(2)), ("S(2)",)).check((4, 4)), "no dim 2"),
        (lambda: Rule(Mesh((2,), range(2)), ("RS(1,1)",)).check((4, 4)), "1 units for an axis of 2"),
        (lambda: Rule(Mesh((2,), range(2)), ("RS(3,1,1)",)).check((4, 4)), "cannot flatten 3"),
        (lambda: Rule(Mesh((2, 1), range(2)), ("RS(1,1,1)", "S(0)")).check((4, 4)), "was flattened"),
        (lambda: Explicit(((0, (Box((3,), (2,)),)),)).check((4,)), "does not lie in"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(LayoutError, match=message):
        make()


def test_explicit_boxes():
    top, bottom = Box((0, 0), (1, 4)), Box((1, 0), (2, 4))
    layout = Explicit(((0, (top,)), (1, (bottom,)), (2, (top,)), (3, ())))
    assert layout.holders((3, 4), 2) == (0, 2)
    assert layout.overlapping((3, 4), Box((0, 3), (2, 1))) == [(0, 2), (1,)]
    assert layout.boxes((3, 4), 3) == ()
    assert layout.boxes((3, 4), 9) == ()
