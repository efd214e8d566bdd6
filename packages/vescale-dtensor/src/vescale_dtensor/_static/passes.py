"""Passes over a record, whose every step is known: what is sent can be sent better. Each can be left out.

`reuse` leaves out moves that were made before, `bucket` sends the gradients of parameters together, `overlap` begins
moves early and waits for them late, `buffers` keeps the memory of messages between steps. As long as a program is to
be exact, no pass adds numbers in another order than the dynamic path does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .._comm.buffers import Pool
from .._comm.gradients import Bucket, Door, divided, parts, pool_for, within_rank
from .._comm.move import move
from .._comm.plan import Plan, plan
from .._comm.steps import AllReduce, Exchange, ReduceScatter
from .aliases import FREE
from .lookups import cast_tables
from .overlap import overlap
from .recorder import Op
from .values import Value, values_of

__all__ = ["PASSES", "Settings", "improve"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What may be done to a record."""

    passes: tuple[str, ...]
    """Names of the passes to make."""
    exact: bool
    """Whether the program must have the bits of the dynamic path."""
    pool: Pool = field(default_factory=Pool)
    """Where the memory of messages is kept."""
    backend: str | None = None
    """What compiles programs; None: they are not compiled."""


@dataclass(slots=True)
class _Record:
    ops: list[Op]
    given: list[Value]
    results: list[Value]
    constants: Mapping[Value, Tensor]
    settings: Settings
    notes: list[str] = field(default_factory=list)
    """What was done, one line per pass that did something."""


def improve(
    ops: Sequence[Op],
    given: Sequence[Value],
    results: Sequence[Value],
    constants: Mapping[Value, Tensor],
    settings: Settings,
) -> tuple[list[Op], list[str]]:
    """Return the steps after all passes, and what each pass did.

    Args:
        ops: the steps that are needed.
        given: parameters, buffers and inputs: what the program is called with.
        results: what it returns.
        constants: what is the same in every call, by the value of its first object; no step makes it.
        settings: which passes.
    """
    record = _Record(list(ops), list(given), list(results), constants, settings)
    for name, run in PASSES.items():
        if name in settings.passes:
            run(record)
    return record.ops, record.notes


# ------------------------------------------------------------------ reuse


def _reuse(record: _Record) -> None:
    """Leave out moves of a tensor to where it was moved before, unless something writes to either of them."""
    written = {v.memory for op in record.ops if op.keeps for v in values_of((op.args, op.kwargs, op.result))}
    made: dict[Any, Value] = {}
    kept = []
    dropped = 0
    for op in record.ops:
        steps = op.plan
        if steps is None or not _sends(steps) or op.keeps:
            kept.append(op)
            continue
        source, result = op.args[0], op.result
        key = source.first, op.kwargs["spec"], op.args[1], op.gradients
        before = made.get(key)
        safe = source.memory not in written and result.memory not in written
        if before is not None and safe and not (record.settings.exact and _adds_backward(steps, result)):
            result.first = before.first
            dropped += 1
            continue
        made.setdefault(key, result)
        kept.append(op)
    record.ops = kept
    if dropped:
        record.notes.append(f"reuse: {_count(dropped, 'move')} made before, and left out")


def _sends(steps: Plan) -> bool:
    return bool(steps.axes) and steps.kind not in ("alias", "relabel")


def _adds_backward(steps: Plan, result: Value) -> bool:
    """Whether the way back adds over ranks, so that a sum of sums would replace sums of its parts."""
    if not result.requires_grad:
        return False
    back = plan(steps.target.dual, steps.source.dual.types)
    return any(isinstance(step, AllReduce | ReduceScatter) for step in back.steps)


# ------------------------------------------------------------------ bucket


@dataclass(slots=True)
class _Cast:
    op: Op
    position: int
    steps: Plan

    @property
    def then(self) -> Plan | None:
        """Where the bucket moves the cast."""
        return self.op.kwargs.get("then")


