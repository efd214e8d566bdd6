"""The plan of one buffer: what it refuses, and which elements stand where."""

import pytest

from vescale_comm._plan import BufferPlan, Slot
from vescale_comm.errors import PlanError


def test_pieces_cover_a_tensor_over_several_ranks_and_leave_gaps_out() -> None:
    plan = BufferPlan((Slot("a", (2, 5), 1), Slot("b", (2,), 12)), world=3, shard=5)
    found = [[(p.slot.name, p.start, p.stop, p.offset) for p in plan.pieces(rank)] for rank in range(3)]
    assert found == [[("a", 0, 4, 1)], [("a", 4, 9, 0)], [("a", 9, 10, 0), ("b", 0, 2, 2)]]
    assert (plan.numel, plan.used, plan.padding) == (15, 12, 0.2)


@pytest.mark.parametrize(
    ("slots", "text"),
    [
        ((Slot("a", (4,), 0), Slot("b", (2,), 3)), r"b begins at element 3, but the tensor before it ends at 4"),
        ((Slot("a", (4,), 5),), r"end at 9, but 2 shards of 4 are 8"),
        ((Slot("a", (6,), 0, 3),), r"cut before rank 1, at element 4, tears a block of 3 elements of a"),
    ],
)
def test_what_is_no_plan_is_refused(slots: tuple[Slot, ...], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        BufferPlan(slots, world=2, shard=4)


def test_a_block_that_ends_at_the_cut_and_a_short_last_block_are_fine() -> None:
    BufferPlan((Slot("a", (6,), 1, 3), Slot("b", (1,), 7, 4)), world=2, shard=4)


def test_a_buffer_without_elements_has_no_pieces() -> None:
    plan = BufferPlan((Slot("a", (0, 3), 0, 5),), world=2, shard=0)
    assert [plan.pieces(rank) for rank in range(2)] == [(), ()]
    assert plan.padding == 0


def test_fingerprints_tell_every_difference_of_places() -> None:
    base = BufferPlan((Slot("a", (4,), 0),), world=2, shard=4)
    same = BufferPlan((Slot("a", (4,), 0),), world=2, shard=4, reason="of another text")
    others = [
        BufferPlan((Slot("b", (4,), 0),), world=2, shard=4),
        BufferPlan((Slot("a", (2, 2), 0),), world=2, shard=4),
        BufferPlan((Slot("a", (4,), 1),), world=2, shard=4),
        BufferPlan((Slot("a", (4,), 0, 2),), world=2, shard=4),
        BufferPlan((Slot("a", (4,), 0),), world=4, shard=2),
        BufferPlan((Slot("a", (4,), 0),), world=2, shard=6),
    ]
    assert base.fingerprint == same.fingerprint
    assert len({base.fingerprint, *(other.fingerprint for other in others)}) == 7
