"""The linear partition against brute force."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_pipe._split.balance import partition

numbers = st.lists(st.integers(0, 20), min_size=1, max_size=8)


@settings(max_examples=200, deadline=None)
@given(costs=numbers, parts=st.integers(1, 8), borders=st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_as_good_as_any(costs: list[int], parts: int, borders: list[int]) -> None:
    parts = min(parts, len(costs))

    def price(starts: tuple[int, ...]) -> tuple[int, int, int]:
        ends = (*starts[1:], len(costs))
        sums = [sum(costs[start:end]) for start, end in zip(starts, ends, strict=True)]
        return max(sums), sum(borders[start] for start in starts[1:]), sum(one * one for one in sums)

    every = [(0, *rest) for rest in itertools.combinations(range(1, len(costs)), parts - 1)]
    found = tuple(partition(costs, parts, borders))
    assert found in every
    assert price(found) == min(map(price, every))


def test_floats_that_do_not_add_up() -> None:
    assert partition([0.1] * 9, 3) == [0, 3, 6]
