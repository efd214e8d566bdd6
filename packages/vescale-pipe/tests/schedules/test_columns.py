"""The two ways to write actions without objects."""

import pytest
import torch

from vescale_pipe._schedule import Action, Kind
from vescale_pipe._schedules._columns import Row, Slots, first_microbatches, interleave, loop, vee
from vescale_pipe._schedules.dualpipe_v import dualpipe_v


def by_hand(rank, ranks, forward, backward, ahead, delay):
    """Write one rank as a loop that appends."""
    row, done, waiting = [], 0, []

    def stage(chunk):
        return chunk * ranks + rank

    for slot, (chunk, m) in enumerate(backward):
        while done < min(len(forward), ahead + slot):
            row.append(Action(Kind.F, stage(forward[done][0]), forward[done][1]))
            done += 1
        if delay is None:
            row.append(Action(Kind.B, stage(chunk), m))
            continue
        row.append(Action(Kind.I, stage(chunk), m))
        waiting.append(Action(Kind.W, stage(chunk), m))
        if len(waiting) > delay:
            row.append(waiting.pop(0))
    return tuple(row + waiting)


@pytest.mark.parametrize("delay", [None, 0, 1, 3, 20])
@pytest.mark.parametrize("ahead", [1, 2, 5, 20])
@pytest.mark.parametrize("chunks", [1, 2])
def test_the_arithmetic_is_that_of_a_loop_that_appends(delay, ahead, chunks):
    ranks, count = 2, 4
    forward = [(chunk, m) for chunk in range(chunks) for m in range(count)]
    backward = [(chunk, m) for chunk in reversed(range(chunks)) for m in range(count)]
    slots = [Slots(*(torch.tensor(column) for column in zip(*order, strict=True))) for order in (forward, backward)]
    delays = None if delay is None else torch.tensor([delay, delay + 1])
    schedule = interleave("some", ranks, count, *slots, torch.tensor([ahead + 1, ahead]), delays)
    for rank in range(ranks):
        later = None if delay is None else delay + rank
        assert schedule.actions(rank) == by_hand(rank, ranks, forward, backward, ahead + 1 - rank, later)
    assert schedule.placement == (0, 1) * chunks


def test_columns_have_the_types_that_schedules_promise():
    for schedule in (
        dualpipe_v(2, 5),
        interleave("x", 1, 1, *[Slots(torch.tensor([0]), torch.tensor([0]))] * 2, torch.tensor([1])),
    ):
        for rows in schedule.columns:
            types = [rows.kind.dtype, rows.stage.dtype, rows.microbatch.dtype, rows.joined.dtype]
            assert types == [torch.uint8, torch.int32, torch.int32, torch.bool]
            assert {len(rows.kind), len(rows.stage), len(rows.microbatch), len(rows.joined)} == {len(rows)}


def texts(row):
    rows = row.columns()
    return [
        f"{stage}{Kind(kind).name}{m}{'+' if joined else ''}"
        for kind, stage, m, joined in zip(
            rows.kind.tolist(), rows.stage.tolist(), rows.microbatch.tolist(), rows.joined.tolist(), strict=True
        )
    ]


def test_a_pattern_goes_on_where_the_last_one_stopped():
    row = Row([4, 7])
    row.repeat(2, "F0 F1")
    row.repeat(0, "F0")
    row.repeat(-1, "F0")
    row.repeat(1, "F0+B1")
    row.repeat(2, "I0 W0")
    assert texts(row) == "4F0 7F0 4F1 7F1 4F2+ 7B0 4I0 4W0 4I1 4W1".split()


def test_a_kind_may_come_twice_in_a_pattern():
    row = Row([0])
    row.repeat(2, "F0 I0 F0 I0")
    assert texts(row) == "0F0 0I0 0F1 0I1 0F2 0I2 0F3 0I3".split()


def test_weight_gradients_go_on_after_whole_backwards():
    row = Row([0])
    row.repeat(2, "B0")
    row.repeat(2, "I0")
    row.repeat(2, "W0")
    assert texts(row) == "0B0 0B1 0I2 0I3 0W2 0W3".split()


def test_placements():
    assert loop(3, 2) == (0, 1, 2, 0, 1, 2)
    assert vee(3) == (0, 1, 2, 2, 1, 0)


def test_a_pair_that_loses_one_is_no_pair():
    whole, part = dualpipe_v(2, 6), first_microbatches(dualpipe_v(2, 6), 2)
    assert first_microbatches(whole, 6) is whole
    assert part.num_microbatches == 2
    for rank in range(2):
        old, new = whole.actions(rank), part.actions(rank)
        pairs = {(old[index], old[index + 1]) for index in whole.joined(rank)}
        kept = {pair for pair in pairs if pair[0].microbatch < 2 and pair[1].microbatch < 2}
        assert {(new[index], new[index + 1]) for index in part.joined(rank)} == kept
        assert len(kept) < len(pairs)
