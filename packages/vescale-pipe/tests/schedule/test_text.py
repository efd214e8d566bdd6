"""CSV and JSON: what is written is read back, torch's own files are read, and what is wrong is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

from vescale_pipe._schedule import (
    Action,
    Kind,
    Program,
    Schedule,
    Step,
    from_csv,
    from_json,
    lower,
    parse_action,
    recheck,
    to_csv,
    to_json,
    validate,
)
from vescale_pipe.errors import ScheduleError

theirs: Any = schedules  # its types say less than it takes
MANY = settings(max_examples=100, deadline=None)
SEEDS = st.integers(0, 2**32 - 1)


@MANY
@given(seed=SEEDS, forward_only=st.booleans())
def test_what_is_written_is_read_back(make_case: Callable[..., Any], seed: int, forward_only: bool) -> None:
    one = make_case(seed, forward_only=forward_only).schedule()
    assert from_csv(to_csv(one)) == one
    assert from_json(to_json(one)) == one
    assert from_json(to_json(one)).name == one.name
    assert from_csv(to_csv(one), name="other").name == "other"


@MANY
@given(seed=SEEDS)
def test_messages_are_read_back_and_dropped(make_case: Callable[..., Any], seed: int) -> None:
    case = make_case(seed, chain=True)
    one = case.schedule()
    text = to_csv(lower(one))
    assert ("SEND_F" in text) == (len(set(case.placement)) > 1)
    assert from_csv(text) == one


class StageOfTheirs:
    """As much of a stage as torch's schedules look at when they are made."""

    def __init__(self, rank: int, ranks: int, stages: int, index: int) -> None:
        self.group_rank, self.group_size, self.num_stages, self.stage_index = rank, ranks, stages, index
        self.group = self.stage_index_to_group_rank = None
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.has_backward = True
        self.submod = torch.nn.Identity()


def made_by_torch(name: str, ranks: int, microbatches: int) -> Any:
    kind = getattr(theirs, name)
    v_shaped = kind.__name__ in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    indexes = (0, 2 * ranks - 1) if v_shaped else (0, ranks)
    return kind([StageOfTheirs(0, ranks, 2 * ranks, index) for index in indexes], microbatches, loss_fn=lambda *_: None)


def their_rows(order: dict[int, list[Any]]) -> list[list[str]]:
    """Return their actions without idle places."""
    return [[str(action) for action in order[rank] if action is not None] for rank in sorted(order)]


THEIRS = [
    "ScheduleLoopedBFS",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
]


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8)])
@pytest.mark.parametrize("name", THEIRS)
def test_files_of_torch(name: str, ranks: int, microbatches: int, tmp_path: Path) -> None:
    made = made_by_torch(name, ranks, microbatches)
    path = tmp_path / "theirs.csv"
    made._dump_csv(str(path), format="compute_only")
    one = from_csv(path.read_text(), name=name)
    validate(one)
    assert (one.num_ranks, one.num_stages, one.num_microbatches) == (ranks, 2 * ranks, microbatches)
    assert bool(one.joined(0)) == (name == "ScheduleDualPipeV")

    ours = tmp_path / "ours.csv"
    ours.write_text(to_csv(one))
    again = made_by_torch(name, ranks, microbatches)
    again.pipeline_order = {}
    theirs.PipelineScheduleMulti._load_csv(again, str(ours))
    assert their_rows(again.pipeline_order) == their_rows(made.pipeline_order)


@pytest.mark.parametrize("name", THEIRS)
def test_files_of_torch_with_messages(name: str, tmp_path: Path) -> None:
    made = made_by_torch(name, 4, 8)
    path = tmp_path / "theirs.csv"
    made._dump_csv(str(path), format="compute_comms")
    text = path.read_text()
    assert "SEND_F" in text
    assert "UNSHARD" in text
    one = from_csv(text, name=name)
    compute = {
        rank: [action for action in row if action is None or action.is_compute_op]
        for rank, row in made.pipeline_order_with_comms.items()
    }
    assert [cells.split(",") for cells in to_csv(one).splitlines()] == their_rows(compute)

    ours = tmp_path / "ours.csv"
    ours.write_text(to_csv(lower(one)))
    again = theirs._PipelineScheduleRuntime(made._stages, 8, loss_fn=lambda *_: None)
    again._load_csv(str(ours), format="compute_comms")
    loaded = their_rows(again.pipeline_order_with_comms)
    # The same messages as theirs, at places of our own choice.
    wanted = their_rows(made.pipeline_order_with_comms)
    assert [sorted(row) for row in loaded] == [
        sorted(cell for cell in row if not cell.endswith(("SHARD", "GRAD"))) for row in wanted
    ]
    if not one.joined(0):  # their simulator knows no pairs
        order = again.pipeline_order_with_comms
        assert theirs._simulate_comms_compute(order, one.placement.__getitem__, one.num_stages)


