"""Costs of the stages of a schedule from costs that were given for finer pieces, or for whole ranks."""

from __future__ import annotations

from dataclasses import replace

from .._simulate import Costs
from ..errors import ScheduleError
from ._listing import Task

__all__ = ["costs_per_stage", "make_task"]

ADDED = ("forward", "backward", "input_grad", "weight_grad", "activation", "kept_for_weights")
"""What a stage costs is the sum of what its pieces cost; of `message_bytes` that of its last piece counts."""


def costs_per_stage(costs: Costs, num_ranks: int, chunks: int) -> Costs:
    """Return what the stages of a schedule with so many chunks cost.

    Args:
        costs: of pieces of the model, one after the other: as many as its sequences have numbers, or else one a rank. A
            number stands for each piece.
        num_ranks: ranks.
        chunks: stages a rank.

    Returns:
        Costs of the num_ranks * chunks stages, each of so many pieces in a row; where only numbers are given pieces are
        cut evenly too.

    Raises:
        ScheduleError: the pieces do not divide evenly into stages, or sequences have different lengths.

    Example:
        >>> from vescale_pipe import Costs
        >>> costs_per_stage(Costs(forward=[1.0, 2.0, 3.0, 4.0]), 2, 1).forward
        (3.0, 7.0)
        >>> costs_per_stage(Costs(forward=1.0), 2, 2).forward
        0.5
    """
    given = {name: getattr(costs, name) for name in (*ADDED, "message_bytes")}
    lengths = {name: len(value) for name, value in given.items() if isinstance(value, tuple)}
    if not lengths:
        return costs.divided(chunks)
    stages, pieces = num_ranks * chunks, max(lengths.values())
    if min(lengths.values()) != pieces:
        raise ScheduleError(f"costs: sequences must have one length; given are {lengths}.")
    if pieces % stages:
        raise ScheduleError(
            f"costs are given for {pieces} pieces, which do not divide evenly into {stages} stages ({num_ranks} ranks "
            f"x {chunks} chunks): give them for a multiple of {stages}, or other chunks."
        )
    size = pieces // stages
    changes: dict[str, float | tuple[float, ...] | None] = {}
    for name, value in given.items():
        if name == "message_bytes":
            changes[name] = value[size - 1 :: size] if isinstance(value, tuple) else value
        elif isinstance(value, tuple):
            changes[name] = tuple(sum(value[first : first + size]) for first in range(0, pieces, size))
        elif value is not None:
            changes[name] = value * size
    return replace(costs, **changes)  # type: ignore[arg-type]


def make_task(placement: tuple[int, ...], num_microbatches: int, costs: Costs) -> Task:
    """Return the numbers that list scheduling needs.

    Args:
        placement: rank of each stage.
        num_microbatches: micro-batches.
        costs: of these stages.
    """
    stages = len(placement)
    speed = costs.speeds(max(placement) + 1)[list(placement)]
    seconds = costs.seconds(stages) / speed
    transfer = costs.transfer(stages).tolist()
    kept, later = costs.memory(stages)
    hop = [
        0.0 if here == there else costs.latency + seconds
        for here, there, seconds in zip(placement, placement[1:], transfer, strict=False)
    ]
    return Task(
        placement,
        num_microbatches,
        tuple(tuple(row) for row in seconds.tolist()),
        (*hop, 0.0),
        tuple(kept.tolist()),
        tuple(later.tolist()),
    )
