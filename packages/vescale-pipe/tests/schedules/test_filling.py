"""Filling all ranks at once gives what list scheduling, one action at a time, gives."""

import pytest
import torch

from vescale_pipe._schedule import Kind
from vescale_pipe._schedules._columns import vee
from vescale_pipe._schedules._filling import fill
from vescale_pipe._schedules._listing import Policy, Task, list_schedule
from vescale_pipe._schedules.building_blocks import v_half, v_min
from vescale_pipe._schedules.registry import build_schedule


def listed(ranks, count, order_of, cap):
    """The oracle: actions of one unit, messages of none, orders as given."""
    ones, zeros = (1.0,) * (2 * ranks), (0.0,) * (2 * ranks)
    task = Task(vee(ranks), count, (ones, ones, ones, ones), zeros, ones, ones)
    return list_schedule(
        "x", task, Policy([float(cap)] * ranks, patience=1.0, orders=[order_of(r) for r in range(ranks)])
    )


def without_weights(schedule):
    return lambda rank: [tuple(action) for action in schedule.actions(rank) if action.kind is not Kind.W]


def starts_of(schedule):
    """Ranks of the actions in their orders, in the form that `fill` takes."""
    rows = []
    for rank in range(schedule.num_ranks):
        place = {tuple(action): n for n, action in enumerate(schedule.actions(rank))}
        first, second = rank, 2 * schedule.num_ranks - 1 - rank
        legs = ((Kind.F, first), (Kind.F, second), (Kind.I, second), (Kind.I, first))
        rows.append([place[(kind, stage, m)] for m in range(schedule.num_microbatches) for kind, stage in legs])
    return torch.tensor(rows)


@pytest.mark.parametrize("ranks", range(1, 14))
@pytest.mark.parametrize("build", [v_half, v_min])
def test_blocks_are_filled_as_list_scheduling_does(build, ranks):
    cap = 2 * (ranks // 2) + 2 if build is v_half else 2 * ((ranks + 1) // 3) + 2
    for count in (1, 2, ranks, 3 * ranks + 1):
        found = build(ranks, count)
        assert found == listed(ranks, count, without_weights(found), cap)


@pytest.mark.parametrize(("ranks", "count"), [(1, 3), (2, 5), (3, 2), (4, 11)])
def test_other_orders_and_other_memory(ranks, count):
    given = build_schedule("zb_v", ranks, count)
    for cap in range(1, 2 * ranks + 3):
        want = listed(ranks, count, without_weights(given), cap)
        found = fill(starts_of(given), cap)
        if want is None:
            assert found is None, cap
            continue
        assert found is not None, cap
        for mine, theirs in zip(found, want.columns, strict=True):
            for name in ("kind", "stage", "microbatch", "joined"):
                assert torch.equal(getattr(mine, name), getattr(theirs, name)), (cap, name)
