"""Balancing experts: against brute force over all assignments, and the properties that callers rely on."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_dtensor._experts.balance import balance, lower_bound, rank_loads, settle

LOADS = st.lists(st.integers(0, 50), min_size=1, max_size=9)


def best_of_all(loads: list[int], owner: list[int], num_ranks: int) -> int:
    """Least load of the busiest rank over all assignments that keep the number of experts per rank."""
    return min(
        max(rank_loads(loads, [owner[i] for i in where], num_ranks))
        for where in itertools.permutations(range(len(loads)))
    )


@given(LOADS, st.integers(1, 4), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_never_worse_and_never_below_the_bound(loads: list[int], num_ranks: int, rng: object) -> None:
    owner = [i % num_ranks for i in range(len(loads))]
    rng.shuffle(owner)  # type: ignore[attr-defined]
    new = balance(loads, owner, num_ranks)
    before, after = max(rank_loads(loads, owner, num_ranks)), max(rank_loads(loads, new, num_ranks))
    assert lower_bound(loads, num_ranks) <= after <= before
    assert sorted(new) == sorted(owner), "every rank keeps its number of experts"
    assert balance(loads, new, num_ranks) == new, "nothing is left to gain"


def test_close_to_the_best_of_all_assignments() -> None:
    cases = [[9, 8, 1, 1], [7, 7, 7, 1, 1, 1], [5, 4, 3, 3, 2, 1], [100, 1, 1, 1, 1, 1], [6, 5, 4, 3, 2, 1]]
    for loads in cases:
        owner = [i * 2 // len(loads) for i in range(len(loads))]
        got = max(rank_loads(loads, balance(loads, owner, 2), 2))
        assert got == best_of_all(loads, owner, 2), loads
    owner = [0, 0, 1, 1, 2, 2]
    got = max(rank_loads([9, 7, 6, 5, 4, 2], balance([9, 7, 6, 5, 4, 2], owner, 3), 3))
    assert got <= 4 / 3 * best_of_all([9, 7, 6, 5, 4, 2], owner, 3)


def test_the_bound() -> None:
    assert lower_bound([10, 1, 1, 1], 4) == 10, "an expert is not divided"
    assert lower_bound([3, 3, 3, 2], 2) == 6, "an equal share, rounded up"
    assert lower_bound([], 4) == 0
    for loads in ([4, 4, 3, 1], [9, 1, 1, 1]):
        assert lower_bound(loads, 2) <= best_of_all(loads, [0, 0, 1, 1], 2)


def test_good_enough_stays() -> None:
    loads, owner = [11, 10, 10, 9], [0, 0, 1, 1]
    assert balance(loads, owner, 2, tolerance=1.05) == owner
    assert max(rank_loads(loads, balance(loads, owner, 2), 2)) == 20


@given(st.permutations(range(6)), st.permutations([0, 0, 1, 1, 1, 2]))
@settings(max_examples=60, deadline=None)
def test_settling_keeps_those_who_stay(order: list[int], owner: list[int]) -> None:
    positions = [[0, 1], [2, 3, 4], [5]]
    new = settle(order, positions, owner)
    assert sorted(new) == list(range(6))
    for rank, held in enumerate(positions):
        for p in held:
            assert owner[new[p]] == rank
            if owner[order[p]] == rank:
                assert new[p] == order[p]
