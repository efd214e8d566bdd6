"""Who sends what to whom, against element-by-element sets."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_ckpt._geometry import Box, Explicit, Mesh, Rule
from vescale_ckpt._reshard.routes import incoming, outgoing


def elements(box):
    return list(itertools.product(*(range(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))))


def check(shape, old, new, world, turn=0):
    """Every element that a rank wants comes from one rank that has it; both ends agree, in the same order."""
    into = {rank: incoming(shape, old, new, rank, turn) for rank in range(world)}
    out = {rank: outgoing(shape, old, new, rank, turn) for rank in range(world)}
    for rank, routes in into.items():
        wants = Counter(e for box in new.boxes(shape, rank) for e in elements(box))
        assert Counter(e for route in routes for e in elements(route.block)) == wants
        for route in routes:
            assert route.target == rank
            have = elements(old.boxes(shape, route.source)[route.held])
            assert set(elements(route.block)) <= set(have)
            assert set(elements(route.block)) <= set(elements(new.boxes(shape, rank)[route.wanted]))
            owns = {e for box in old.boxes(shape, rank) for e in elements(box)}
            assert (route.source == rank) == (set(elements(route.block)) <= owns)
    for one, other in itertools.product(range(world), repeat=2):
        if one != other:
            assert [r for r in out[one] if r.target == other] == [r for r in into[other] if r.source == one]
    return out


PLACEMENTS = ["R", "S(0)", "S(1)", "SS(0,2)", "SS(1,3)", "IS(1,2)"]


@st.composite
def rules(draw, world, shape):
    members = draw(st.permutations(range(world)))
    sizes = draw(st.sampled_from([(1,), (2,), (3,), (4,), (6,), (2, 2), (2, 3), (3, 2), (6, 1)]))
    count = sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
    if draw(st.booleans()) and len(sizes) == 1:
        units = draw(st.lists(st.sampled_from([0, 1, 2]), min_size=count, max_size=count))
        if sum(units) and shape[0] % sum(units) == 0:
            return Rule(Mesh(sizes, tuple(members[:count])), (f"RS(1,{','.join(map(str, units))})",))
    names = [draw(st.sampled_from(PLACEMENTS[:5] if len(sizes) > 1 else PLACEMENTS)) for _ in sizes]
    return Rule(Mesh(sizes, tuple(members[:count])), tuple(names))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_element_has_one_source_and_both_ends_agree(data):
    shape = data.draw(st.sampled_from([(6, 4), (5, 2), (1, 8), (12, 2), (0, 4), (7, 6)]))
    old, new = data.draw(rules(6, shape)), data.draw(rules(6, shape))
    check(shape, old, new, 6, data.draw(st.integers(0, 7)))


def test_listed_boxes_to_rules_and_back():
    box = Box((1, 0), (2, 3))
    listed = Explicit(((0, (Box((0, 0), (1, 3)),)), (1, (box,)), (3, (box,)), (2, (Box((3, 0), (1, 3)),))))
    rows = Rule(Mesh((4,), range(4)), ("S(1)",))
    check((4, 3), listed, rows, 4)
    check((4, 3), rows, listed, 4)
    check((4, 3), listed, listed, 4)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
def test_a_single_element_is_sent_once_to_each_who_lacks_it(shape):
    one, all_ = Rule(Mesh((1,), (2,)), ("R",)), Rule(Mesh((4,), range(4)), ("R",))
    out = check(shape, one, all_, 4)
    assert [route.target for route in out[2]] == [0, 1, 3]
    assert not any(check(shape, all_, one, 4).values())


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("members", [(0, 1), (0, 2), (1, 3), (5, 4)])
def test_holders_share_the_sending(members, turn):
    both, all_ = Rule(Mesh((2,), members), ("R",)), Mesh((6,), range(6))
    for placement in ("R", "S(0)"):
        out = check((12,), both, Rule(all_, (placement,)), 6, turn)
        assert [len(out[rank]) for rank in range(6)] == [2 if rank in members else 0 for rank in range(6)]


def test_tensors_take_turns_where_only_one_rank_lacks_them():
    both, one = Rule(Mesh((2,), (0, 1)), ("R",)), Rule(Mesh((1,), (2,)), ("R",))
    sends = Counter(rank for turn in range(10) for rank in (0, 1) for _ in outgoing((4,), both, one, rank, turn))
    assert sends == {0: 5, 1: 5}


def test_ten_thousand_ranks_look_at_their_neighbours_only():
    rows = Rule(Mesh((10_000,), range(10_000)), ("S(0)",))
    pairs = Rule(Mesh((5_000, 2), range(10_000)), ("S(0)", "R"))
    assert [route.source for route in incoming((20_000,), rows, pairs, 7_001)] == [7_000, 7_001]
    assert [route.target for route in outgoing((20_000,), rows, pairs, 7_001)] == [7_000]
    whole = Rule(Mesh((10_000,), range(10_000)), ("R",))
    assert outgoing((20_000,), whole, pairs, 7_001) == []
    assert [route.source for route in incoming((20_000,), whole, pairs, 7_001)] == [7_001]
