"""The one sequence of collectives that all ranks follow, whatever each of them uses.

In a pass each unit is gathered once, and in a backward reduced once, in an order that was recorded on one rank and is
known to all. A rank that skips a unit gathers it all the same, since the others need its shard; a rank whose gradients
are late sends zeros and makes good for it at the end. So usage that differs between ranks can neither hang nor mix up
units.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from .._transport import Transport
from .unit import State, Unit

__all__ = ["Sequencer", "Trace", "steps_of"]


class Trace:
    """A running hash of the collectives of this rank; ranks that did the same have the same."""

    def __init__(self) -> None:
        self.value = 0

    def note(self, kind: str, unit: Unit) -> None:
        """Add a collective."""
        self.value = zlib.crc32(f"{kind}{unit.index}".encode(), self.value)


def steps_of(events: Sequence[int], ahead: int) -> tuple[list[int], dict[int, tuple[int, int]]]:
    """Turn what happened in a pass into the sequence of collectives for the next one.

    Args:
        events: `i` where unit i was first needed, `~i` where its gradients were complete.
        ahead: how many units are gathered before they are needed.

    Returns:
        The sequence: `i` to gather unit i, `~i` to reduce it. And for each unit, how much of the sequence is to be
        begun before it can be used, and how much when it is used.

    Example:
        >>> steps_of([2, ~2, 1, ~1, 0, ~0], ahead=1)
        ([2, 1, -3, 0, -2, -1], {2: (1, 2), 1: (2, 4), 0: (4, 5)})
    """
    needs = [event for event in events if event >= 0]
    steps: list[int] = []
    until: dict[int, tuple[int, int]] = {}
    gathered = 0
    for event in events:
        if event < 0:
            steps.append(event)
            continue
        place = needs.index(event)
        for stop in (place + 1, min(place + 1 + ahead, len(needs))):
            while gathered < stop:
                steps.append(needs[gathered])
                gathered += 1
            if event not in until:
                until[event] = (steps.index(event) + 1, 0)
        until[event] = (until[event][0], len(steps))
    return steps, until


class Sequencer:
    """Begins the collectives of a pass in their order, none later than it is needed."""

    def __init__(
        self,
        units: Sequence[Unit],
        transport: Transport,
        ahead: int,
        trace: Trace,
        reduce: Callable[[Unit], None],
    ) -> None:
        """Take the units.

        Args:
            units: all of them.
            transport: of the ranks among which they are sharded.
            ahead: how many units are gathered before they are needed.
            trace: where to note what is gathered.
            reduce: begins to reduce the gradients of a unit.
        """
        self._units, self._transport, self._ahead = units, transport, ahead
        self._trace, self._reduce = trace, reduce
        self._steps: list[int] = []
        self._until: dict[int, tuple[int, int]] = {}
        self._at = 0
        self._ready: set[int] = set()
        self._stays: Callable[[Unit], bool] = lambda unit: True
        self.events: list[int] = []
        """What happened in this pass, as `steps_of` takes it."""

    def begin(self, events: Sequence[int], stays: Callable[[Unit], bool], reduces: bool = False) -> None:
        """Begin a pass.

        Args:
            events: what all ranks expect: every unit once; and complete, once, in a backward.
            stays: whether a unit that is passed over stays gathered, since it may be needed later in this pass.
            reduces: whether gradients are reduced in this pass.
        """
        units = self._units
        expected = [
            event
            for event in events
            if (units[event].flats if event >= 0 else reduces and any(flat.trained for flat in units[~event].flats))
        ]
        self._steps, self._until = steps_of(expected, self._ahead)
        self._at, self._stays, self.events = 0, stays, []
        self._ready.clear()

    def need(self, unit: Unit) -> bool:
        """Have the parameters of a unit here when this returns, and those of the next ones on their way.

        Returns:
            Whether they had been here in this pass already and given back.
        """
        before, after = self._until.get(unit.index, (0, 0))
        if after and unit.index not in self.events:
            self.events.append(unit.index)
        again = False
        self._through(before)
        if unit.state is State.SHARDED and unit.flats:
            again = after > 0
            self._gather(unit)
        unit.wait()
        if after:
            self._through(after)
            self._pass_by(before)
        return again

    def complete(self, unit: Unit) -> None:
        """Note that all gradients of a unit are here."""
        if ~unit.index not in self.events:
            self.events.append(~unit.index)
        self.make_ready(unit)

    def make_ready(self, unit: Unit) -> None:
        """Let a unit be reduced when it is its turn."""
        self._ready.add(~unit.index)
        while self._at < len(self._steps) and self._steps[self._at] in self._ready:
            self._through(self._at + 1)

    def rest(self) -> None:
        """Begin all that is left, for the ranks that need it, and end the pass."""
        while self._at < len(self._steps):
            self._through(self._at + 1)
            self._pass_by(self._at)
        self._steps, self._until, self._at = [], {}, 0

    def stop(self) -> None:
        """End a pass that failed: finish what is under way."""
        self._steps, self._until, self._at = [], {}, 0
        for unit in self._units:
            unit.wait()

    def _gather(self, unit: Unit) -> None:
        self._trace.note("gather", unit)
        unit.gather(self._transport)

    def _through(self, stop: int) -> None:
        while self._at < stop:
            step = self._steps[self._at]
            self._at += 1
            if step < 0:
                self._reduce(self._units[~step])
            elif self._units[step].state is State.SHARDED:
                self._gather(self._units[step])

    def _pass_by(self, stop: int) -> None:
        for step in self._steps[:stop]:
            unit = self._units[max(step, ~step)]
            if step >= 0 and unit.state is State.GATHERING:
                unit.wait()
                if not self._stays(unit):
                    unit.free()
