"""Plans of one buffer, as properties of random tensors: nothing torn, nothing twice, never far from the best."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_comm._plan import BufferPlan, TensorSpec, exact_shard, lower_bound, plan_group, plan_ragged
from vescale_comm.errors import PlanError


@st.composite
def specs(draw: st.DrawFn, most: int = 12, largest: int = 80) -> list[TensorSpec]:
    sizes = draw(st.lists(st.tuples(st.integers(0, largest), st.integers(1, 24)), max_size=most))
    return [TensorSpec(f"t{index}", (numel,), grain) for index, (numel, grain) in enumerate(sizes)]


def owners(plan: BufferPlan) -> dict[str, list[int]]:
    """Return the owner of each element, after checking that no place and no element is taken twice."""
    found: dict[str, dict[int, int]] = {slot.name: {} for slot in plan.slots}
    for rank in range(plan.world):
        places: set[int] = set()
        for piece in plan.pieces(rank):
            for element in range(piece.start, piece.stop):
                place = piece.offset + element - piece.start
                assert 0 <= place < plan.shard
                assert place not in places
                places.add(place)
                assert element not in found[piece.slot.name]
                found[piece.slot.name][element] = rank
                assert rank * plan.shard + place == piece.slot.offset + element
    return {name: [ranks[element] for element in range(len(ranks))] for name, ranks in found.items()}


@settings(max_examples=120, deadline=None)
@given(specs(), st.integers(1, 9), st.sampled_from([1, 1, 1, 4]))
def test_every_element_has_one_owner_and_no_block_two(specs: list[TensorSpec], world: int, multiple: int) -> None:
    plan = plan_ragged(specs, world, multiple=multiple)
    assert (plan.world, plan.shard % multiple) == (world, 0)
    assert plan.shard >= lower_bound(specs, world, multiple=multiple)
    found = owners(plan)
    assert sorted(found) == sorted(spec.name for spec in specs)
    for spec in specs:
        ranks = found[spec.name]
        assert len(ranks) == spec.numel
        for start in range(0, spec.numel, spec.granularity):
            assert len(set(ranks[start : start + spec.granularity])) == 1


@settings(max_examples=120, deadline=None)
@given(specs(most=5, largest=24), st.integers(1, 4))
def test_small_cases_come_close_to_the_best_that_exists(specs: list[TensorSpec], world: int) -> None:
    best = exact_shard(specs, world)
    assert lower_bound(specs, world) <= best <= plan_ragged(specs, world).shard <= best * 1.5


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 9), st.integers(1, 8))
def test_tensors_without_blocks_keep_their_order_and_pad_only_at_the_end(
    sizes: list[int], world: int, multiple: int
) -> None:
    specs = [TensorSpec(f"t{index}", (numel,)) for index, numel in enumerate(sizes)]
    plan = plan_group(specs, world, multiple=multiple)
    assert [slot.name for slot in plan.slots] == [spec.name for spec in specs]
    assert [slot.offset for slot in plan.slots] == [sum(sizes[:index]) for index in range(len(sizes))]
    assert plan.shard == -(-sum(sizes) // (world * multiple)) * multiple
    ragged = plan_ragged(specs, world, multiple=multiple)
    assert ragged.shard == plan.shard
    assert [slot for slot in ragged.slots if slot.numel] == [slot for slot in plan.slots if slot.numel]
    owners(plan)


def test_whole_matrices_are_spread_over_the_ranks() -> None:
    sizes = [7, 6, 5, 5, 4, 4, 3, 2]
    plan = plan_ragged([TensorSpec(f"m{n}", (size, 10), 10 * size) for n, size in enumerate(sizes)], world=4)
    assert plan.shard == 90  # 36 rows over 4 ranks: 7 + 2, 6 + 3, 5 + 4, 5 + 4
    assert all(len(set(ranks)) == 1 for ranks in owners(plan).values())


def test_small_tensors_fill_the_gaps_that_alignment_leaves() -> None:
    specs = [TensorSpec("norm", (2,)), TensorSpec("w", (5, 6), 6), TensorSpec("v", (7, 4), 4)]
    plan = plan_ragged(specs, world=2)
    assert plan.shard == 30
    assert plan.padding == 0


@pytest.mark.parametrize(
    ("specs", "world", "text"),
    [
        ([TensorSpec("w", (10, 3)), TensorSpec("b", (5,))], 4, "35 elements over 4 ranks"),
        ([TensorSpec("b", (5,)), TensorSpec("w2", (2, 50), 50)], 8, "one block of w2: 50 elements"),
        ([TensorSpec("w", (5, 4), 4)], 4, r"5 blocks over 4 ranks, of up to 4 elements \(w\)"),
        ([TensorSpec("a", (24, 4), 4), TensorSpec("c", (24, 6), 6)], 8, r"multiple of their blocks 4 \(a\), 6 \(c\)"),
        ([], 4, "nothing to place"),
    ],
)
def test_the_reason_names_what_binds(specs: list[TensorSpec], world: int, text: str) -> None:
    assert re.search(text, plan_ragged(specs, world).reason)


def test_a_shard_above_the_bound_says_so() -> None:
    specs = [TensorSpec(f"m{n}", (size,), size) for n, size in enumerate([6, 5, 5, 4, 4, 3])]
    plan = plan_ragged(specs, world=2)
    low = lower_bound(specs, world=2)
    assert (plan.shard == low) != plan.reason.startswith(f"the search; no plan is below {low}: ")


@pytest.mark.parametrize(
    ("specs", "world", "multiple", "text"),
    [
        ([], 0, 1, "world is 0"),
        ([], 2, 0, "multiple is 0"),
        ([TensorSpec("w", (2,)), TensorSpec("w", (3,))], 2, 1, "Two tensors are called w"),
        ([TensorSpec("w", (2,), 0)], 2, 1, "w has shape .2,. and granularity 0"),
        ([TensorSpec("w", (2, -1))], 2, 1, "w has shape .2, -1."),
    ],
)
def test_nonsense_is_refused(specs: list[TensorSpec], world: int, multiple: int, text: str) -> None:
    for plan in (plan_group, plan_ragged):
        with pytest.raises(PlanError, match=text):
            plan(specs, world, multiple=multiple)


def test_a_group_without_regard_for_blocks_refuses_blocks() -> None:
    with pytest.raises(PlanError, match="w has blocks of 4 elements, which plan_group would tear"):
        plan_group([TensorSpec("w", (4, 4), 4)], 2)
