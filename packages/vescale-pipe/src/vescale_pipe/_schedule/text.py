"""Schedules as text: the CSV that torch.distributed.pipelining reads and writes, and JSON.

CSV has one line per rank. `0F0` is an action, an empty cell is idle, `(0F0;1B1)OVERLAP_F_B` is a joined pair. torch's
other format (compute_comms) has messages too: `0SEND_F0` goes to the next stage, `1SEND_B0` to the one before.
"""

from __future__ import annotations

import csv
import io
import json
import re
from typing import Any

from ..errors import ScheduleError
from ._edges import chain
from ._given import need_schedule
from ._problem import Found, report
from ._program import Op, Program, Step
from .action import Action, parse_action
from .check import validate
from .recheck import check_messages
from .schedule import Schedule

__all__ = ["from_csv", "from_json", "to_csv", "to_json"]

FORMAT = "vescale_pipe.schedule"
VERSION = 1

_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_MESSAGE = re.compile(r"(\d{1,9})(SEND_F|RECV_F|SEND_B|RECV_B)(\d{1,9})", re.ASCII)
# What torch does for sharded parameters and for gradients that it scales; it makes them anew from what is computed.
_UPKEEP = re.compile(r"\d{1,9}(UNSHARD|RESHARD|REDUCE_GRAD)\d{0,9}", re.ASCII)


def to_csv(what: Schedule | Program) -> str:
    r"""Return CSV text: torch's compute_only format of a schedule, its compute_comms format of a program.

    Args:
        what: a schedule, or what `lower` made of one.

    Raises:
        ScheduleError: a message goes to a stage that is no neighbour, or one lies inside a joined pair, which this
            format cannot say.

    Example:
        >>> one = Schedule.of("tiny", [0], 2, [[parse_action(text) for text in ("0F0", "0B0", "0F1", "0B1")]], [(0, 1)])
        >>> to_csv(one)
        '0F0,(0B0;0F1)OVERLAP_F_B,0B1\n'
    """
    schedule = what.schedule if isinstance(what, Program) else what
    need_schedule(schedule, "to_csv")
    if isinstance(what, Program):
        _require_chain(what)
    lines = []
    for rank in range(schedule.num_ranks):
        steps = what.steps[rank] if isinstance(what, Program) else None
        lines.append(",".join(_cells(schedule, rank, steps)) + "\n")
    return "".join(lines)


def _require_chain(program: Program) -> None:
    placement = program.schedule.placement
    for name in ("edges", "grad_edges"):
        for producer, consumer in getattr(program, name):
            if consumer != producer + 1 and placement[producer] != placement[consumer]:
                raise ScheduleError(
                    f"to_csv: {name} have ({producer}, {consumer}), and messages in this CSV go to the next stage or "
                    "to the one before; write the schedule instead of the program."
                )


def _cells(schedule: Schedule, rank: int, steps: tuple[Step, ...] | None) -> list[str]:
    first = set(schedule.joined(rank))
    rows: tuple[Action, ...] | tuple[Step, ...] = schedule.actions(rank) if steps is None else steps
    cells: list[str] = []
    computed = 0
    open_pair = ""
    for row in rows:
        cell = str(row)
        if isinstance(row, Step) and row.op.is_message:
            if open_pair:
                raise ScheduleError(f"to_csv: rank {rank}, {row} lies inside the joined pair that {open_pair} begins.")
            cells.append(cell.partition(">")[0].partition("<")[0])
            continue
        if computed in first:
            open_pair = cell
        else:
            cells.append(f"({open_pair};{cell})OVERLAP_F_B" if open_pair else cell)
            open_pair = ""
        computed += 1
    return cells


def from_csv(text: str, name: str = "csv") -> Schedule:
    r"""Return the schedule that CSV text holds; stages are on the ranks in whose lines they are.

    Messages are checked, each for being needed, there once, and on the right side of its computation, and dropped;
    the schedule then must be valid too. So are torch's UNSHARD, RESHARD and REDUCE_GRAD, unchecked. A schedule
    without messages is not checked: `validate` does that.

    Args:
        text: in either of torch's formats.
        name: what to call it.

    Raises:
        ScheduleError: a cell is none of these, a stage is on two ranks or on none, or messages are wrong.

    Example:
        >>> print(to_csv(from_csv("0F0,,0B0\n,1F0,1B0\n")), end="")
        0F0,0B0
        1F0,1B0
    """
    lines = list(csv.reader(io.StringIO(text)))
    while lines and not any(cell.strip() for cell in lines[-1]):
        lines.pop()
    if not lines:
        raise ScheduleError(f"{name}: there is no line in it; each rank has one, of cells such as 0F0.")
    actions: list[list[Action]] = []
    joined: list[tuple[int, int]] = []
    mixed: list[list[Action | tuple[str, int, int]]] = []
    for rank, line in enumerate(lines):
        actions.append([])
        mixed.append([])
        for column, cell in enumerate(map(str.strip, line)):
            message = _MESSAGE.fullmatch(cell)
            if message is not None:
                mixed[rank].append((message[2], int(message[1]), int(message[3])))
                continue
            if not cell or _UPKEEP.fullmatch(cell):
                continue
            found = _computations(cell, rank, column)
            if len(found) == 2:
                joined.append((rank, len(actions[rank])))
            actions[rank] += found
            mixed[rank] += found
    placement = _placement(actions)
    microbatches = max((action.microbatch for rows in actions for action in rows), default=-1) + 1
    schedule = Schedule.of(name, placement, microbatches, actions, joined)
    if any(not isinstance(one, Action) for rows in mixed for one in rows):
        _check_mixed(schedule, mixed)
    return schedule


