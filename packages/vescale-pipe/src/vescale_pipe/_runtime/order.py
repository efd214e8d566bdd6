"""Which schedule the runtime follows: one that fits the model, in the order that keeps sums bitwise."""

from __future__ import annotations

from collections.abc import Sequence

from .._schedule import Action, Kind, Schedule
from .._schedule.check import problems
from ..errors import ScheduleError
from .wiring import GraphLike, Wiring, together, wire

__all__ = ["fit", "in_order", "misfit", "one_device"]


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


def fit(schedule: Schedule, graphs: Sequence[GraphLike], *, chained: bool = False) -> tuple[Schedule, list[Wiring]]:
    """Return the schedule that runs a model, and its messages.

    Args:
        schedule: what is computed; backwards are put in the order of the micro-batches where that is valid.
        graphs: the model in stages, for each kind of micro-batch of a step.
        chained: whether something goes from each stage to the next in any case.

    Returns:
        The schedule, and per graph its messages; all graphs have them on the same edges.

    Raises:
        ScheduleError: the schedule has another number of stages than the model.
    """
    for graph in graphs:
        if schedule.num_stages != len(graph.stages):
            raise ScheduleError(misfit(schedule.name, schedule.num_ranks, schedule.num_stages, len(graph.stages)))
    wirings = together([wire(graph) for graph in graphs], chained=chained)
    if any(one.relayed for one in wirings):
        # Stages side by side may run in an order in which none of them can wait for another.
        direct = together([wire(graph, relay=False) for graph in graphs], chained=chained)
        if _wrong(schedule, wirings[0]) and not _wrong(schedule, direct[0]):
            wirings = direct
    ordered = in_order(schedule)
    # One that is wrong stays as it is, for others to refuse: another order might be valid, but nobody asked for it.
    if ordered is not schedule and not _wrong(schedule, wirings[0]) and not _wrong(ordered, wirings[0]):
        schedule = ordered
    return schedule, wirings


def misfit(name: str, num_ranks: int, stages: int, cut: int) -> str:
    """Say that a schedule and a model have other numbers of stages, and what to do.

    Args:
        name: of the schedule.
        num_ranks: ranks of the pipeline.
        stages: of the schedule.
        cut: of the model.
    """
    each, rest = divmod(stages, num_ranks)
    per_rank = "" if rest else f", {each} on each of {num_ranks} rank{'s' * (num_ranks > 1)}"
    names = f"at= with {stages - 1} name{'s' * (stages != 2)}" if stages > 1 else "at=[]"
    todo = f"cut the model into {stages} ({names}, or num_stages={stages})"
    if cut % num_ranks == 0:
        todo += f", or take a schedule of {cut // num_ranks} a rank"
    return f"schedule {name!r} has {stages} stages{per_rank}, and the model {cut}: {todo}."


def _wrong(schedule: Schedule, wiring: Wiring) -> bool:
    return bool(problems(schedule, edges=wiring.edges, grad_edges=wiring.grad_edges))
