"""What a rank does once messages are in: steps, and programs of them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .schedule import Schedule

__all__ = ["Op", "Program", "Step"]


class Op(enum.IntEnum):
    """What a step does; the first four are those of `Kind`."""

    F = 0
    """Forward."""
    B = 1
    """Whole backward."""
    I = 2  # noqa: E741 -- the letter that papers use
    """Gradients of inputs only."""
    W = 3
    """Gradients of weights only."""
    SEND_F = 4
    """Send what the stage's forward made."""
    RECV_F = 5
    """Receive what the stage's forward takes."""
    SEND_B = 6
    """Send a gradient of what the stage's forward took."""
    RECV_B = 7
    """Receive a gradient of what the stage's forward made."""

    @property
    def is_message(self) -> bool:
        """Whether another rank takes part."""
        return self >= Op.SEND_F


class Step(NamedTuple):
    """A computation, or one end of a message."""

    op: Op
    """What is done."""
    stage: int
    """The stage of this rank."""
    microbatch: int
    """Number of the micro-batch."""
    peer: int = -1
    """The rank at the other end; -1 for a computation."""
    other: int = -1
    """The stage at the other end; -1 for a computation."""

    def __str__(self) -> str:
        text = f"{self.stage}{self.op.name}{self.microbatch}"
        return f"{text}{'>' if self.op in (Op.SEND_F, Op.SEND_B) else '<'}{self.other}" if self.op.is_message else text


@dataclass(frozen=True, slots=True)
class Program:
    """A schedule with its messages.

    Both actions of a joined pair follow on each other in the steps; messages between them come before or after both.
    """

    schedule: Schedule
    """What is computed; its order on each rank is that of the steps."""
    edges: tuple[tuple[int, int], ...]
    """(producer, consumer) stages between which values go."""
    grad_edges: tuple[tuple[int, int], ...]
    """Those of them on which gradients come back."""
    steps: Sequence[tuple[Step, ...]]
    """Per rank what it does, in order."""
