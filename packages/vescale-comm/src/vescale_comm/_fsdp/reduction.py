"""Reduces the gradients of units, and what ranks tell each other at the end of a backward.

That is one small exchange: which parameters were used, what came in too late, and whether all did the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .._transport import Transport
from ..errors import CommError, MismatchError
from .gradients import NOT_FINITE
from .sequence import Trace
from .unit import Unit

__all__ = ["Channels", "Reducer", "rows_of"]

IN_FLIGHT = 1
"""Units whose gradients are still sent while those of the next one come in."""
HEADER = 5
"""Bytes before those of units: four of the trace, one for a changed order."""


@dataclass(frozen=True, slots=True)
class Channels:
    """Transports of a sharded module."""

    shard: Transport
    """Among the ranks that share the parameters."""
    replicas: Transport | None
    """Among the ranks that hold the same shards; None: there are no others."""
    device: torch.device
    """Of buffers."""


class Reducer:
    """Reduces the gradients of units."""

    def __init__(self, units: Sequence[Unit], channels: Channels, trace: Trace) -> None:
        """Take the units.

        Args:
            units: all of them.
            channels: to the other ranks.
            trace: where to note what is reduced.
        """
        self._units, self._channels, self._trace = units, channels, trace
        self._flying: deque[Unit] = deque()

    def launch(self, unit: Unit) -> None:
        """Begin to reduce what came in of a unit; what did not counts as zeros."""
        self._trace.note("reduce", unit)
        self._collect(IN_FLIGHT - 1)
        self._flying.append(unit)
        for gradients in unit.gradients:
            if gradients.flat.trained:
                gradients.launch()

    def finish(self, is_order_new: bool) -> bool:
        """Agree with the other ranks, and hand the gradients to the shard parameters.

        Args:
            is_order_new: whether this rank used the units in another order than before.

        Returns:
            Whether any rank did.

        Raises:
            MismatchError: ranks did not gather and reduce the same units.
            CommError: a gradient is not finite, and that is checked.
        """
        rows = self._exchange(self._row(is_order_new))
        self._collect()
        self._check(rows)
        together = rows.amax(0).tolist()
        late = together[HEADER : HEADER + len(self._units)]
        for unit in self._units:
            if late[unit.index]:
                self.launch(unit)
        self._collect()
        self._place(together[HEADER + len(self._units) :])
        return bool(together[HEADER - 1])

    def stop(self) -> None:
        """End a backward that failed: finish what is under way and drop it."""
        self._flying.clear()
        for unit in self._units:
            for gradients in unit.gradients:
                gradients.abandon()

    def _collect(self, left: int = 0) -> None:
        while len(self._flying) > left:
            for gradients in self._flying.popleft().gradients:
                gradients.collect()

    def _row(self, is_order_new: bool) -> torch.Tensor:
        values = [*self._trace.value.to_bytes(4, "little"), int(is_order_new)]
        values += [int(any(gradients.waiting for gradients in unit.gradients)) for unit in self._units]
        for unit in self._units:
            for gradients in unit.gradients:
                values += gradients.state
        return torch.tensor(values, dtype=torch.uint8, device=self._channels.device)

    def _exchange(self, row: torch.Tensor) -> torch.Tensor:
        rows = rows_of(self._channels.shard, row)
        if self._channels.replicas is not None:
            # The rows of the own replica, which tell who differs from whom, and one row for each replica.
            own = torch.cat([row[: HEADER - 1], rows[:, HEADER - 1 :].amax(0)])
            rows = torch.cat([rows, rows_of(self._channels.replicas, own)])
        return rows.cpu()

    def _check(self, rows: torch.Tensor) -> None:
        traces = rows[:, : HEADER - 1].tolist()
        size = self._channels.shard.size
        others = [rank for rank in range(size) if traces[rank] != traces[0]]
        if others or any(trace != traces[0] for trace in traces):
            who = f"ranks {others} of the group" if others else "ranks of another replica"
            raise MismatchError(
                f"rank {self._channels.shard.rank}: {who} gathered or reduced other units than rank 0 since the last "
                f"backward, so gradients are worthless. All ranks must run the same number of forwards and backwards "
                f"of the whole module; which units each of them uses is free."
            )
        first = HEADER + len(self._units)
        bad = (rows[:, first:] == NOT_FINITE).nonzero().tolist()
        if bad:
            names = [entry.name for unit in self._units for g in unit.gradients for entry in g.flat.entries]
            where = ", ".join(sorted({f"{names[index]} (rank {row})" for row, index in bad if row < size}))
            raise CommError(
                f"Gradients that are not finite, before they were reduced: {where or 'on another replica'}."
            )

    def _place(self, states: Sequence[int]) -> None:
        every = [gradients for unit in self._units for gradients in unit.gradients]
        for gradients in every:
            gradients.start_others()
        at = 0
        for gradients in every:
            gradients.finish_others()
            count = len(gradients.state)
            gradients.place(states[at : at + count])
            at += count


def rows_of(transport: Transport, row: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks, one below the other."""
    buffer = row.repeat(transport.size)  # its own place is what matters; on a fake transport all others stay as here
    transport.all_gather(buffer).wait()
    return buffer.view(transport.size, -1)
