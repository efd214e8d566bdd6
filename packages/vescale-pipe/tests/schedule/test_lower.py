"""Messages: programs of random valid schedules come to their end even where each SEND waits for its RECV."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_pipe._schedule import Action, Kind, Op, Program, Schedule, Step, _waits, lower, parse_action
from vescale_pipe.errors import ScheduleError

MANY = settings(max_examples=150, deadline=None)
SEEDS = st.integers(0, 2**32 - 1)


def schedule(placement: Sequence[int], *lines: str, joined: Sequence[tuple[int, int]] = ()) -> Schedule:
    rows = [list(map(parse_action, line.split())) for line in lines]
    microbatches = 1 + max(action.microbatch for row in rows for action in row)
    return Schedule.of("made", placement, microbatches, rows, joined)


def text(program: Program) -> list[str]:
    return [" ".join(map(str, steps)) for steps in program.steps]


class Machine:
    """Ranks that do one step after the other; a message needs both ends at once, and values must be there."""

    def __init__(self, program: Program, edges: list[tuple[int, int]], rng: random.Random) -> None:
        self.program, self.edges, self.rng = program, edges, rng
        self.placement = program.schedule.placement
        self.heads = [0] * len(program.steps)
        self.made: set[tuple[int, str, int, int]] = set()
        self.arrived: set[tuple[int, str, int, int, int]] = set()
        self.moved = 0

    def head(self, rank: int) -> Step | None:
        steps = self.program.steps[rank]
        return steps[self.heads[rank]] if self.heads[rank] < len(steps) else None

    def compute(self, rank: int, step: Step) -> None:
        assert self.placement[step.stage] == rank
        s, m = step.stage, step.microbatch
        if step.op == Op.W:
            assert (rank, "B", s, m) in self.made
            return
        direction = "F" if step.op == Op.F else "B"
        if direction == "B":
            assert (rank, "F", s, m) in self.made
        sources = [p if direction == "F" else c for p, c in self.edges if s == (c if direction == "F" else p)]
        for source in sources:
            if self.placement[source] == rank:
                assert (rank, direction, source, m) in self.made
            else:
                assert (rank, direction, source, s, m) in self.arrived
        assert (rank, direction, s, m) not in self.made
        self.made.add((rank, direction, s, m))

    def step(self, rank: int) -> bool:
        step = self.head(rank)
        if step is None:
            return False
        if step.op.is_message:
            other = self.head(step.peer)
            mates = {Op.SEND_F: Op.RECV_F, Op.RECV_F: Op.SEND_F, Op.SEND_B: Op.RECV_B, Op.RECV_B: Op.SEND_B}
            if other is None or other != (mates[step.op], step.other, step.microbatch, rank, step.stage):
                return False
            sender, sent = (rank, step) if step.op in (Op.SEND_F, Op.SEND_B) else (step.peer, other)
            direction = sent.op.name[-1]
            assert (sender, direction, sent.stage, sent.microbatch) in self.made
            self.arrived.add((sent.peer, direction, sent.stage, sent.other, sent.microbatch))
            self.heads[step.peer] += 1
            self.moved += 1
        else:
            self.compute(rank, step)
        self.heads[rank] += 1
        return True

    def run(self) -> bool:
        """Return whether all ranks come to their ends."""
        ranks = list(range(len(self.heads)))
        while True:
            self.rng.shuffle(ranks)
            moved = [self.step(rank) for rank in ranks]
            if not any(moved):
                return all(self.head(rank) is None for rank in ranks)


@MANY
@given(seed=SEEDS, forward_only=st.booleans())
def test_programs_come_to_their_end(make_case: Callable[..., Any], seed: int, forward_only: bool) -> None:
    case = make_case(seed, forward_only=forward_only)
    program = lower(case.schedule(), case.edges)
    machine = Machine(program, case.edges, random.Random(seed))
    assert machine.run()
    across = sum(case.placement[p] != case.placement[c] for p, c in case.edges)
    assert machine.moved == across * case.microbatches * (1 if forward_only else 2)
    for rank, rows in enumerate(case.actions):
        computed = [step[:3] for step in program.steps[rank] if not step.op.is_message]
        assert computed == [tuple(action) for action in rows]


@MANY
@given(seed=SEEDS)
def test_forwards_alone(make_case: Callable[..., Any], seed: int) -> None:
    case = make_case(seed)
    program = lower(case.schedule(), case.edges, backward=False)
    assert program.grad_edges == ()
    for rank, rows in enumerate(case.actions):
        assert program.schedule.actions(rank) == tuple(action for action in rows if action.kind == Kind.F)
    machine = Machine(program, case.edges, random.Random(seed))
    assert machine.run()
    assert {step.op for steps in program.steps for step in steps} <= {Op.F, Op.SEND_F, Op.RECV_F}


@MANY
@given(seed=SEEDS)
def test_pairs_stay_together(make_case: Callable[..., Any], seed: int) -> None:
    case = make_case(seed, pairs=0.7)
    program = lower(case.schedule(), case.edges)
    for rank, index in case.joined:
        first, second = case.actions[rank][index : index + 2]
        steps = [step[:3] for step in program.steps[rank]]
        assert steps.index(tuple(second)) == steps.index(tuple(first)) + 1


def test_pairs_of_forwards_stay_pairs_without_backwards() -> None:
    one = schedule([0], "0F0 0F1 0F2 0B0 0B1 0B2", joined=[(0, 0), (0, 2)])
    assert lower(one, backward=False).schedule.joined(0) == (0,)


def test_one_f_one_b() -> None:
    program = lower(schedule([0, 1], "0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"))
    # With F = 1 and B = 2: at time 2 0F1 is over and 1B0 may start; at 7 0F2 and 1B1 are over.
    assert text(program) == [
        "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0F2 0SEND_F2>1 0RECV_B1<1 0B1 0RECV_B2<1 0B2",
        "1RECV_F0<0 1F0 1RECV_F1<0 1B0 1SEND_B0>0 1F1 1B1 1RECV_F2<0 1SEND_B1>0 1F2 1B2 1SEND_B2>0",
    ]


def test_receives_of_gpipe_lie_where_values_are_made() -> None:
    program = lower(schedule([0, 1], "0F0 0F1 0F2", "1F0 1F1 1F2"))
    assert text(program) == [
        "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0F2 0SEND_F2>1",
        "1RECV_F0<0 1F0 1RECV_F1<0 1F1 1RECV_F2<0 1F2",
    ]


def test_skips_go_straight_and_ranks_send_nothing_to_themselves() -> None:
    program = lower(schedule([0, 1, 0], "0F0 2F0 2B0 0B0", "1F0 1B0"), [(0, 1), (1, 2), (0, 2)])
    assert text(program) == [
        "0F0 0SEND_F0>1 2RECV_F0<1 2F0 2B0 2SEND_B0>1 0RECV_B0<1 0B0",
        "1RECV_F0<0 1F0 1SEND_F0>2 1RECV_B0<2 1B0 1SEND_B0>0",
    ]
    assert program.steps[0][1] == Step(Op.SEND_F, 0, 0, peer=1, other=1)
    assert program.steps[1][3] == Step(Op.RECV_B, 1, 0, peer=0, other=2)


def test_gradients_only_where_they_are_wanted() -> None:
    one = schedule([0, 1, 2], "0F0 0B0", "1F0 1B0", "2F0 2B0")
    program = lower(one, grad_edges=[(1, 2)])
    assert text(program) == [
        "0F0 0SEND_F0>1 0B0",
        "1RECV_F0<0 1F0 1SEND_F0>2 1RECV_B0<2 1B0",
        "2RECV_F0<1 2F0 2B0 2SEND_B0>1",
    ]


def test_receives_lie_after_what_has_begun() -> None:
    # With F = 1 and B = 2: 0F2 ends at 3 and 0F3 at 4, while 1B0 runs from 2 to 4.
    one = schedule([0, 1], "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3")
    assert text(lower(one))[1].startswith("1RECV_F0<0 1F0 1RECV_F1<0 1B0 1RECV_F2<0 1RECV_F3<0 1SEND_B0>0 1F1")


@MANY
@given(seed=SEEDS)
def test_ranks_all_at_once_and_one_by_one_give_the_same(make_case: Callable[..., Any], seed: int) -> None:
    case = make_case(seed)
    slow = text(lower(case.schedule(), case.edges))
    for waves in (1 << 12, 3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_waits, "FEW_RANKS", 1)
            patch.setattr(_waits, "WAVES", waves)
            assert text(lower(case.schedule(), case.edges)) == slow


def test_halves_send_after_the_first() -> None:
    program = lower(schedule([0, 1], "0F0 0I0 0W0", "1F0 1I0 1W0"))
    assert text(program)[1] == "1RECV_F0<0 1F0 1I0 1SEND_B0>0 1W0"


def test_one_rank() -> None:
    assert text(lower(schedule([0], "0F0 0B0"))) == ["0F0 0B0"]


def test_what_is_wrong_is_not_lowered() -> None:
    with pytest.raises(ScheduleError, match="1B0, rule COMPLETE: it is missing"):
        lower(schedule([0, 1], "0F0 0B0", "1F0"))


def test_ops_are_kinds() -> None:
    assert [(op.name, int(op)) for op in Op][:4] == [(kind.name, int(kind)) for kind in Kind]
    assert [op.name for op in Op if op.is_message] == ["SEND_F", "RECV_F", "SEND_B", "RECV_B"]


def test_steps_are_a_sequence() -> None:
    steps = lower(schedule([0, 1], "0F0", "1F0")).steps
    assert len(steps) == 2
    assert steps[-1] is steps[1]
    assert steps[:1] == (steps[0],)
    assert [len(one) for one in steps] == [2, 2]
    with pytest.raises(IndexError):
        steps[2]


def test_a_program_for_many_ranks_is_made_per_rank() -> None:
    ranks, microbatches = 48, 8
    rows = [
        [Action(Kind.F, rank, m) for m in range(microbatches)] + [Action(Kind.B, rank, m) for m in range(microbatches)]
        for rank in range(ranks)
    ]
    program = lower(Schedule.of("wide", range(ranks), microbatches, rows))
    edges = [(stage, stage + 1) for stage in range(ranks - 1)]
    assert Machine(program, edges, random.Random(0)).run()
