"""What can be wrong with a schedule, and a list of it that stays short for schedules of millions of actions."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from .action import Action

__all__ = ["Found", "Problem", "Rule", "report"]

MOST_SHOWN = 20


class Rule(enum.IntEnum):
    """What a schedule must obey."""

    FORM = 0
    """Columns have their types and lengths, kinds are F, B, I, W, pairs are pairs."""
    PLACEMENT = 1
    """Every stage is on one rank, every rank holds a stage, and an action is on the rank of its stage."""
    COMPLETE = 2
    """Per stage and micro-batch one F, and one B or one I and one W; or F only in the whole schedule."""
    LOCAL_ORDER = 3
    """F before B or I before W, of one stage and micro-batch."""
    DATA_ORDER = 4
    """On one rank: what makes a value, or its gradient, before what takes it."""
    CYCLE = 5
    """Ranks do not wait for each other in a circle."""
    CANONICAL = 6
    """Gradients of a stage are added in the order of the micro-batches, as one device does."""
    MEMORY = 7
    """No rank keeps more activations than it may."""
    MESSAGES = 8
    """What goes to another rank has one SEND and one RECV, in an order that cannot block for ever."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and where."""

    rank: int
    """Rank where it is; -1 where it is about the whole schedule."""
    index: int
    """Place in the list of that rank; -1 where something is missing or no single action is at fault."""
    action: Action | None
    """The action at fault, or the one that is missing."""
    rule: Rule
    """What it breaks."""
    text: str
    """What is wrong and what to do."""

    def __str__(self) -> str:
        where = [f"rank {self.rank}"] if self.rank >= 0 else []
        if self.action is not None:
            where.append(str(self.action))
        if self.index >= 0:
            where.append(f"index {self.index}")
        return f"{', '.join([*where, f'rule {self.rule.name}'])}: {self.text}"


class Found:
    """Collects problems; counts all of them, and makes at most so many per rule."""

    def __init__(self, most: int | None = None) -> None:
        self.items: list[Problem] = []
        self.total = 0
        self._most = most
        self._made = dict.fromkeys(Rule, 0)

    def add(self, problem: Problem) -> None:
        """Take one."""
        self.total += 1
        if self._most is None or self._made[problem.rule] < self._most:
            self._made[problem.rule] += 1
            self.items.append(problem)

    def add_all(self, rule: Rule, places: Tensor, make: Callable[[int], Problem]) -> None:
        """Take one per place; `make` makes it, for as many as are wanted.

        Args:
            rule: the rule of all of them.
            places: integers, 1-D.
            make: from a place to the problem there.
        """
        room = places.numel() if self._most is None else max(0, self._most - self._made[rule])
        few = places[:room].tolist()
        self.total += places.numel()
        self._made[rule] += len(few)
        self.items.extend(map(make, few))

    def sorted(self) -> list[Problem]:
        """Return them by rule, rank and place."""
        return sorted(self.items, key=lambda one: (one.rule, one.rank, one.index))


def report(what: str, found: Sequence[Problem], total: int) -> str:
    """Return the text of an error.

    Args:
        what: what was checked.
        found: the problems, at least as many as are shown.
        total: how many there are.
    """
    lines = [f"{what}: {total} problem{'' if total == 1 else 's'}"]
    lines += [f"  {one}" for one in found[:MOST_SHOWN]]
    if total > MOST_SHOWN:
        lines.append(f"  ... and {total - MOST_SHOWN} more")
    return "\n".join(lines)
