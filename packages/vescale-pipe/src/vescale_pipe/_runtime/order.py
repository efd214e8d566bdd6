"""Which schedule the runtime follows: one that fits the model, in the order that keeps sums bitwise."""

from __future__ import annotations

from collections.abc import Sequence

from .._schedule import Action, Kind, Schedule
from .._schedule.check import problems
from ..errors import ScheduleError
from .wiring import GraphLike, Wiring, wire

__all__ = ["fit", "in_order", "one_device"]


def one_device(num_stages: int, num_microbatches: int) -> Schedule:
    """Return the schedule of one process that holds all stages: each micro-batch forward, then backward.

    Args:
        num_stages: stages.
        num_microbatches: micro-batches.

    Example:
        >>> [str(action) for action in one_device(2, 1).actions(0)]
        ['0F0', '1F0', '1B0', '0B0']
    """
    actions = []
    for microbatch in range(num_microbatches):
        actions += [Action(Kind.F, stage, microbatch) for stage in range(num_stages)]
        actions += [Action(Kind.B, stage, microbatch) for stage in reversed(range(num_stages))]
    return Schedule.of("one device", [0] * num_stages, num_microbatches, [actions])


def in_order(schedule: Schedule) -> Schedule:
    """Return a schedule whose backwards, and W, of each stage run in the order of the micro-batches.

    Gradients are then added as on one device. Schedules that are so already come back as they are; others, such as
    those that go backward from the last micro-batch to the first, get their micro-batches renumbered.

    Args:
        schedule: a valid one.
    """
    changed = False
    ranks = []
    for rank in range(schedule.num_ranks):
        actions = schedule.actions(rank)
        numbers: dict[tuple[int, bool], list[int]] = {}
        for kind, stage, microbatch in actions:
            if kind is not Kind.F:
                numbers.setdefault((stage, kind is Kind.W), []).append(microbatch)
        sorted_numbers = {key: iter(sorted(values)) for key, values in numbers.items()}
        changed |= any(values != sorted(values) for values in numbers.values())
        ranks.append(
            [
                action
                if action.kind is Kind.F
                else action._replace(microbatch=next(sorted_numbers[action.stage, action.kind is Kind.W]))
                for action in actions
            ]
        )
    if not changed:
        return schedule
    joined = [(rank, index) for rank in range(schedule.num_ranks) for index in schedule.joined(rank)]
    return Schedule.of(schedule.name, schedule.placement, schedule.num_microbatches, ranks, joined)


def fit(schedule: Schedule, graph: GraphLike) -> tuple[Schedule, Wiring]:
    """Return the schedule that runs a model, and its messages.

    Args:
        schedule: what is computed; backwards are put in the order of the micro-batches where that is valid.
        graph: the model in stages.

    Raises:
        ScheduleError: the schedule has another number of stages than the model.
    """
    stages: Sequence[object] = graph.stages
    if schedule.num_stages != len(stages):
        raise ScheduleError(
            f"schedule {schedule.name!r} has {schedule.num_stages} stages and the model {len(stages)}; "
            "cut the model into as many, or set chunks=."
        )
    wiring = wire(graph)
    if wiring.relayed:
        # Stages side by side may run in an order in which none of them can wait for another.
        direct = wire(graph, relay=False)
        if _wrong(schedule, wiring) and not _wrong(schedule, direct):
            wiring = direct
    ordered = in_order(schedule)
    if ordered is not schedule and not _wrong(ordered, wiring):
        schedule = ordered
    return schedule, wiring


def _wrong(schedule: Schedule, wiring: Wiring) -> bool:
    return bool(problems(schedule, edges=wiring.edges, grad_edges=wiring.grad_edges))
