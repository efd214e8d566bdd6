"""The search over a whole model: never worse than the even layout, at most a tenth of padding, and plans that hold."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_comm._plan import (
    Block,
    Knobs,
    ModelPlan,
    Rows,
    Rule,
    Storage,
    Unit,
    Whole,
    model_units,
    plan_model,
    plan_ragged,
)
from vescale_comm._plan.buffer import TensorSpec
from vescale_comm.errors import PlanError


def is_complete(plan: ModelPlan, units: tuple[Unit, ...]) -> bool:
    """Whether the groups are the units in order, and the buffers hold each parameter once, whole."""
    assert [name for group in plan.groups for name in group.units] == [unit.name for unit in units]
    sizes = {name: shape for unit in units for name, shape in unit.tensors}
    held = [slot for group in plan.groups for buffer in group.buffers for slot in buffer.slots]
    assert len(held) == len(sizes)
    for slot in held:
        turned = plan.storage.get(slot.name) is Storage.TRANSPOSED
        shape = sizes[slot.name]
        assert slot.shape == ((*shape[:-2], shape[-1], shape[-2]) if turned else shape)
    at = {name: index for index, unit in enumerate(units) for name, _ in unit.tensors}
    for group in plan.groups:
        inside = {at[slot.name] for buffer in group.buffers for slot in buffer.slots}
        assert inside == {index for index, unit in enumerate(units) if unit.name in group.units}
    return True


@pytest.mark.parametrize("block", [Block(32, 32), Block(128, 128)])
@pytest.mark.parametrize("world", [8, 96, 1000, 1024])
@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3-70b", "qwen3-30b-a3b"])
def test_padding_is_at_most_a_tenth_and_never_above_the_even_layout(name: str, world: int, block: Block) -> None:
    units = model_units(name)
    plan = plan_model(units, world, blocks=block)
    assert is_complete(plan, units)
    assert plan.bound <= plan.padding <= min(0.1, plan.even)
    assert plan.replicas == 1
    tensors = sum(unit.numel for unit in units)
    assert plan.used == tensors
    assert plan.padding == pytest.approx(sum(group.numel for group in plan.groups) / tensors - 1)
    assert plan.largest <= max(tensors / 4, max(unit.numel for unit in units)) * 1.5


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=4), min_size=1, max_size=5
    ),
    st.integers(1, 16),
    st.sampled_from([Block(2, 2), Block(4, 3), Rows(1), Rows(3), Whole(), 1]),
)
def test_random_models_pad_no_more_than_the_even_layout(
    shapes: list[list[tuple[int, int]]], world: int, rule: Rule
) -> None:
    units = tuple(
        Unit(f"u{u}", tuple((f"u{u}.t{t}", shape) for t, shape in enumerate(unit))) for u, unit in enumerate(shapes)
    )
    plan = plan_model(units, world, blocks=rule)
    assert is_complete(plan, units)
    assert plan.bound <= plan.padding <= plan.even + 1e-12
    assert plan.padding >= 0


def test_larger_groups_are_chosen_only_where_they_are_needed() -> None:
    # A layer of 10 rows; at 4 ranks with whole rows 3 each: 20 % padding. Two layers are 5 each: none.
    units = tuple(Unit(f"u{u}", ((f"u{u}.w", (10, 7)),)) for u in range(8))
    small = plan_model(units, 4, blocks=Rows(1), knobs=Knobs(target=0.2))
    assert [len(group.units) for group in small.groups] == [1] * 8
    assert small.padding == pytest.approx(0.2)
    larger = plan_model(units, 4, blocks=Rows(1), knobs=Knobs(target=0.1))
    assert [len(group.units) for group in larger.groups] == [2] * 4
    assert larger.padding == 0
    kept = plan_model(units, 4, blocks=Rows(1), knobs=Knobs(target=0.1, group_share=0.2))
    assert kept.padding == pytest.approx(0.2)


def test_tensors_are_transposed_before_they_are_tiled() -> None:
    # Llama's down projection has bands of 14336 columns, the others of 4096; transposed they are alike.
    plan = plan_model("llama-3-8b", 1024, blocks=Block(32, 32), knobs=Knobs(group_share=0.15))
    assert set(plan.storage.values()) == {Storage.TRANSPOSED}
    assert {name.rpartition("mlp.")[2] for name in plan.storage} <= {"down_proj.weight"}
    tight = plan_model("llama-3-8b", 1024, blocks=Block(128, 128), knobs=Knobs(group_share=0.0))
    assert Storage.TILES in tight.storage.values()
    assert tight.padding <= 0.1
    fixed = plan_model("llama-3-8b", 1024, blocks=Block(128, 128), knobs=Knobs(group_share=0.0, storage=()))
    assert not fixed.storage
    assert fixed.padding > 1


def test_copies_of_shards_are_the_last_resort_and_cost_memory() -> None:
    # One block per group for 8 ranks: 7 idle; a shard group of 2 halves each.
    units = tuple(Unit(f"u{u}", ((f"u{u}.w", (2, 5)),)) for u in range(3))
    alone = plan_model(units, 8, blocks=Rows(1), knobs=Knobs(group_share=0.0))
    assert (alone.replicas, alone.padding) == (1, 3.0)
    copies = plan_model(units, 8, blocks=Rows(1), knobs=Knobs(group_share=0.0, max_replicas=4))
    assert (copies.shard_world, copies.replicas, copies.padding, copies.memory) == (2, 4, 0.0, 4.0)
    few = plan_model(units, 8, blocks=Rows(1), knobs=Knobs(group_share=0.0, max_replicas=2))
    assert (few.shard_world, few.padding) == (4, 1.0)


def test_fewer_buffers_may_cost_padding_above_the_even_layout() -> None:
    strict = plan_model("llama-3-8b", 8, blocks=Rows(1))
    assert strict.even == strict.padding == 0.0
    assert strict.buffers > len(strict.groups)
    loose = plan_model("llama-3-8b", 8, blocks=Rows(1), knobs=Knobs(over_even=0.001))
    assert loose.buffers == len(loose.groups)
    assert 0 < loose.padding <= 0.001


def test_one_unit_is_planned_as_by_itself() -> None:
    unit = Unit("u", (("u.w", (6, 4)), ("u.b", (8,))))
    plan = plan_model([unit], 2, blocks={r".*\.w": Rows(2)})
    assert plan.groups[0].buffers == (plan_ragged([TensorSpec("u.w", (6, 4), 8), TensorSpec("u.b", (8,), 1)], 2),)


def test_whole_matrices_of_a_stack_may_be_on_different_ranks() -> None:
    plan = plan_model([Unit("u", (("u.experts", (8, 3, 5)),))], 8, blocks=Whole())
    assert plan.padding == 0
    pieces = [plan.groups[0].buffers[0].pieces(rank) for rank in range(8)]
    assert [(p.start, p.stop) for found in pieces for p in found] == list(pairwise(range(0, 121, 15)))


def test_the_text_tells_groups_padding_and_what_binds() -> None:
    plan = plan_model("llama-3-8b", 1024, blocks=Rows(128), knobs=Knobs(group_share=0.0))
    text = plan.explain()
    assert f"padding {plan.padding:.2%}" in text
    assert "18 groups of 1 to 2 units" in text
    assert "layers.0 to layers.1: 436224000 elements" in text
    assert "one block of layers.0.mlp.down_proj.weight: 1835008 elements" in text
    assert plan.reason.startswith("shards of ")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: plan_model("llama-3-8b", 0), "world is 0"),
        (lambda: plan_model([], 4), "no elements"),
        (lambda: plan_model([Unit("a", (("w", (1,)),)), Unit("b", (("w", (1,)),))], 4), "Two parameters are called w"),
        (lambda: plan_model("llama-3-8b", 4, blocks={"w1": Rows(2)}), "'w1' matches no parameter"),
        (lambda: Knobs(target=-1), "target is -1"),
        (lambda: Knobs(over_even=-0.1), "over_even is -0.1"),
        (lambda: Knobs(target=float("nan")), "target is nan"),
        (lambda: Knobs(group_share=2), "group_share is 2"),
        (lambda: Knobs(max_replicas=0), "max_replicas is 0"),
        (lambda: Knobs(multiple=0), "multiple 0"),
    ],
)
def test_nonsense_is_refused(call: object, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        call()  # type: ignore[operator]
