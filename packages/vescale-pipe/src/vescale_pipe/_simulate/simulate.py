"""Simulation of a schedule: when everything happens if the actions cost what they are said to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from torch import Tensor

from .._schedule import Schedule
from .._schedule._given import need_schedule
from ..errors import ScheduleError
from . import scalar, waves
from .costs import Costs
from .graph import encode
from .result import Simulation

__all__ = ["simulate"]

MANY_RANKS = 64
"""From so many ranks on, waves are faster than one action after another."""


def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    edges: Iterable[tuple[int, int]] | None = None,
    *,
    durations: Sequence[Tensor] | None = None,
    method: Literal["auto", "scalar", "waves"] = "auto",
) -> Simulation:
    """Work out when each action starts and ends if each rank does its actions in order, each as early as it can.

    A forward waits for the forwards of the stages that it takes from, a backward for those of the stages it gave to,
    where the schedule has them. What comes from another rank takes `latency` and, at a bandwidth, its bytes; on "fifo"
    links a message waits until those sent before it to the same rank have gone. Sending and receiving cost the ranks
    nothing. `validate` finds more than this checks.

    Args:
        schedule: what to simulate.
        costs: what actions and messages cost; None: `Costs()`.
        edges: (producer stage, consumer stage); None: each stage gives to the next.
        durations: per rank the seconds of each of its actions, such as measured ones, in place of those of `costs`;
            float, as many as the rank has actions.
        method: "scalar": one action at a time; "waves": all ranks at once; "auto": what is faster. The numbers are
            equal.

    Raises:
        ScheduleError: an action is there twice, is on a wrong rank, comes before one of its rank that must precede it,
            or takes what no action gives; or ranks wait for each other for ever.
        ValueError: numbers of `costs`, `edges` or `durations` do not fit the schedule; `method` is unknown.

    Example:
        >>> from vescale_pipe import Schedule, parse_action, simulate
        >>> rows = ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
        >>> actions = [[parse_action(text) for text in row.split()] for row in rows]
        >>> done = simulate(Schedule.of("1f1b", [0, 1], 2, actions))
        >>> done.makespan, round(done.bubble, 3), done.peak
        (9.0, 0.333, (2.0, 1.0))
    """
    if isinstance(schedule, Costs):
        raise ScheduleError("simulate: costs were given first; the order is simulate(schedule, costs).")
    need_schedule(schedule, "simulate")
    costs = Costs() if costs is None else costs
    if not isinstance(costs, Costs):
        raise ScheduleError(
            f"simulate: costs must be a Costs, such as Costs(forward=1.0), and {costs!r:.100} was given."
        )
    if method not in ("auto", "scalar", "waves"):
        raise ValueError(f'method: {method!r} given; it must be "auto", "scalar" or "waves".')
    edges = None if edges is None else tuple(edges)
    graph = encode(schedule, costs, edges, durations)
    by_waves = method == "waves" or (method == "auto" and schedule.num_ranks >= MANY_RANKS)
    unit_start, unit_end = (waves if by_waves else scalar).run(graph)
    lengths = [len(rows) for rows in schedule.columns]
    return Simulation(
        schedule=schedule,
        costs=costs,
        edges=edges,
        start=unit_start[graph.unit].split(lengths),
        end=unit_end[graph.unit].split(lengths),
        durations=None if durations is None else tuple(durations),
        graph=graph,
        unit_start=unit_start,
        unit_end=unit_end,
    )
