"""Buckets: contiguous runs, their limits, and their alignment."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_comm._plan import TensorSpec, plan_buckets
from vescale_comm.errors import PlanError


def names(specs: list[TensorSpec], **kwargs: int) -> list[list[str]]:
    return [[slot.name for slot in plan.slots] for plan in plan_buckets(specs, 2, **kwargs)]  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 300), max_size=20),
    st.integers(1, 5),
    st.integers(4, 2000),
    st.sampled_from([1, 2, 4, 8]),
    st.one_of(st.none(), st.integers(1, 500)),
)
def test_buckets_are_the_sequence_cut_into_runs_below_the_limit(
    sizes: list[int], world: int, limit: int, itemsize: int, first: int | None
) -> None:
    specs = [TensorSpec(f"t{index}", (numel,)) for index, numel in enumerate(sizes)]
    plans = plan_buckets(specs, world, bucket_bytes=limit, itemsize=itemsize, first_bytes=first)
    assert [slot.name for plan in plans for slot in plan.slots] == [spec.name for spec in specs]
    for index, plan in enumerate(plans):
        assert plan.shard * itemsize % 64 == 0
        assert plan.numel - plan.used < 64 // itemsize * world
        filled = [slot.numel for slot in plan.slots if slot.numel]
        most = (first or limit) if index == 0 else limit
        if index == len(plans) - 1:
            most += limit / 8
        assert len(filled) <= 1 or plan.used * itemsize <= max(most, filled[0] * itemsize + limit / 8)


def test_a_bucket_ends_before_the_tensor_that_is_too_much() -> None:
    specs = [TensorSpec(name, (numel,)) for name, numel in zip("abcdef", (60, 40, 10, 500, 90, 10), strict=True)]
    assert names(specs, bucket_bytes=400, itemsize=4) == [["a", "b"], ["c"], ["d"], ["e", "f"]]
    assert names(specs, bucket_bytes=400, itemsize=4, first_bytes=250) == [["a"], ["b", "c"], ["d"], ["e", "f"]]
    assert names(specs, bucket_bytes=4000, itemsize=4) == [["a", "b", "c", "d", "e", "f"]]


def test_a_dribble_at_the_end_joins_the_bucket_before_it() -> None:
    specs = [TensorSpec("a", (100,)), TensorSpec("b", (12,))]
    assert names(specs, bucket_bytes=400, itemsize=4) == [["a", "b"]]
    assert names([specs[0], TensorSpec("b", (13,))], bucket_bytes=400, itemsize=4) == [["a"], ["b"]]


def test_buckets_keep_blocks_where_there_are_some() -> None:
    specs = [TensorSpec("a", (8, 32), 64), TensorSpec("b", (3,)), TensorSpec("c", (40,))]
    plans = plan_buckets(specs, 3, bucket_bytes=300 * 4, itemsize=4)
    assert [sorted(slot.name for slot in plan.slots) for plan in plans] == [["a", "b", "c"]]
    assert {slot.name: slot.granularity for slot in plans[0].slots} == {"a": 64, "b": 1, "c": 1}
    assert plans[0].shard % 16 == 0


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"bucket_bytes": 0, "itemsize": 4}, "bucket_bytes is 0"),
        ({"bucket_bytes": 8, "itemsize": 0}, "itemsize is 0"),
        ({"bucket_bytes": 8, "itemsize": 4, "first_bytes": 0}, "first_bytes is 0"),
    ],
)
def test_nonsense_is_refused(kwargs: dict[str, int], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        plan_buckets([TensorSpec("a", (4,))], 2, **kwargs)  # type: ignore[arg-type]


def test_no_tensors_are_no_buckets() -> None:
    assert plan_buckets([], 2, bucket_bytes=8, itemsize=4) == ()
