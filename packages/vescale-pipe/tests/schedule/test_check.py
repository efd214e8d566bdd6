"""Rules: random valid schedules pass, changed ones are refused with the rule and the action at fault."""

from __future__ import annotations

import graphlib
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_pipe._schedule import (
    Action,
    Kind,
    Problem,
    Rule,
    _waits,
    problems,
    validate,
)
from vescale_pipe.errors import ScheduleError

Place = tuple[int, int]
Told = tuple[Rule, int, int, Action | None]
MANY = settings(max_examples=150, deadline=None)
SEEDS = st.integers(0, 2**32 - 1)


def told(found: list[Problem]) -> set[Told]:
    return {(one.rule, one.rank, one.index, one.action) for one in found}


class Oracle:
    """The rules as slowly and plainly as they can be said."""

    def __init__(self, case: Any, memory: int | None = None) -> None:
        self.case = case
        self.told: set[Told] = set()
        self.first: dict[Action, Place] = {}
        stages, microbatches = len(case.placement), case.microbatches
        for rank, rows in enumerate(case.actions):
            for index, action in enumerate(rows):
                if action.stage >= stages:
                    self.told.add((Rule.PLACEMENT, rank, index, action))
                if action.microbatch >= microbatches:
                    self.told.add((Rule.COMPLETE, rank, index, action))
                if action.stage >= stages or action.microbatch >= microbatches:
                    continue
                if case.placement[action.stage] != rank:
                    self.told.add((Rule.PLACEMENT, rank, index, action))
                if action in self.first:
                    self.told.add((Rule.COMPLETE, rank, index, action))
                self.first.setdefault(action, (rank, index))
        self.complete()
        self.needs = self.order()
        self.graph = self.waits()
        self.canonical()
        if memory is not None:
            self.memory(memory)

    def there(self, kind: Kind, stage: int, microbatch: int) -> Action | None:
        action = Action(kind, stage, microbatch)
        return action if action in self.first else None

    def complete(self) -> None:
        some_backward = any(action.kind != Kind.F for action in self.first)
        for stage, rank in enumerate(self.case.placement):
            for microbatch in range(self.case.microbatches):
                f, b, i, w = (self.there(kind, stage, microbatch) is not None for kind in Kind)
                lost = [] if f else [Kind.F]
                if some_backward:
                    if not (b or i or w):
                        lost.append(Kind.B)
                    elif not b:
                        lost += ([] if i else [Kind.I]) + ([] if w else [Kind.W])
                    elif i or w:
                        action = Action(Kind.B, stage, microbatch)
                        self.told.add((Rule.COMPLETE, *self.first[action], action))
                for kind in lost:
                    self.told.add((Rule.COMPLETE, rank, -1, Action(kind, stage, microbatch)))

    def unit(self, action: Action) -> Place:
        rank, index = self.first[action]
        return (rank, index - 1) if (rank, index - 1) in self.case.joined else (rank, index)

    def order(self) -> list[tuple[Action, Action]]:
        """Return what needs what, without what is wrong already on one rank."""

        def backward(stage: int, microbatch: int) -> Action | None:
            return self.there(Kind.B, stage, microbatch) or self.there(Kind.I, stage, microbatch)

        pairs: list[tuple[Rule, Action | None, Action | None]] = []
        for m in range(self.case.microbatches):
            for s in range(len(self.case.placement)):
                f, b, i, w = (self.there(kind, s, m) for kind in Kind)
                pairs += [(Rule.LOCAL_ORDER, b, f), (Rule.LOCAL_ORDER, i, f), (Rule.LOCAL_ORDER, w, i or f)]
            for p, c in self.case.edges:
                pairs.append((Rule.DATA_ORDER, self.there(Kind.F, c, m), self.there(Kind.F, p, m)))
                pairs.append((Rule.DATA_ORDER, backward(p, m), backward(c, m)))
        needs = []
        for rule, consumer, producer in pairs:
            if consumer is None or producer is None:
                continue
            mine, other = self.unit(consumer), self.unit(producer)
            if mine[0] == other[0] and mine[1] <= other[1]:
                self.told.add((rule, *self.first[consumer], consumer))
            else:
                needs.append((consumer, producer))
        return needs

    def waits(self) -> dict[Place, set[Place]]:
        graph: dict[Place, set[Place]] = {}
        for rank, rows in enumerate(self.case.actions):
            units = [(rank, index) for index in range(len(rows)) if (rank, index - 1) not in self.case.joined]
            for before, after in itertools.pairwise(units):
                graph.setdefault(after, set()).add(before)
        for consumer, producer in self.needs:
            graph.setdefault(self.unit(consumer), set()).add(self.unit(producer))
        return graph

    def canonical(self) -> None:
        self.uncanonical: set[Told] = set()
        for stage in range(len(self.case.placement)):
            for half in (Kind.I, Kind.W):
                rows = []
                for microbatch in range(self.case.microbatches):
                    action = self.there(Kind.B, stage, microbatch) or self.there(half, stage, microbatch)
                    if action is not None:
                        rows.append(action)
                for place, action in enumerate(rows):
                    if any(self.first[earlier] > self.first[action] for earlier in rows[:place]):
                        self.uncanonical.add((Rule.CANONICAL, *self.first[action], action))

    def memory(self, most: int) -> None:
        if all(action.kind == Kind.F for action in self.first):
            return
        for rank, rows in enumerate(self.case.actions):
            live: set[Place] = set()
            for index, action in enumerate(rows):
                if action.kind == Kind.F:
                    live.add(action[1:])
                elif action.kind in (Kind.B, Kind.W):
                    live.discard(action[1:])
                if len(live) > most:
                    self.told.add((Rule.MEMORY, rank, index, action))
                    break

    @property
    def has_cycle(self) -> bool:
        try:
            graphlib.TopologicalSorter(self.graph).prepare()
        except graphlib.CycleError:
            return True
        return False

    def in_cycle(self, action: Action) -> bool:
        start = self.unit(action)
        todo, seen = list(self.graph.get(start, ())), set()
        while todo:
            one = todo.pop()
            if one == start:
                return True
            if one not in seen:
                seen.add(one)
                todo += self.graph.get(one, ())
        return False


