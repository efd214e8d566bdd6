"""What is left without backwards."""

import pytest

from vescale_pipe._schedule import Kind, validate
from vescale_pipe._schedules import build_schedule, forward_only
from vescale_pipe._schedules.registry import BUILT_IN


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize(("ranks", "count"), [(1, 1), (2, 1), (3, 4), (4, 9)])
def test_the_forwards_stay_in_their_order_and_can_run(oracle, name, ranks, count):
    whole = build_schedule(name, ranks, count)
    part = forward_only(whole)
    assert (part.name, part.placement, part.num_microbatches) == (whole.name, whole.placement, whole.num_microbatches)
    for rank in range(ranks):
        assert part.actions(rank) == tuple(a for a in whole.actions(rank) if a.kind is Kind.F)
        assert part.joined(rank) == ()
    oracle(part)
    validate(part)