def _computations(cell: str, rank: int, column: int) -> list[Action]:
    """Return the action of a cell, or the two of a joined pair."""
    pair = _PAIR.fullmatch(cell)
    try:
        return [parse_action(part) for part in (pair.groups() if pair is not None else (cell,))]
    except ScheduleError as error:
        raise ScheduleError(
            f"rank {rank} (line {rank + 1}), cell {column + 1}: {cell!r} is none of 2F0, 2SEND_F0, "
            "(0F0;1B1)OVERLAP_F_B and their like."
        ) from error


def _placement(actions: list[list[Action]]) -> list[int]:
    owner: dict[int, int] = {}
    for rank, rows in enumerate(actions):
        for action in rows:
            known = owner.setdefault(action.stage, rank)
            if known != rank:
                raise ScheduleError(
                    f"rank {rank}, {action}: stage {action.stage} is on rank {known} too (line {known + 1}); a stage "
                    "has one rank."
                )
    last = max(owner, default=-1)
    if len(owner) != last + 1:
        lost = next(stage for stage in range(last) if stage not in owner)
        raise ScheduleError(f"stage {lost}: there is a stage {last}, and no rank does anything for stage {lost}.")
    return [owner[stage] for stage in range(last + 1)]


def _check_mixed(schedule: Schedule, mixed: list[list[Action | tuple[str, int, int]]]) -> None:
    """Check the messages that stand among the actions of a schedule."""
    validate(schedule)
    steps = []
    for rank, rows in enumerate(mixed):
        mine = []
        for row in rows:
            if isinstance(row, Action):
                mine.append(Step(Op(int(row.kind)), row.stage, row.microbatch))
                continue
            op = Op[row[0]]
            other = row[1] + (1 if op in (Op.SEND_F, Op.RECV_B) else -1)
            if not (0 <= other < schedule.num_stages and row[1] < schedule.num_stages):
                raise ScheduleError(
                    f"rank {rank}, {row[1]}{row[0]}{row[2]}: it goes between stages {row[1]} and {other}; there are "
                    f"stages 0 to {schedule.num_stages - 1}."
                )
            mine.append(Step(op, row[1], row[2], schedule.placement[other], other))
        steps.append(tuple(mine))
    edges = chain(schedule.num_stages)
    found = Found(most=20)
    check_messages(Program(schedule, edges, edges, tuple(steps)), found)
    if found.total:
        raise ScheduleError(report(f"messages of {schedule.name!r}", found.sorted(), found.total))


def to_json(schedule: Schedule) -> str:
    r"""Return JSON text that holds all of a schedule.

    Args:
        schedule: what to write; kinds must be those of `Kind`.

    Example:
        >>> print(to_json(from_csv("0F0,0B0\n", name="tiny")), end="")
        {
          "format": "vescale_pipe.schedule",
          "version": 1,
          "name": "tiny",
          "num_microbatches": 1,
          "placement": [0],
          "ranks": [
            "0F0 0B0"
          ]
        }
    """
    need_schedule(schedule, "to_json")
    lines = []
    for rank in range(schedule.num_ranks):
        first = set(schedule.joined(rank))
        words = [f"{action}{'+' if index in first else ' '}" for index, action in enumerate(schedule.actions(rank))]
        lines.append(f"    {json.dumps(''.join(words).strip())}")
    return (
        "{\n"
        f'  "format": "{FORMAT}",\n'
        f'  "version": {VERSION},\n'
        f'  "name": {json.dumps(schedule.name)},\n'
        f'  "num_microbatches": {schedule.num_microbatches},\n'
        f'  "placement": {json.dumps(list(schedule.placement))},\n'
        '  "ranks": [\n' + ",\n".join(lines) + "\n  ]\n}\n"
    )


def from_json(text: str) -> Schedule:
    """Return the schedule that `to_json` wrote; `validate` tells whether it makes sense.

    Args:
        text: JSON.

    Raises:
        ScheduleError: it is no JSON, or not of this format.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScheduleError(f"from_json: no JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ScheduleError(f'from_json: expected an object with "format": "{FORMAT}".')
    if data.get("version") != VERSION:
        raise ScheduleError(f"from_json: version {data.get('version')!r}; this code reads version {VERSION}.")
    name = _field(data, "name", str)
    microbatches = _field(data, "num_microbatches", int)
    placement = _field(data, "placement", list)
    if any(type(rank) is not int for rank in placement):
        raise ScheduleError("from_json: placement must be a list of integers, the rank of each stage.")
    actions: list[list[Action]] = []
    joined: list[tuple[int, int]] = []
    for rank, words in enumerate(_field(data, "ranks", list)):
        if not isinstance(words, str):
            raise ScheduleError(f'from_json: rank {rank}: expected text such as "0F0 0F1+1B0", got {words!r}.')
        actions.append([])
        for word in words.split():
            parts = word.split("+")
            if len(parts) > 2:
                raise ScheduleError(f"from_json: rank {rank}, {word!r}: only pairs overlap.")
            if len(parts) == 2:
                joined.append((rank, len(actions[rank])))
            for part in parts:
                try:
                    actions[rank].append(parse_action(part))
                except ScheduleError as error:
                    raise ScheduleError(f"from_json: rank {rank}: {error}") from error
    return Schedule.of(name, placement, microbatches, actions, joined)


def _field(data: dict[str, Any], name: str, kind: type) -> Any:
    value = data.get(name)
    if type(value) is not kind:
        raise ScheduleError(f"from_json: {name} must be of type {kind.__name__}, got {value!r}.")
    return value
