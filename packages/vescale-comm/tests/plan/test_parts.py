"""Groups in several buffers: never worse than the even layout."""

from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_comm._plan import TensorSpec, even_shard, plan_parts, plan_ragged


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(1, 24)), max_size=10),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.1]),
)
def test_shards_together_are_at_most_those_of_the_even_layout(
    sizes: list[tuple[int, int]], world: int, tolerance: float
) -> None:
    specs = [TensorSpec(f"t{index}", (numel,), grain) for index, (numel, grain) in enumerate(sizes)]
    plans = plan_parts(specs, world, tolerance=tolerance)
    assert sorted(slot.name for plan in plans for slot in plan.slots) == sorted(spec.name for spec in specs)
    # Written out once more: blocks per rank, rounded up, for each tensor.
    blocks = [(-(-numel // min(grain, numel)), min(grain, numel)) for numel, grain in sizes if numel]
    even = sum(-(-count // world) * grain for count, grain in blocks)
    assert even == even_shard(specs, world)
    assert sum(plan.shard for plan in plans) <= even * (1 + tolerance)


def test_one_buffer_is_kept_where_it_is_as_small() -> None:
    specs = [TensorSpec("q", (16, 4), 8), TensorSpec("v", (4, 16), 16), TensorSpec("norm", (32,))]
    (plan,) = plan_parts(specs, 2)
    assert plan == plan_ragged(specs, 2)


def test_unlike_blocks_are_parted_where_one_buffer_pads() -> None:
    # Llama-3-8B at 64 ranks and 32 rows: 19 blocks of w1 and its like per rank, 2 of w2, no common multiple below 28.
    names = {"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096)}
    names |= {"w1": (14336, 4096), "w3": (14336, 4096), "w2": (4096, 14336)}
    specs = [TensorSpec(name, shape, 32 * shape[1]) for name, shape in names.items()]
    assert plan_ragged(specs, 64).shard == 28 * 131072
    plans = plan_parts(specs, 64)
    assert sorted(plan.shard for plan in plans) == [2 * 458752, 19 * 131072]
    assert sum(plan.numel for plan in plans) == sum(spec.numel for spec in specs)
    (plan,) = plan_parts(specs, 64, tolerance=0.08)
    assert plan.shard == 28 * 131072


def test_no_tensors_are_one_empty_buffer() -> None:
    for specs in ([], [TensorSpec("empty", (0, 4))]):
        (plan,) = plan_parts(specs, 4)
        assert plan.numel == 0
        assert [slot.name for slot in plan.slots] == [spec.name for spec in specs]
