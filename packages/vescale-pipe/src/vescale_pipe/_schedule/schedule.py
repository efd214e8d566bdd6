"""A schedule: which rank holds which stage, and what each rank does in which order.

Kept as columns of integers, so that one for a thousand ranks is a few tensors; actions are made when asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import ScheduleError
from .action import Action, Kind

__all__ = ["Columns", "Schedule"]

MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Columns:
    """What one rank does, in order; all columns are 1-D, of the same length, on the CPU."""

    kind: Tensor
    """uint8, values of `Kind`."""
    stage: Tensor
    """int32."""
    microbatch: Tensor
    """int32."""
    joined: Tensor
    """bool: whether the action overlaps with the next one, as in DualPipe; never two in a row, never the last."""

    def __len__(self) -> int:
        return self.kind.numel()


@dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """Who does what in which order in one step of a pipeline. Only computation: messages follow from it.

    Args:
        name: what it is called in messages and pictures.
        placement: rank of each stage, from stage 0 at the inputs; ranks are 0, 1, ... without a gap.
        num_microbatches: micro-batches of a step.
        columns: per rank what it does.

    Example:
        >>> from vescale_pipe import Action, Kind, Schedule
        >>> one = Schedule.of("tiny", [0], 1, [[Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)]])
        >>> one.num_ranks, one.num_stages, [str(action) for action in one.actions(0)]
        (1, 1, ['0F0', '0B0'])
    """

    name: str
    placement: tuple[int, ...]
    num_microbatches: int
    columns: tuple[Columns, ...]
    _made: dict[int, tuple[Action, ...]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        name: str,
        placement: Sequence[int],
        num_microbatches: int,
        actions: Sequence[Iterable[Action]],
        joined: Iterable[tuple[int, int]] = (),
    ) -> Schedule:
        """Make a schedule of lists of actions.

        Args:
            name: as in the class.
            placement: as in the class.
            num_microbatches: as in the class.
            actions: per rank its actions in order.
            joined: (rank, index) of actions that overlap with the one after them.

        Raises:
            ScheduleError: a number is negative or beyond 32 bits. Whether the schedule makes sense, `validate` tells.
        """
        columns = []
        for rank, some in enumerate(actions):
            rows = list(some)
            for row in rows:
                if not (0 <= row.stage <= MOST and 0 <= row.microbatch <= MOST):
                    raise ScheduleError(f"rank {rank}, {row}: stage and micro-batch must be from 0 to {MOST}.")
            columns.append(
                Columns(
                    torch.tensor([int(row.kind) for row in rows], dtype=torch.uint8),
                    torch.tensor([row.stage for row in rows], dtype=torch.int32),
                    torch.tensor([row.microbatch for row in rows], dtype=torch.int32),
                    torch.zeros(len(rows), dtype=torch.bool),
                )
            )
        for rank, index in joined:
            if not (0 <= rank < len(columns) and 0 <= index < len(columns[rank]) - 1):
                raise ScheduleError(f"joined: rank {rank} has no actions {index} and {index + 1}.")
            columns[rank].joined[index] = True
        return cls(name, tuple(placement), num_microbatches, tuple(columns))

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.columns)

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return len(self.placement)

    @property
    def num_actions(self) -> int:
        """Actions of all ranks."""
        return sum(map(len, self.columns))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank holds, in the order of their numbers."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def actions(self, rank: int) -> tuple[Action, ...]:
        """Return what a rank does, in order."""
        found = self._made.get(rank)
        if found is None:
            rows = self.columns[rank]
            kinds = tuple(Kind)
            found = tuple(
                Action(kinds[kind], stage, microbatch)
                for kind, stage, microbatch in zip(
                    rows.kind.tolist(), rows.stage.tolist(), rows.microbatch.tolist(), strict=True
                )
            )
            self._made[rank] = found
        return found

    def joined(self, rank: int) -> tuple[int, ...]:
        """Return the indexes of a rank's actions that overlap with the one after them."""
        return tuple(self.columns[rank].joined.nonzero().flatten().tolist())

    def __repr__(self) -> str:
        size = f"{self.num_ranks} ranks, {self.num_stages} stages, {self.num_microbatches} micro-batches"
        return f"<Schedule {self.name!r}: {size}, {self.num_actions} actions; `to_csv` shows them>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        if (self.placement, self.num_microbatches) != (other.placement, other.num_microbatches):
            return False
        return len(self.columns) == len(other.columns) and all(
            torch.equal(getattr(mine, name), getattr(theirs, name))
            for mine, theirs in zip(self.columns, other.columns, strict=True)
            for name in Columns.__slots__
        )

    __hash__ = None  # type: ignore[assignment]
