"""Each rule by examples: what is told, of which action, in which words."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from vescale_pipe._schedule import (
    Action,
    Columns,
    Kind,
    Problem,
    Rule,
    Schedule,
    parse_action,
    problems,
    validate,
)
from vescale_pipe.errors import ScheduleError

Place = tuple[int, int]
Told = tuple[Rule, int, int, Action | None]


def schedule(placement: list[int], microbatches: int, *lines: str, joined: tuple[Place, ...] = ()) -> Schedule:
    return Schedule.of("made", placement, microbatches, [map(parse_action, line.split()) for line in lines], joined)


def told(found: list[Problem]) -> set[Told]:
    return {(one.rule, one.rank, one.index, one.action) for one in found}


def test_a_weight_half_without_its_input_half_still_needs_its_forward() -> None:
    assert told(problems(schedule([0], 1, "0W0 0F0"))) == {
        (Rule.COMPLETE, 0, -1, Action(Kind.I, 0, 0)),
        (Rule.LOCAL_ORDER, 0, 0, Action(Kind.W, 0, 0)),
    }


def test_a_pair_does_not_reach_into_the_next_rank() -> None:
    one = schedule([0, 1], 1, "0F0 0B0", "1F0 1B0")
    one.columns[0].joined[1] = True
    assert told(problems(one)) == {(Rule.FORM, 0, 1, None)}


def test_a_dropped_action() -> None:
    one = schedule([0, 1], 2, "0F0 0F1 0B0 0B1", "1F0 1B0 1F1")
    assert told(problems(one)) == {(Rule.COMPLETE, 1, -1, Action(Kind.B, 1, 1))}
    with pytest.raises(
        ScheduleError,
        match=r"schedule 'made' \(2 ranks, 2 stages, 2 micro-batches\): 1 problem\n  rank 1, 1B1, rule COMPLETE: it is",
    ):
        validate(one)


def test_repeated_and_mixed_which_torch_lets_pass() -> None:
    one = schedule([0], 2, "0F0 0F0 0B0 0B0 0I0 0W0 0F1")
    f, b = Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)
    assert told(problems(one)) == {
        (Rule.COMPLETE, 0, 1, f),
        (Rule.COMPLETE, 0, 3, b),
        (Rule.COMPLETE, 0, 2, b),
        (Rule.COMPLETE, 0, -1, Action(Kind.B, 0, 1)),
    }
    texts = {one.index: one.text for one in problems(one)}
    assert "rank 0 at index 0" in texts[1]
    assert "0I0 (index 4) and 0W0 (index 5)" in texts[2]


@pytest.mark.parametrize(
    ("line", "rule", "index", "says"),
    [
        ("0B0 0F0", Rule.LOCAL_ORDER, 0, "0F0 (index 1)"),
        ("0F0 0W0 0I0", Rule.LOCAL_ORDER, 1, "0I0 (index 2)"),
        ("0I0 0F0 0W0", Rule.LOCAL_ORDER, 0, "0F0 (index 1)"),
    ],
)
def test_order_in_a_stage(line: str, rule: Rule, index: int, says: str) -> None:
    (one,) = problems(schedule([0], 1, line))
    assert (one.rule, one.rank, one.index) == (rule, 0, index)
    assert says in one.text


def test_order_between_stages_of_a_rank() -> None:
    found = problems(schedule([0, 0], 1, "1F0 0F0 0B0 1B0"))
    assert told(found) == {
        (Rule.DATA_ORDER, 0, 0, Action(Kind.F, 1, 0)),
        (Rule.DATA_ORDER, 0, 2, Action(Kind.B, 0, 0)),
    }


def test_a_circle_is_told_wait_by_wait() -> None:
    (one,) = problems(schedule([0, 1], 2, "0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"))
    assert (one.rule, one.rank, one.index, str(one.action)) == (Rule.CYCLE, 0, 1, "0B0")
    assert one.text == (
        "ranks wait for each other: "
        "rank 0 stops at 0B0 (index 1), before 0F1 (index 2), and needs 1B0 of rank 1; "
        "rank 1 stops at 1F1 (index 0), before 1B0 (index 3), and needs 0F1 of rank 0. "
        "Blocked: rank 0 at 0B0, rank 1 at 1F1. Move one of these actions."
    )


def test_ranks_outside_the_circle_are_told_too() -> None:
    one, *more = problems(
        schedule([0, 1, 2], 2, "0F0 0F1 0B0 0B1", "1F0 1B1 1F1 1B0", "2F1 2F0 2B0 2B1"), edges=[(0, 1), (1, 2)]
    )
    # 1B1 is before 1F1, which is wrong on its own; what is left waits for 2B1 of rank 2, which waits for 1F1.
    assert one.rule == Rule.LOCAL_ORDER
    assert [problem.rule for problem in more] == [Rule.CYCLE]
    assert "Blocked: rank 0 at 0B0, rank 1 at 1B1, rank 2 at 2F1" in more[0].text


def test_two_circles_are_two_problems() -> None:
    lines = []
    for low in (0, 2):
        lines += [f"{low}F0 {low}B0 {low}F1 {low}B1", f"{low + 1}F1 {low + 1}B1 {low + 1}F0 {low + 1}B0"]
    found = problems(schedule([0, 1, 2, 3], 2, *lines), edges=[(0, 1), (2, 3)])
    assert [(one.rule, one.rank) for one in found] == [(Rule.CYCLE, 0), (Rule.CYCLE, 2)]


def test_gradients_that_nobody_waits_for() -> None:
    one = schedule([0, 1], 1, "0F0 0B0", "1F0 1B0")
    early = schedule([0, 1], 2, "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")
    validate(one)
    assert [found.rule for found in problems(early)] == [Rule.CYCLE]
    validate(early, grad_edges=[])


@pytest.mark.parametrize(
    ("joined", "lines", "rule"),
    [
        ((0, 0), ("0F0 0B0",), Rule.LOCAL_ORDER),
        ((0, 1), ("0F0 0I0 0W0",), Rule.LOCAL_ORDER),
        ((0, 0), ("0F0 1F0 1B0 0B0",), Rule.DATA_ORDER),
        ((0, 0), ("0F0 0B0", "1F0 1B0"), Rule.LOCAL_ORDER),
    ],
)
def test_pairs_are_independent(joined: Place, lines: tuple[str, ...], rule: Rule) -> None:
    placement = [0, len(lines) - 1] if "1F0" in " ".join(lines) else [0]
    one = schedule(placement, 1, *lines, joined=(joined,))
    assert rule in {found.rule for found in problems(one)}
    assert "joined" in " ".join(found.text for found in problems(one))


def test_a_pair_whose_second_needs_the_first_by_another_rank() -> None:
    lines = ("0F0 2F0 2B0 0B0", "1F0 1B0")
    validate(schedule([0, 1, 0], 1, *lines))
    (one,) = problems(schedule([0, 1, 0], 1, *lines, joined=((0, 0),)))
    assert one.rule == Rule.CYCLE
    assert "rank 0 stops at 2F0 (index 1), joined with 0F0 (index 0), and needs 1F0 of rank 1" in one.text


def test_looped_bfs_is_not_canonical() -> None:
    one = schedule([0], 3, "0F0 0F1 0F2 0B2 0B1 0B0")
    validate(one)
    assert told(problems(one, canonical=True)) == {
        (Rule.CANONICAL, 0, 3, Action(Kind.B, 0, 2)),
        (Rule.CANONICAL, 0, 4, Action(Kind.B, 0, 1)),
    }


def test_an_input_half_out_of_order_is_not_canonical() -> None:
    # Biases get their gradients from I, so the order of I counts even where that of W is right.
    one = schedule([0], 2, "0F0 0F1 0I1 0I0 0W0 0W1")
    assert [(str(found.action), found.rule) for found in problems(one, canonical=True)] == [("0I1", Rule.CANONICAL)]


def test_memory_is_counted_to_the_end_of_w() -> None:
    one = schedule([0], 2, "0F0 0I0 0F1 0W0 0I1 0W1")
    validate(one, memory=2)
    (found,) = problems(one, memory=1)
    assert (found.rule, found.index) == (Rule.MEMORY, 2)
    assert "keeps 2 activations, of 1 that it may, and 2 at its peak" in found.text
    validate(schedule([0], 3, "0F0 0F1 0F2"), memory=1)  # forwards alone keep nothing


def test_numbers_that_do_not_exist() -> None:
    one = schedule([0, 1], 1, "0F0 0B0 5F0", "1F0 1B0 1F7")
    assert told(problems(one)) == {
        (Rule.PLACEMENT, 0, 2, Action(Kind.F, 5, 0)),
        (Rule.COMPLETE, 1, 2, Action(Kind.F, 1, 7)),
    }


def test_placement() -> None:
    found = problems(schedule([0, 5], 1, "0F0 0B0", "1F0 1B0"))
    assert {one.rule for one in found} == {Rule.PLACEMENT}
    assert [one.text for one in found if one.rank == -1] == ["stage 1 is placed on rank 5; there are ranks 0 to 1."]
    assert [one.text for one in found if one.rank == 1 and one.index < 0] == [
        "no stage is placed on it; take fewer ranks or place a stage there."
    ]


@pytest.mark.parametrize(
    "empty",
    [Schedule("e", (), 1, ()), Schedule.of("e", [0], 0, [[]]), Schedule.of("e", [], 1, [[]])],
)
def test_nothing(empty: Schedule) -> None:
    assert Rule.FORM in {one.rule for one in problems(empty)}


def test_columns_of_a_plugin_that_are_wrong() -> None:
    good = schedule([0], 1, "0F0 0B0").columns[0]

    def rules(**other: torch.Tensor) -> list[str]:
        fields = {name: getattr(good, name) for name in Columns.__slots__} | other
        return [one.text for one in problems(Schedule("made", (0,), 1, (Columns(**fields),)))]

    assert rules() == []
    assert "column stage is torch.int64" in rules(stage=good.stage.long())[0]
    assert "column microbatch is torch.int32 of shape (1,)" in rules(microbatch=good.microbatch[:1])[0]
    assert "kind 9 is none of" in rules(kind=torch.tensor([0, 9], dtype=torch.uint8))[0]
    assert "the one after it, which is not there" in rules(joined=torch.tensor([False, True]))[0]


def test_three_do_not_overlap() -> None:
    one = schedule([0], 3, "0F0 0F1 0F2", joined=((0, 0), (0, 1)))
    assert told(problems(one)) == {(Rule.FORM, 0, 1, None)}


def test_a_claim_of_many_microbatches_costs_nothing() -> None:
    (one,) = problems(Schedule.of("huge", [0], 2**31 - 1, [[Action(Kind.F, 0, 2**31 - 2)]]))
    assert one.rule == Rule.COMPLETE
    assert "need at least 2147483647 actions; there are 1." in one.text


def test_many_problems_are_counted_and_twenty_shown() -> None:
    one = schedule([0], 100, "0F0 0B0")
    assert len(problems(one)) == 198
    with pytest.raises(ScheduleError) as error:
        validate(one)
    assert str(error.value).count("\n") == 21
    assert re.search(r": 198 problems\n", str(error.value))
    assert str(error.value).endswith("... and 178 more")


@pytest.mark.parametrize("edges", [[(1, 0)], [(0, 0)], [(0, 2)], [(-1, 1)]])
def test_edges_that_make_no_sense(edges: list[tuple[int, int]]) -> None:
    with pytest.raises(ScheduleError, match=r"edges: .* 0 <= producer < consumer < 2"):
        problems(schedule([0, 1], 1, "0F0", "1F0"), edges=edges)


def test_other_arguments_that_make_no_sense() -> None:
    one = schedule([0, 1], 1, "0F0", "1F0")
    with pytest.raises(ScheduleError, match=r"grad_edges: \[\(0, 1\)\] are not among the edges"):
        problems(one, edges=[], grad_edges=[(0, 1)])
    with pytest.raises(ScheduleError, match="memory: 0 activations"):
        problems(one, memory=0)


def test_the_schedule_is_left_as_it_was(make_case: Callable[..., Any]) -> None:
    case = make_case(3)
    one, other = case.schedule(), copy.deepcopy(case).schedule()
    problems(one, edges=case.edges, memory=1, canonical=True)
    assert one == other
