"""Programs with wrong messages, or that wait for ever, are refused; what runs is not."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_pipe._schedule import Op, Program, Schedule, Step, lower, parse_action, recheck
from vescale_pipe.errors import ScheduleError

SEEDS = st.integers(0, 2**32 - 1)


def schedule(placement: Sequence[int], *lines: str) -> Schedule:
    rows = [list(map(parse_action, line.split())) for line in lines]
    return Schedule.of("made", placement, 1 + max(a.microbatch for row in rows for a in row), rows)


def one_f_one_b() -> Program:
    return lower(schedule([0, 1], "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"))


def changed(program: Program, steps: Sequence[Sequence[Step]]) -> Program:
    return Program(program.schedule, program.edges, program.grad_edges, tuple(map(tuple, steps)))


def swapped(program: Program, rank: int, first: str, second: str) -> Program:
    lists = [list(steps) for steps in program.steps]
    names = [str(step) for step in lists[rank]]
    a, b = names.index(first), names.index(second)
    lists[rank][a], lists[rank][b] = lists[rank][b], lists[rank][a]
    return changed(program, lists)


def runs(program: Program) -> bool:
    """Return whether every rank ends if each message needs both ends, and what is sent has been made."""
    heads = [0] * len(program.steps)
    done: set[tuple[int, str, int, int]] = set()
    got: set[tuple[str, int, int, int]] = set()
    placement = program.schedule.placement

    def head(rank: int) -> Step | None:
        return program.steps[rank][heads[rank]] if heads[rank] < len(program.steps[rank]) else None

    def feasible(rank: int, step: Step) -> bool:
        direction = "F" if step.op == Op.F else "B"
        if step.op == Op.W:
            return True
        for producer, consumer in program.edges if direction == "F" else program.grad_edges:
            source, sink = (producer, consumer) if direction == "F" else (consumer, producer)
            message = (direction, source, sink, step.microbatch)
            if sink == step.stage and placement[source] != rank and message not in got:
                return False
        return True

    moved = True
    while moved:
        moved = False
        for rank in range(len(heads)):
            step = head(rank)
            if step is None:
                continue
            if not step.op.is_message:
                if not feasible(rank, step):
                    return False
                done.add((rank, "F" if step.op == Op.F else "B", step.stage, step.microbatch))
                heads[rank] += 1
                moved = True
            elif step.op in (Op.SEND_F, Op.SEND_B):
                mate = Step(Op(step.op + 1), step.other, step.microbatch, rank, step.stage)
                if head(step.peer) == mate:
                    direction = step.op.name[-1]
                    if (rank, direction, step.stage, step.microbatch) not in done:
                        return False
                    got.add((direction, step.stage, step.other, step.microbatch))
                    heads[rank] += 1
                    heads[step.peer] += 1
                    moved = True
    return all(head(rank) is None for rank in range(len(heads)))


@settings(max_examples=150, deadline=None)
@given(seed=SEEDS)
def test_what_lower_makes_passes(make_case: Callable[..., Any], seed: int) -> None:
    case = make_case(seed)
    for backward in (True, False):
        recheck(lower(case.schedule(), case.edges, backward=backward))


@settings(max_examples=400, deadline=None)
@given(seed=SEEDS, swaps=st.integers(1, 3))
def test_swapped_messages_are_refused_if_and_only_if_they_block(
    make_case: Callable[..., Any], seed: int, swaps: int
) -> None:
    case = make_case(seed)
    program = lower(case.schedule(), case.edges)
    lists = [list(steps) for steps in program.steps]
    rng = random.Random(seed)
    for _ in range(swaps):
        mine = rng.choice(lists)
        ends = [index for index in range(len(mine) - 1) if mine[index].op.is_message or mine[index + 1].op.is_message]
        if ends:
            index = rng.choice(ends)
            mine[index], mine[index + 1] = mine[index + 1], mine[index]
    other = changed(program, lists)
    if runs(other):
        recheck(other)
    else:
        with pytest.raises(ScheduleError, match="rule MESSAGES"):
            recheck(other)


def test_both_send_first() -> None:
    program = lower(schedule([0, 1], "0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"))
    wrong = swapped(program, 1, "1RECV_F2<0", "1SEND_B1>0")
    assert not runs(wrong)
    with pytest.raises(ScheduleError) as error:
        recheck(wrong)
    assert (
        "ranks wait for each other: "
        "rank 0 is at 0SEND_F2>1 (index 7) and waits for rank 1; "
        "rank 1 is at 1SEND_B1>0 (index 7) and waits for rank 0. "
        "Blocked: rank 0 at 0SEND_F2>1 (index 7), rank 1 at 1SEND_B1>0 (index 7)."
    ) in str(error.value)


def test_receives_in_another_order_than_sends() -> None:
    program = lower(schedule([0, 1], "0F0 0F1", "1F0 1F1"))
    lists = [list(steps) for steps in program.steps]
    send, receive, first, second = (
        [step for step in lists[0] if step.op == Op.SEND_F],
        [step for step in lists[1] if step.op == Op.RECV_F],
        lists[1][1],
        lists[1][3],
    )
    assert len(send) == 2
    with pytest.raises(ScheduleError, match=r"rank 1, index 0.*1RECV_F1<0: the message number 0 from rank 0 is sent"):
        recheck(changed(program, [lists[0], [receive[1], receive[0], first, second]]))


@pytest.mark.parametrize(
    ("rank", "index", "new", "says"),
    [
        (0, 1, [], r"rank 0, rule MESSAGES: 0SEND_F0>1: it is missing"),
        (1, 0, [], r"rank 1, rule MESSAGES: 1RECV_F0<0: it is missing"),
        (0, 1, [Step(Op.SEND_F, 0, 0, 1, 1)] * 2, r"rank 0, index 2, .* 0SEND_F0>1: it is there twice"),
        (0, 1, [Step(Op.SEND_F, 0, 0, 0, 1)], r"stage 1 on rank 1; the step is on rank 0 with peer 0"),
        (0, 1, [Step(Op.SEND_F, 0, 7, 1, 1)], r"0SEND_F7>1: no edge between ranks needs this message"),
        (0, 1, [Step(Op.SEND_F, 1, 0, 0, 0)], r"1SEND_F0>0: no edge between ranks needs this message"),
        (0, 0, [], r"rank 0, rule MESSAGES: its computations are not those of the schedule"),
        (0, 0, [Step(Op.B, 0, 0)], r"rank 0, rule MESSAGES: its computations are not those of the schedule"),
    ],
)
def test_wrong_messages(rank: int, index: int, new: list[Step], says: str) -> None:
    program = one_f_one_b()
    lists = [list(steps) for steps in program.steps]
    lists[rank][index : index + 1] = new
    with pytest.raises(ScheduleError, match=says):
        recheck(changed(program, lists))


def test_wrong_places() -> None:
    program = one_f_one_b()
    with pytest.raises(ScheduleError, match=r"0SEND_F0>1: it must come after the computation at index 1"):
        recheck(swapped(program, 0, "0F0", "0SEND_F0>1"))
    with pytest.raises(ScheduleError, match=r"1RECV_F0<0: it must come before the computation at index 0"):
        recheck(swapped(program, 1, "1RECV_F0<0", "1F0"))


def test_a_rank_without_steps() -> None:
    program = one_f_one_b()
    with pytest.raises(ScheduleError, match="it has steps of 1 ranks; the schedule has 2"):
        recheck(changed(program, [program.steps[0]]))
