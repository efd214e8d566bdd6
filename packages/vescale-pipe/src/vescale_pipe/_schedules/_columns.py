"""Two ways to write the actions of a schedule without a Python object per action.

`interleave` is closed arithmetic for schedules whose ranks differ in two numbers only. `Row` repeats short patterns for
those that go through phases. Both cost a few tensor operations per rank or fewer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._schedule import Columns, Kind, Schedule

__all__ = ["Row", "Slots", "first_microbatches", "interleave", "loop", "vee"]

_CELL = re.compile(r"([FBIW])(\d)(\+?)")


@dataclass(frozen=True, slots=True)
class Slots:
    """In which order every rank goes through its (chunk, micro-batch) pairs; both 1-D int64, one entry a pair."""

    chunk: Tensor
    """Chunk of each slot."""
    microbatch: Tensor
    """Micro-batch of each slot."""


def loop(num_ranks: int, chunks: int) -> tuple[int, ...]:
    """Place stage s on rank s modulo the number of ranks.

    Example:
        >>> loop(2, 2)
        (0, 1, 0, 1)
    """
    return tuple(range(num_ranks)) * chunks


def vee(num_ranks: int) -> tuple[int, ...]:
    """Place two stages a rank: down the ranks and back up, so that rank 0 holds the first and the last stage.

    Example:
        >>> vee(3)
        (0, 1, 2, 2, 1, 0)
    """
    return (*range(num_ranks), *reversed(range(num_ranks)))


def interleave(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    forward: Slots,
    backward: Slots,
    ahead: Tensor,
    delay: Tensor | None = None,
) -> Schedule:
    """Write a schedule with looped placement: `ahead` forwards, then one backward and one forward in turn.

    Args:
        name: of the schedule.
        num_ranks: ranks.
        num_microbatches: micro-batches.
        forward: order of the forwards, the same on every rank.
        backward: order of the backwards, the same on every rank.
        ahead: int64 per rank: forwards before the first backward, from 1.
        delay: int64 per rank: input gradients that stand between an input gradient and its weight gradient, beyond
            the input gradient itself. None: whole backwards.
    """
    slots = forward.chunk.numel()
    chunks = slots // num_microbatches
    ranks = torch.arange(num_ranks).unsqueeze(1)
    slot = torch.arange(slots)
    ahead = ahead.unsqueeze(1)
    # The place of an action is how many actions of each kind stand before it.
    parts = [(Kind.B if delay is None else Kind.I, backward, slot + (ahead + slot).clamp(max=slots))]
    forwards = slot + (slot - ahead + 1).clamp(min=0)
    if delay is not None:
        delay = delay.unsqueeze(1)
        parts[0] = (Kind.I, backward, parts[0][2] + (slot - delay).clamp(min=0))
        weights = slot + (slot + delay + 1).clamp(max=slots) + (ahead + slot + delay).clamp(max=slots)
        parts.append((Kind.W, backward, weights))
        forwards += (slot - ahead + 1 - delay).clamp(min=0)
    parts.append((Kind.F, forward, forwards))
    size = (num_ranks, len(parts) * slots)
    kind = torch.empty(size, dtype=torch.uint8)
    stage, microbatch = torch.empty(size, dtype=torch.int32), torch.empty(size, dtype=torch.int32)
    for what, order, place in parts:
        kind.scatter_(1, place, int(what))
        stage.scatter_(1, place, (order.chunk * num_ranks + ranks).to(torch.int32))
        microbatch.scatter_(1, place, order.microbatch.to(torch.int32).expand(num_ranks, slots))
    joined = torch.zeros(size, dtype=torch.bool)
    columns = tuple(map(Columns, kind.unbind(), stage.unbind(), microbatch.unbind(), joined.unbind()))
    return Schedule(name, loop(num_ranks, chunks), num_microbatches, columns)


class Row:
    """Writes what one rank does, by patterns that are repeated; every chunk takes its micro-batches in order.

    Args:
        stages: stage of each chunk of the rank.

    Example:
        >>> row = Row([0, 3])
        >>> row.repeat(2, "F0 F1+B0")
        >>> row.columns().microbatch.tolist(), row.columns().stage.tolist()
        ([0, 0, 0, 1, 1, 1], [0, 3, 0, 0, 3, 0])
    """

    def __init__(self, stages: Sequence[int]) -> None:
        self._stages = stages
        self._next: Counter[tuple[Kind, int]] = Counter()
        self._blocks: list[Columns] = []

    def repeat(self, times: int, pattern: str) -> None:
        """Append a pattern: kind and chunk of each action, such as "F0 I1 W1"; "F0+B1" are joined.

        Args:
            times: how often; below 1 is never.
            pattern: what.
        """
        cells = [(Kind[kind], int(chunk), bool(plus)) for kind, chunk, plus in _CELL.findall(pattern)]
        if times < 1 or not cells:
            return
        first, keys, before = [], [], self._next.copy()
        for kind, chunk, _ in cells:
            # A weight gradient takes the first micro-batch that has none: whole backwards count for both.
            keys.append((Kind.I if kind is Kind.B else kind, chunk))
            first.append(self._next[keys[-1]])
            self._next.update([keys[-1], (Kind.W, chunk)] if kind is Kind.B else [keys[-1]])
        step = self._next - before
        steps = torch.tensor([step[key] for key in keys], dtype=torch.int32)
        rows = torch.arange(times, dtype=torch.int32).unsqueeze(1)
        self._blocks.append(
            Columns(
                torch.tensor([int(kind) for kind, _, _ in cells], dtype=torch.uint8).repeat(times),
                torch.tensor([self._stages[chunk] for _, chunk, _ in cells], dtype=torch.int32).repeat(times),
                (torch.tensor(first, dtype=torch.int32) + rows * steps).flatten(),
                torch.tensor([plus for _, _, plus in cells]).repeat(times),
            )
        )
        for key, count in step.items():
            self._next[key] += count * (times - 1)

    def columns(self) -> Columns:
        """Return what was written."""
        blocks = self._blocks
        return Columns(
            torch.cat([block.kind for block in blocks]),
            torch.cat([block.stage for block in blocks]),
            torch.cat([block.microbatch for block in blocks]),
            torch.cat([block.joined for block in blocks]),
        )


def first_microbatches(schedule: Schedule, count: int) -> Schedule:
    """Return a schedule without the micro-batches from `count` on; what is left keeps its order, so it stays valid."""
    if schedule.num_microbatches <= count:
        return schedule
    kept = []
    for columns in schedule.columns:
        keep = columns.microbatch < count
        # Of a joined pair only the first knows; it stays joined if its partner is still there.
        joined = columns.joined & keep & torch.cat([keep[1:], keep.new_zeros(1)])
        kept.append(Columns(columns.kind[keep], columns.stage[keep], columns.microbatch[keep], joined[keep]))
    return Schedule(schedule.name, schedule.placement, count, tuple(kept))