def test_gpipe_of_torch() -> None:
    made = theirs.ScheduleGPipe(StageOfTheirs(0, 2, 2, 0), 4, loss_fn=lambda *_: None)
    text = "\n".join(
        ",".join("" if cell is None else str(cell) for cell in row) for row in made.pipeline_order.values()
    )
    assert "0REDUCE_GRAD" in text
    one = from_csv(text)
    validate(one)
    assert to_csv(one) == "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1F1,1F2,1F3,1B0,1B1,1B2,1B3\n"


def test_1f1b_of_torch_that_is_shifted_on_the_last_rank() -> None:
    # What torch 2.13 shows as its 1F1B; what it runs is right.
    text = "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3,0REDUCE_GRAD\n1F1,1B0,1F2,1B1,1F3,1B2,1F4,1B3,1REDUCE_GRAD\n"
    with pytest.raises(ScheduleError) as error:
        validate(from_csv(text))
    assert "rank 1, 1F0, rule COMPLETE: it is missing." in str(error.value)
    assert "rank 0, 0F4, rule COMPLETE: it is missing." in str(error.value)


def test_idle_cells_and_blank_lines_at_the_end() -> None:
    assert to_csv(from_csv('0F0,"" ,,0B0 \r\n , 1F0,1B0,\r\n,,\r\n\r\n')) == "0F0,0B0\n1F0,1B0\n"


def test_a_rank_without_actions_is_kept() -> None:
    one = from_csv("0F0\n\n1F0\n")
    assert one.num_ranks == 3
    with pytest.raises(ScheduleError, match="rank 1, rule PLACEMENT: no stage is placed on it"):
        validate(one)


def test_pairs() -> None:
    text = "0F0,0F1,(0B0;0F2)OVERLAP_F_B,(0B1;0F3)OVERLAP_F_B,0B2,0B3\n"
    one = from_csv(text)
    assert one.joined(0) == (2, 4)
    assert to_csv(one) == text
    assert '"0F0 0F1 0B0+0F2 0B1+0F3 0B2 0B3"' in to_json(one)


def test_program_text() -> None:
    one = from_csv("0F0,0B0\n1F0,1B0\n")
    assert to_csv(lower(one)) == "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"


def test_edges_that_csv_cannot_say() -> None:
    one = from_csv("0F0\n1F0\n2F0\n")
    with pytest.raises(ScheduleError, match=r"to_csv: edges have \(0, 2\)"):
        to_csv(lower(one, [(0, 1), (1, 2), (0, 2)]))
    # Between stages of one rank there is no message, so that nothing is lost.
    near = from_csv("0F0,2F0\n1F0\n")
    assert to_csv(lower(near, [(0, 1), (1, 2), (0, 2)])) == "0F0,0SEND_F0,2RECV_F0,2F0\n1RECV_F0,1F0,1SEND_F0\n"


