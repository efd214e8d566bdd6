"""Bounds against exhaustive search over all places, which knows neither orders nor bounds."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_comm._plan import TensorSpec, exact_shard, lower_bound
from vescale_comm.errors import PlanError

Sizes = list[tuple[int, int]]


def best_of_all_places(sizes: Sizes, world: int) -> int:
    """Try every offset of every tensor for every shard."""

    def allowed(offsets: tuple[int, ...], shard: int) -> bool:
        taken: set[int] = set()
        for offset, (numel, grain) in zip(offsets, sizes, strict=True):
            places = range(offset, offset + numel)
            if taken.intersection(places):
                return False
            taken.update(places)
            for start in range(0, numel, grain):
                block = places[start : start + grain]
                if block[0] // shard != block[-1] // shard:
                    return False
        return True

    shard = 1
    while True:
        ranges = [range(max(0, world * shard - numel + 1)) for numel, _ in sizes]
        if any(allowed(offsets, shard) for offsets in product(*ranges)):
            return shard
        shard += 1


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=3).filter(
        lambda sizes: sum(numel for numel, _ in sizes) <= 14
    ),
    st.integers(1, 4),
)
def test_the_exact_shard_is_that_of_all_places_and_the_bound_is_below(sizes: Sizes, world: int) -> None:
    specs = [TensorSpec(f"t{index}", (numel,), grain) for index, (numel, grain) in enumerate(sizes)]
    exact = exact_shard(specs, world)
    assert exact == best_of_all_places(sizes, world)
    assert lower_bound(specs, world) <= exact


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=5),
    st.integers(1, 5),
    st.integers(2, 6),
)
def test_multiples_are_kept_and_cost_no_less(sizes: Sizes, world: int, multiple: int) -> None:
    specs = [TensorSpec(f"t{index}", (numel,), grain) for index, (numel, grain) in enumerate(sizes)]
    exact, low = exact_shard(specs, world, multiple=multiple), lower_bound(specs, world, multiple=multiple)
    assert exact % multiple == low % multiple == 0
    assert low <= exact
    assert exact >= exact_shard(specs, world)
    assert low >= lower_bound(specs, world)


@pytest.mark.parametrize(
    ("sizes", "world", "bound"),
    [
        ([(10, 1), (5, 1)], 4, 4),  # 15 elements over 4
        ([(3, 3), (20, 20)], 8, 20),  # the largest block
        ([(12, 4)], 2, 8),  # 3 blocks of 4 on 2 ranks
        ([(6, 6), (5, 5), (5, 5)], 2, 10),  # of three blocks two share a rank: at best the two smallest
        ([(40, 4), (60, 6)], 8, 24),  # 60 is longer than two shards of 13 and of 20: a multiple of 6; so is 40 up to 19
        ([(25, 8)], 4, 8),  # the last block is smaller
        ([], 3, 0),
    ],
)
def test_bounds_on_paper(sizes: Sizes, world: int, bound: int) -> None:
    specs = [TensorSpec(f"t{index}", (numel,), grain) for index, (numel, grain) in enumerate(sizes)]
    assert lower_bound(specs, world) == bound


def test_a_tensor_that_is_no_longer_cut_twice_is_free_again() -> None:
    # 13 is no multiple of 6; 14 would be none either, but from 15 on, 30 is no longer longer than two shards.
    specs = [TensorSpec("a", (30,), 6), TensorSpec("b", (22,))]
    assert lower_bound(specs, 4) == 15
    assert exact_shard(specs, 4) >= 15


def test_too_many_tensors_for_all_orders_are_refused() -> None:
    with pytest.raises(PlanError, match="9 tensors are too many, give at most 8"):
        exact_shard([TensorSpec(f"t{index}", (1,)) for index in range(9)], 2)
