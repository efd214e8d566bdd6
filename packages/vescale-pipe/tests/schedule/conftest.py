"""Random valid schedules: random executions of what depends on what."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from vescale_pipe._schedule import Action, Kind, Schedule

Place = tuple[int, int]


@dataclass
class Case:
    """Lists that a schedule is made of, to be changed by tests."""

    placement: list[int]
    microbatches: int
    edges: list[tuple[int, int]]
    actions: list[list[Action]]
    joined: list[Place]

    def schedule(self) -> Schedule:
        return Schedule.of("random", self.placement, self.microbatches, self.actions, self.joined)


def random_case(seed: int, *, chain: bool = False, forward_only: bool = False, pairs: float = 0.2) -> Case:
    """Return a valid schedule of 1 to 4 ranks, 1 to 3 stages each on average, and 1 to 5 micro-batches."""
    rng = random.Random(seed)
    ranks = rng.randint(1, 4)
    stages = ranks + rng.randint(0, ranks * 2)
    placement = [*range(ranks), *(rng.randrange(ranks) for _ in range(stages - ranks))]
    rng.shuffle(placement)
    edges = [(stage, stage + 1) for stage in range(stages - 1)]
    if not chain:
        edges = [(p, c) for c in range(stages) for p in range(c) if rng.random() < (0.7 if c == p + 1 else 0.2)]
    microbatches = rng.randint(1, 5)
    needs: dict[Action, list[Action]] = {}
    backward = {
        (s, m): rng.choice((Kind.B, Kind.I)) for s in range(stages) for m in range(microbatches) if not forward_only
    }
    for s in range(stages):
        for m in range(microbatches):
            needs[Action(Kind.F, s, m)] = [Action(Kind.F, p, m) for p, c in edges if c == s]
            if forward_only:
                continue
            kind = backward[s, m]
            needs[Action(kind, s, m)] = [Action(Kind.F, s, m)]
            needs[Action(kind, s, m)] += [Action(backward[c, m], c, m) for p, c in edges if p == s]
            if kind == Kind.I:
                needs[Action(Kind.W, s, m)] = [Action(Kind.I, s, m)]
    done: set[Action] = set()
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    joined = []
    while len(done) < len(needs):
        ready = [action for action in needs if action not in done and done.issuperset(needs[action])]
        first = rng.choice(ready)
        rank = placement[first.stage]
        others = [action for action in ready if action != first and placement[action.stage] == rank]
        lists[rank].append(first)
        done.add(first)
        if others and rng.random() < pairs:
            joined.append((rank, len(lists[rank]) - 1))
            second = rng.choice(others)
            lists[rank].append(second)
            done.add(second)
    return Case(placement, microbatches, edges, lists, joined)


@pytest.fixture(scope="session")
def make_case() -> Callable[..., Case]:
    return random_case