def test_a_message_inside_a_pair() -> None:
    one = Schedule.of(
        "made",
        [0, 1],
        2,
        [[parse_action("0F0"), parse_action("0F1")], [parse_action("1F0"), parse_action("1F1")]],
        [(0, 0)],
    )
    program = lower(one)
    first, second, *sends = program.steps[0]
    broken = Program(one, program.edges, program.grad_edges, ((first, sends[0], second, sends[1]), program.steps[1]))
    with pytest.raises(ScheduleError, match=r"rank 0, 0SEND_F0>1 lies inside the joined pair that 0F0 begins"):
        to_csv(broken)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0,0X0", r"rank 0 \(line 1\), cell 2: '0X0'"),
        ("0F0\n-1F0", r"rank 1 \(line 2\), cell 1: '-1F0'"),
        ("0F", "cell 1: '0F'"),
        ("0F0;1F0", "cell 1"),
        ("(0F0)OVERLAP_F_B", "cell 1"),
        ("(0F0;0F1;0F2)OVERLAP_F_B", "cell 1"),
        ("(0F0;0SEND_F0)OVERLAP_F_B", "cell 1"),
        ("0F0,0B0\n0F1", r"rank 1, 0F1: stage 0 is on rank 0 too \(line 1\)"),
        ("0F0\n2F0", "stage 1: there is a stage 2, and no rank does anything for stage 1"),
        ("999999999F0", "stage 0: there is a stage 999999999"),
        ("0F0,0SEND_F0\n1F0", "1RECV_F0<0: it is missing"),
        ("0F0\n1RECV_F0,1F0", "0SEND_F0>1: it is missing"),
        ("0SEND_F0,0F0\n1RECV_F0,1F0", "0SEND_F0>1: it must come after"),
        ("0F0,0SEND_F0\n1F0,1RECV_F0", "1RECV_F0<0: it must come before"),
        ("0F0,0SEND_F0,0SEND_F0\n1RECV_F0,1F0", "0SEND_F0>1: it is there twice"),
        ("0F0,0SEND_F0\n1RECV_F0,1F0,1SEND_F0", "1SEND_F0: it goes between stages 1 and 2; there are stages 0 to 1"),
        ("0F0,7SEND_F0\n1RECV_F0,1F0", "7SEND_F0: it goes between stages 7 and 8"),
        ("0F0,0SEND_F0,1SEND_B0\n1RECV_F0,1F0", "1SEND_B0>0: no edge between ranks needs this message"),
        ("0F0,0SEND_F0,0B0\n1RECV_F0,1F0", "1B0, rule COMPLETE: it is missing"),
        ("0F999999999,0SEND_F0\n1F0", "need at least 2000000000 actions"),
    ],
)
def test_csv_that_is_wrong(text: str, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        from_csv(text)


GOOD = {
    "format": "vescale_pipe.schedule",
    "version": 1,
    "name": "x",
    "num_microbatches": 1,
    "placement": [0],
    "ranks": ["0F0"],
}


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"format": "x"}, 'expected an object with "format"'),
        ({"version": 2}, "version 2; this code reads version 1"),
        ({"name": 3}, "name must be of type str, got 3"),
        ({"num_microbatches": True}, "num_microbatches must be of type int, got True"),
        ({"placement": ["0"]}, "placement must be a list of integers"),
        ({"placement": None}, "placement must be of type list"),
        ({"ranks": "0F0"}, "ranks must be of type list"),
        ({"ranks": [["0F0"]]}, "rank 0: expected text"),
        ({"ranks": ["0F0 x"]}, "rank 0: action 'x'"),
        ({"ranks": ["0F0+0F1+0F2"]}, "rank 0, .*: only pairs overlap"),
    ],
)
def test_json_that_is_wrong(other: dict[str, Any], says: str) -> None:
    assert from_json(json.dumps(GOOD)) == Schedule.of("x", [0], 1, [[Action(Kind.F, 0, 0)]])
    with pytest.raises(ScheduleError, match=says):
        from_json(json.dumps(GOOD | other))


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "null", "[]"])
def test_what_is_no_json(text: str) -> None:
    with pytest.raises(ScheduleError, match="from_json"):
        from_json(text)


def test_json_is_json() -> None:
    one = Schedule.of('a "name"\n', [0, 1], 1, [[Action(Kind.F, 0, 0)], [Action(Kind.F, 1, 0)]])
    assert json.loads(to_json(one)) == GOOD | {"name": 'a "name"\n', "placement": [0, 1], "ranks": ["0F0", "1F0"]}


def test_messages_of_torch_never_block(tmp_path: Path) -> None:
    # Theirs come from one order of all messages too; read with their places, they pass the same check as ours.
    made = made_by_torch("ScheduleInterleaved1F1B", 2, 4)
    one = from_csv("\n".join(",".join(row) for row in their_rows(made.pipeline_order)))
    steps: list[tuple[Step, ...]] = []
    ends = {(step.op.name, *step[1:3]): step for some in lower(one).steps for step in some}
    for rank in sorted(made.pipeline_order_with_comms):
        rows = made.pipeline_order_with_comms[rank]
        names = [(row.computation_type.value, row.stage_index, row.microbatch_index) for row in rows]
        steps.append(tuple(ends[name] for name in names if name in ends))
    edges = tuple((stage, stage + 1) for stage in range(3))
    recheck(Program(one, edges, edges, tuple(steps)))
