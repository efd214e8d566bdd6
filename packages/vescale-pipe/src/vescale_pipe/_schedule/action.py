"""One thing that a rank does for one stage and one micro-batch.

Written as torch writes it: `2F0` is the forward of stage 2 for micro-batch 0.
"""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

from ..errors import ScheduleError

__all__ = ["Action", "Kind", "parse_action"]

_TEXT = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)


class Kind(enum.IntEnum):
    """What is computed."""

    F = 0
    """Forward."""
    B = 1
    """Whole backward: gradients of inputs and of weights."""
    I = 2  # noqa: E741 -- the letter that papers use
    """Gradients of inputs only; a W comes later."""
    W = 3
    """Gradients of weights only."""


class Action(NamedTuple):
    """What is computed, for which stage and which micro-batch."""

    kind: Kind
    """Forward, backward, or a half of a backward."""
    stage: int
    """Number of the stage, from 0 at the inputs."""
    microbatch: int
    """Number of the micro-batch."""

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.name}{self.microbatch}"


def parse_action(text: str) -> Action:
    """Return the action that a text like `2F0` stands for.

    Raises:
        ScheduleError: it stands for none.

    Example:
        >>> parse_action("2F0")
        Action(kind=<Kind.F: 0>, stage=2, microbatch=0)
    """
    found = _TEXT.fullmatch(text.strip())
    if found is None:
        raise ScheduleError(
            f"action {text!r}: expected a stage, one of F, B, I, W, and a micro-batch, such as 2F0 or 0W3."
        )
    return Action(Kind[found[2]], int(found[1]), int(found[3]))