def compare(case: Any) -> set[Told]:
    """Check all problems of a case against the oracle; return them."""
    oracle = Oracle(case)
    found = problems(case.schedule(), edges=case.edges)
    cycles = [one for one in found if one.rule == Rule.CYCLE]
    assert told([one for one in found if one.rule != Rule.CYCLE]) == oracle.told
    assert bool(cycles) == oracle.has_cycle
    for one in cycles:
        assert one.action is not None
        assert oracle.in_cycle(one.action)
        assert case.actions[one.rank][one.index] == one.action
    return told(found)


@MANY
@given(seed=SEEDS, forward_only=st.booleans())
def test_random_executions_are_valid(make_case: Callable[..., Any], seed: int, forward_only: bool) -> None:
    case = make_case(seed, forward_only=forward_only)
    assert compare(case) == set()
    validate(case.schedule(), edges=case.edges)


def change(case: Any, rng: random.Random, how: str) -> None:
    """Do something to a case that may make it wrong."""
    busy = [rank for rank, rows in enumerate(case.actions) if rows]
    if not busy:  # all are dropped already
        return
    rank = rng.choice(busy)
    rows = case.actions[rank]
    index = rng.randrange(len(rows))
    action = rows[index]
    if how == "drop":
        case.joined.clear()
        del rows[index]
    elif how == "repeat":
        case.joined.clear()
        rows.insert(rng.randrange(len(rows) + 1), action)
    elif how == "swap":
        other = rng.randrange(len(rows))
        rows[index], rows[other] = rows[other], rows[index]
    elif how == "move":
        case.joined.clear()
        del rows[index]
        target = case.actions[rng.randrange(len(case.actions))]
        target.insert(rng.randrange(len(target) + 1), action)
    elif how == "kind":
        rows[index] = action._replace(kind=rng.choice(list(Kind)))
    elif how == "stage":
        rows[index] = action._replace(stage=rng.randrange(len(case.placement) + 2))
    elif how == "microbatch":
        rows[index] = action._replace(microbatch=rng.randrange(case.microbatches + 2))
    elif index + 1 < len(rows) and not {(rank, index - 1), (rank, index + 1)} & set(case.joined):
        case.joined.append((rank, index))


CHANGES = ["drop", "repeat", "swap", "move", "kind", "stage", "microbatch", "join"]


@settings(max_examples=500, deadline=None)
@given(seed=SEEDS, changes=st.lists(st.sampled_from(CHANGES), min_size=1, max_size=3))
def test_changed_schedules_are_judged_as_by_brute_force(
    make_case: Callable[..., Any], seed: int, changes: list[str]
) -> None:
    case = make_case(seed)
    rng = random.Random(seed)
    for how in changes:
        change(case, rng, how)
    found = compare(case)
    if found:
        with pytest.raises(ScheduleError) as error:
            validate(case.schedule(), edges=case.edges)
        for rule in {one[0] for one in found}:
            assert f"rule {rule.name}" in str(error.value) or len(found) > 20


@MANY
@given(seed=SEEDS)
def test_ranks_all_at_once_and_one_by_one_see_the_same(make_case: Callable[..., Any], seed: int) -> None:
    case = make_case(seed)
    for _ in range(2):
        change(case, random.Random(seed), "swap")
    slow = problems(case.schedule(), edges=case.edges)
    for few, waves in ((1, 1 << 12), (1, 3)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_waits, "FEW_RANKS", few)
            patch.setattr(_waits, "WAVES", waves)
            assert problems(case.schedule(), edges=case.edges) == slow


@MANY
@given(seed=SEEDS, most=st.integers(1, 12))
def test_memory_and_order_of_sums(make_case: Callable[..., Any], seed: int, most: int) -> None:
    case = make_case(seed)
    if seed % 2:
        change(case, random.Random(seed), "move")
    oracle = Oracle(case, memory=most)
    found = problems(case.schedule(), edges=case.edges, memory=most, canonical=True)
    assert told([one for one in found if one.rule != Rule.CYCLE]) == oracle.told | oracle.uncanonical
