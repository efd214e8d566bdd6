"""Whether a program, of whatever origin, has the right messages and can never block.

The check takes each SEND as one that waits for its RECV, on channels that keep their order: what passes runs on any
transport.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ..errors import ScheduleError
from ._circle import blocked_text, circles
from ._problem import Found, Problem, Rule, report
from ._program import Op, Program, Step
from .action import Action, Kind
from .schedule import Schedule

__all__ = ["check_messages", "recheck"]

# (direction, producer stage, consumer stage, micro-batch): producer and consumer of the message
Key = tuple[str, int, int, int]
_BACKWARD = (Op.B, Op.I)


def recheck(program: Program) -> None:
    """Raise an error unless a program has all its messages, once each, in an order that always comes to its end.

    Steps of a rank run one after the other, and a SEND is over when its RECV is. Then: does every rank end? Are SENDs
    and RECVs of a channel (from, to, direction) in the same order? (Rule 8 of `Rule`.)

    Args:
        program: what `lower` made, or another one.

    Raises:
        ScheduleError: a message is missing, doubled, wrong or at the wrong place, or ranks wait for each other.

    Example:
        >>> from vescale_pipe import Action, Kind, Schedule, lower, recheck
        >>> tiny = Schedule.of("tiny", [0, 1], 1, [[Action(Kind.F, 0, 0)], [Action(Kind.F, 1, 0)]])
        >>> recheck(lower(tiny))
    """
    if isinstance(program, Schedule):
        raise ScheduleError("recheck: a Schedule was given, which has no messages yet: recheck(lower(schedule)).")
    found = Found()
    check_messages(program, found)
    if not found.total:
        _check_channels(program, found)
        _check_run(program, found)
    if found.total:
        raise ScheduleError(report(f"program of schedule {program.schedule.name!r}", found.sorted(), found.total))


def key(step: Step) -> Key:
    """Return the message that a step is an end of."""
    direction = "F" if step.op in (Op.SEND_F, Op.RECV_F) else "B"
    ends = (step.stage, step.other) if step.op in (Op.SEND_F, Op.SEND_B) else (step.other, step.stage)
    return (direction, *ends, step.microbatch)


def _problem(rank: int, index: int, step: Step | None, text: str) -> Problem:
    return Problem(rank, index, None, Rule.MESSAGES, text if step is None else f"{step}: {text}")


def wanted(program: Program) -> Iterator[Key]:
    """Return the messages that a program needs."""
    placement = program.schedule.placement
    forward_only = not any(bool((columns.kind != Kind.F).any()) for columns in program.schedule.columns)
    for microbatch in range(program.schedule.num_microbatches):
        for producer, consumer in program.edges:
            if placement[producer] != placement[consumer]:
                yield ("F", producer, consumer, microbatch)
        for producer, consumer in () if forward_only else program.grad_edges:
            if placement[producer] != placement[consumer]:
                yield ("B", consumer, producer, microbatch)


def check_messages(program: Program, found: Found) -> None:
    """Add what is wrong with single messages, and computations that are not those of the schedule."""
    placement = program.schedule.placement
    need = set(wanted(program))
    seen: dict[tuple[Op, Key], tuple[int, int]] = {}
    if len(program.steps) != program.schedule.num_ranks:
        text = f"it has steps of {len(program.steps)} ranks; the schedule has {program.schedule.num_ranks}."
        found.add(_problem(-1, -1, None, text))
        return
    for rank, steps in enumerate(program.steps):
        actions = [Action(Kind(int(op)), stage, microbatch) for op, stage, microbatch, *_ in steps if op < Op.SEND_F]
        if tuple(actions) != program.schedule.actions(rank):
            found.add(_problem(rank, -1, None, "its computations are not those of the schedule, in their order."))
        computed = {(step.op, step.stage, step.microbatch): index for index, step in enumerate(steps)}
        for index, step in enumerate(steps):
            if not step.op.is_message:
                continue
            message = key(step)
            if message not in need:
                found.add(_problem(rank, index, step, "no edge between ranks needs this message; drop it."))
            elif placement[step.stage] != rank or placement[step.other] != step.peer:
                text = (
                    f"stage {step.stage} is on rank {placement[step.stage]} and stage {step.other} on rank "
                    f"{placement[step.other]}; the step is on rank {rank} with peer {step.peer}."
                )
                found.add(_problem(rank, index, step, text))
            elif (step.op, message) in seen:
                found.add(_problem(rank, index, step, "it is there twice; drop one."))
            else:
                _check_place(rank, index, step, computed, found)
            seen.setdefault((step.op, message), (rank, index))
    for message in sorted(need):
        direction, producer, consumer, microbatch = message
        for op, stage, other in (
            (Op.SEND_F if direction == "F" else Op.SEND_B, producer, consumer),
            (Op.RECV_F if direction == "F" else Op.RECV_B, consumer, producer),
        ):
            if (op, message) not in seen:
                lost = Step(op, stage, microbatch, placement[other], other)
                found.add(_problem(placement[stage], -1, lost, "it is missing."))


def _check_place(rank: int, index: int, step: Step, computed: dict[tuple[Op, int, int], int], found: Found) -> None:
    """A SEND comes after what makes its value, a RECV before what takes it."""
    kinds = (Op.F,) if step.op in (Op.SEND_F, Op.RECV_F) else _BACKWARD
    places = [
        computed[kind, step.stage, step.microbatch] for kind in kinds if (kind, step.stage, step.microbatch) in computed
    ]
    sends = step.op in (Op.SEND_F, Op.SEND_B)
    for place in places:
        if (place > index) if sends else (place < index):
            text = f"it must come {'after' if sends else 'before'} the computation at index {place}."
            found.add(_problem(rank, index, step, text))


def _check_channels(program: Program, found: Found) -> None:
    """SENDs of a channel are in the order of its RECVs."""
    sends: dict[tuple[int, int, str], list[Key]] = {}
    receives: dict[tuple[int, int, str], list[tuple[int, Step]]] = {}
    for rank, steps in enumerate(program.steps):
        for index, step in enumerate(steps):
            if step.op in (Op.SEND_F, Op.SEND_B):
                sends.setdefault((rank, step.peer, key(step)[0]), []).append(key(step))
            elif step.op.is_message:
                receives.setdefault((step.peer, rank, key(step)[0]), []).append((index, step))
    for channel, messages in sends.items():
        for place, (index, step) in enumerate(receives[channel]):
            if key(step) != messages[place]:
                text = (
                    f"the message number {place} from rank {channel[0]} is sent for micro-batch {messages[place][3]} "
                    f"between stages {messages[place][1]} and {messages[place][2]}; receive in the order of the SENDs."
                )
                found.add(_problem(channel[1], index, step, text))
                break


def _check_run(program: Program, found: Found) -> None:
    """Run all ranks; a message needs both of its ends at the same time."""
    steps = program.steps
    heads = [0] * len(steps)
    todo = deque(range(len(steps)))
    while todo:
        rank = todo.popleft()
        mine = steps[rank]
        while heads[rank] < len(mine):
            step = mine[heads[rank]]
            if step.op.is_message:
                peer = step.peer
                if heads[peer] >= len(steps[peer]):
                    break
                other = steps[peer][heads[peer]]
                if not other.op.is_message or key(other) != key(step):
                    break
                heads[peer] += 1
                todo.append(peer)
            heads[rank] += 1
    blocked = {rank: steps[rank][head] for rank, head in enumerate(heads) if head < len(steps[rank])}
    names = {rank: f"{step} (index {heads[rank]})" for rank, step in blocked.items()}
    for circle in circles({rank: step.peer for rank, step in blocked.items()}):

        def tell(rank: int) -> str:
            return f"rank {rank} is at {names[rank]} and waits for rank {blocked[rank].peer}"

        first = circle[0]
        found.add(_problem(first, heads[first], blocked[first], blocked_text(circle, tell, names)))