def _bucket(record: _Record) -> None:
    """Cast parameters in buckets, in the order of their use, those that are used last in full ones."""
    given = {value for value in record.given if value.leaf}
    exact = record.settings.exact
    record.ops = cast_tables(record.ops, given, record.results, record.constants, exact=exact)
    alone = _moved_alone(record.ops) if exact else set()
    record.ops = [part for op in record.ops for part in ([op] if id(op) in alone else _split(op, given))]
    casts = [
        _Cast(op, position, steps)
        for position, op in enumerate(record.ops)
        if (steps := op.plan) is not None
        and steps.kind == "cast"
        and op.gradients
        and op.args[0] in given
        and op.result.requires_grad
    ]
    groups = divided([(c.steps, c.op.args[0].given) for c in casts])
    buckets = [[casts[i] for i in group] for group in groups]
    if not buckets:
        return
    settings = record.settings
    door = Door([]) if len(buckets) > 1 and "overlap" in settings.passes else None
    made = [_bucket_of(members, settings, waits=door is None) for members in buckets]
    insert: dict[int, list[Op]] = {}
    passed: dict[Value, Value] = {}
    if door is not None:
        door.buckets = tuple(made)
        parameters = list(dict.fromkeys(c.op.args[0] for c in casts))
        passed = {p: Value() for p in parameters}
        first = min(c.position for c in casts)
        insert[first] = [Op(door, (parameters,), {}, list(passed.values()), True, True)]
    for bucket, members in zip(made, buckets, strict=True):
        parameters = [c.op.args[0] for c in members]
        args: tuple[Any, ...] = (parameters,)
        if door is not None:
            args = (parameters, [passed[p] for p in parameters])
        at = min(c.position for c in members)
        insert.setdefault(at, []).append(Op(bucket, args, {}, [c.op.result for c in members], True, True))
    gone = {c.position for c in casts}
    ops = []
    for position, op in enumerate(record.ops):
        ops += insert.get(position, [])
        if position not in gone:
            ops.append(op)
    record.ops = ops
    waits = "waited for at the end" if door is not None else "waited for in turn"
    record.notes.append(
        f"bucket: the gradients of {_count(len(casts), 'parameter')} go in {_count(len(made), 'bucket')}, {waits}"
    )


def _moved_alone(ops: Sequence[Op]) -> set[int]:
    """Return the ids of moves to leave as they are, as their gradients would be added in another order.

    The dynamic path casts a parameter for its first use with the bucket, and moves it anew for each other use. With
    more than two uses, gradients that came together from a bucket would meet in another order.
    """
    uses = Counter(v for op in ops if op.gradients for v in dict.fromkeys(values_of((op.args, op.kwargs))))
    alone: set[int] = set()
    seen: set[Any] = set()
    for op in ops:
        steps = op.plan
        if steps is None or steps.kind != "general" or uses[op.args[0]] <= FREE:
            continue
        key = op.args[0], steps.target
        if key in seen or not within_rank(steps):
            alone.add(id(op))
        seen.add(key)
    return alone


def _split(op: Op, given: set[Value]) -> list[Op]:
    """Take the sum of a gradient out of a move that does more: cast first, and move what was cast."""
    steps = op.plan
    if steps is None or steps.kind != "general" or not op.gradients or op.args[0] not in given:
        return [op]
    found = parts(steps) if op.result.requires_grad else None
    if found is None:
        return [op]
    cast, rest = found
    between, types = cast.target.types, steps.target.types
    back = plan(steps.target.dual, steps.source.dual.types)
    if any(isinstance(s, Exchange | ReduceScatter) for s in back.steps):  # one message would become two
        return [op]
    if within_rank(rest):  # the bucket can do that, too
        return [Op(move, (op.args[0], between), {**op.kwargs, "then": rest}, op.result, True, op.keeps)]
    token = Value()
    token.requires_grad = True  # and a leaf, unlike a cast of the dynamic path
    return [
        Op(move, (op.args[0], between), op.kwargs, token, True, op.keeps),
        Op(move, (token, types), {"spec": cast.target}, op.result, True, op.keeps),
    ]


def _bucket_of(members: Sequence[_Cast], settings: Settings, *, waits: bool) -> Bucket:
    casts = [(c.steps, c.op.args[0].given) for c in members]
    return Bucket(
        [c.steps for c in members],
        exact=settings.exact,
        waits=waits,
        pool=pool_for(settings.pool, casts) if "buffers" in settings.passes else None,
        shared=[c.then is None and c.op.result.has_graph for c in members],
        then=[c.then for c in members],
    )


# ------------------------------------------------------------------ overlap and buffers


def _overlap(record: _Record) -> None:
    """Begin moves as soon as what they move is there, and wait for them before it is used."""
    record.ops, split = overlap(record.ops, exact=record.settings.exact)
    if split:
        record.notes.append(f"overlap: {_count(split, 'move')} under way while other steps run")


def _buffers(record: _Record) -> None:
    """Note that messages keep their memory; the other passes ask for it where they make messages."""
    kept = sum(isinstance(op.function, Bucket) and op.function.pool is not None for op in record.ops)
    if kept:
        record.notes.append(f"buffers: {_count(kept, 'message')} in memory that is kept between steps")


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


PASSES: dict[str, Callable[[_Record], None]] = {
    "reuse": _reuse,
    "bucket": _bucket,
    "overlap": _overlap,
    "buffers": _buffers,
}
"""By name, in the order in which they are made."""
