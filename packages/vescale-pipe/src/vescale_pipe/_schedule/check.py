"""Whether a schedule obeys the rules that make it run: all that is wrong, each with rank, action and rule.

Two actions that are joined start together: neither may need the other, and both wait until both may start.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import ScheduleError
from ._circle import blocked_text, circles
from ._edges import stage_edges
from ._form import check_form, check_rows
from ._given import need_schedule
from ._problem import Found, Problem, Rule, report
from ._rules import at, check_canonical, check_complete, check_memory, check_order, check_placement, name
from ._table import Table, first_places, make_table, select
from ._waits import Waits, edge_waits, join, own_waits, walk
from .schedule import Schedule

__all__ = ["Problem", "Rule", "problems", "validate"]

Edges = Iterable[tuple[int, int]]


def problems(
    schedule: Schedule,
    *,
    edges: Edges | None = None,
    grad_edges: Edges | None = None,
    memory: int | None = None,
    canonical: bool = False,
) -> list[Problem]:
    """Return all that is wrong with a schedule, by rule, rank and place.

    Args:
        schedule: what to check.
        edges: (producer, consumer) pairs of stages; by default each stage takes values of the one before it.
        grad_edges: those of them that a gradient comes back on; all of them by default.
        memory: most activations (of one stage and one micro-batch, from F to B or W) that a rank may keep.
        canonical: whether gradients must be added in the order of the micro-batches, so that sums are bitwise those
            of one device.

    Returns:
        Problems; none if the schedule is valid.

    Raises:
        ScheduleError: `edges` or `memory` makes no sense.

    Example:
        >>> from vescale_pipe import Action, Kind, Schedule, problems
        >>> for one in problems(Schedule.of("tiny", [0], 1, [[Action(Kind.B, 0, 0)]])):
        ...     print(one)
        rank 0, 0F0, rule COMPLETE: it is missing.
    """
    need_schedule(schedule, "problems")
    found = Found()
    _check(schedule, edges, grad_edges, memory, canonical, found)
    return found.sorted()


def validate(
    schedule: Schedule,
    *,
    edges: Edges | None = None,
    grad_edges: Edges | None = None,
    memory: int | None = None,
    canonical: bool = False,
) -> None:
    """Raise an error that tells all that is wrong with a schedule; of many problems, the first 20.

    Args:
        schedule: as in `problems`.
        edges: as in `problems`.
        grad_edges: as in `problems`.
        memory: as in `problems`.
        canonical: as in `problems`.

    Raises:
        ScheduleError: it breaks a rule, or an argument makes no sense.

    Example:
        >>> from vescale_pipe import Action, Kind, Schedule, validate
        >>> validate(Schedule.of("tiny", [0], 1, [[Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)]]))
    """
    need_schedule(schedule, "validate")
    found = Found(most=20)
    _check(schedule, edges, grad_edges, memory, canonical, found)
    if found.total:
        what = (
            f"schedule {schedule.name!r} ({schedule.num_ranks} ranks, {schedule.num_stages} stages, "
            f"{schedule.num_microbatches} micro-batches)"
        )
        raise ScheduleError(report(what, found.sorted(), found.total))


def _check(
    schedule: Schedule,
    edges: Edges | None,
    grad_edges: Edges | None,
    memory: int | None,
    canonical: bool,
    found: Found,
) -> None:
    """Add all problems to `found`."""
    if memory is not None and memory < 1:
        raise ScheduleError(f"memory: {memory} activations; a rank keeps at least 1 while it works.")
    forward = stage_edges(edges, schedule.num_stages)
    backward = forward if grad_edges is None else stage_edges(grad_edges, schedule.num_stages)
    if not set(backward) <= set(forward):
        extra = sorted(set(backward) - set(forward))
        raise ScheduleError(f"grad_edges: {extra[:8]} are not among the edges.")
    if not check_form(schedule, found):
        return
    table = make_table(schedule)
    good = check_rows(schedule, table, found)
    if not bool(good.all()):
        table = select(table, good)
    check_placement(schedule, table, found)
    cells = schedule.num_stages * schedule.num_microbatches
    if cells > 4 * len(table) + 1024:
        # Tables over all cells could be far larger than the schedule itself.
        text = (
            f"{schedule.num_stages} stages x {schedule.num_microbatches} micro-batches need at least {cells} actions; "
            f"there are {len(table)}."
        )
        found.add(Problem(-1, -1, None, Rule.COMPLETE, text))
        return
    where, repeats = first_places(table, schedule.num_stages, schedule.num_microbatches)
    check_complete(schedule, table, where, repeats, found)
    own, data = own_waits(where), edge_waits(where, forward, backward)
    check_order(table, own, Rule.LOCAL_ORDER, found)
    check_order(table, data, Rule.DATA_ORDER, found)
    _check_cycles(table, join((own, data)), schedule.num_ranks, found)
    if canonical:
        check_canonical(table, where, found)
    if memory is not None:
        check_memory(schedule, table, where, memory, found)


def _check_cycles(table: Table, waits: Waits, num_ranks: int, found: Found) -> None:
    """Ranks come to their ends; orders on one rank that are wrong were told before and do not count here."""
    done = walk(table, waits, num_ranks)
    if not done.blocked:
        return
    stops = {
        rank: (int(done.waits.consumer[place]), int(done.waits.producer[place])) for rank, place in done.blocked.items()
    }
    waits_for = {rank: int(table.rank[producer]) for rank, (_, producer) in stops.items()}
    for circle in circles(waits_for):
        comes_from = dict(zip(circle[1:] + circle[:1], circle, strict=True))

        def tell(rank: int, comes_from: dict[int, int] = comes_from) -> str:
            consumer, producer = stops[rank]
            awaited = stops[comes_from[rank]][1]
            text = f"rank {rank} stops at {name(table, consumer)}"
            if awaited != consumer:
                together = int(table.unit[awaited]) == int(table.unit[consumer])
                text += f", {'joined with' if together else 'before'} {name(table, awaited)}"
            return f"{text}, and needs {table.action(producer)} of rank {int(table.rank[producer])}"

        blocked = {rank: str(table.action(consumer)) for rank, (consumer, _) in stops.items()}
        found.add(at(table, stops[circle[0]][0], Rule.CYCLE, blocked_text(circle, tell, blocked)))
