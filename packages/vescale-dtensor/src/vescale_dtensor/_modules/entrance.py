"""The parameters of a parallelized module, cast in buckets.

The first call of a module casts each parameter by itself, where it is used; `Entrance` learns which and in what order.
Later calls cast a bucket when the first of its parameters is needed: one autograd node, one message for all gradients.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._comm.buffers import Pool
from .._comm.gradients import Bucket, Door, divided, parts, pool_for, within_rank
from .._comm.move import bucketing, dtensor_class
from .._comm.plan import Plan
from .._tap import slot
from ..placements import AxisTypes

if TYPE_CHECKING:
    from .._tensor import DTensor

__all__ = ["Entrance"]

_requires_grad = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_version = Tensor._version.__get__  # type: ignore[attr-defined]
Key = tuple[int, AxisTypes]
"""A parameter, by its address, and what it is cast to."""


@dataclass(slots=True)
class _Member:
    parameter: weakref.ref[Tensor]
    steps: Plan
    """Of the cast."""
    then: Plan | None
    """Where the cast is moved within the rank."""

    def fits(self, parameter: Any) -> bool:
        """Whether the parameter is still what it was; with dispatch off."""
        return parameter is not None and parameter._spec is self.steps.source and _requires_grad(parameter)


class Entrance:
    """What casts the parameters of one module."""

    def __init__(self) -> None:
        self._members: dict[Key, _Member] = {}
        """In the order of their first use."""
        self._groups: dict[Key, tuple[Bucket, list[Key]]] = {}
        self._tables: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._there: list[weakref.ref[Tensor]] = []
        """What buckets cast, and where the module holds it. Whether others are gone is no question to ask: on one rank
        they may wait for the garbage collector, and ranks must agree on what they send."""
        self._door: Door | None = None
        self._passed: dict[int, Tensor] = {}
        self._ready: dict[Key, tuple[DTensor, int] | None] = {}
        """Casts of this call that were moved, with the versions of their parameters; None: it is used. Its gradients
        are sums by themselves, so that nobody else shares it."""
        self._news = False
        self._pool = Pool()
        self._before: list[Any] = []

    def __deepcopy__(self, memo: object) -> Entrance:
        return Entrance()

    def __reduce__(self) -> tuple[Any, ...]:
        return Entrance, ()

    def enter(self, module: nn.Module) -> None:
        """Before a call of the module."""
        self._before.append(bucketing.entrance)
        recorded = slot.active and slot.recorder is not None  # programs cast their parameters themselves
        if recorded or not torch.is_grad_enabled():
            bucketing.entrance = None
            return
        if self._news or self._replaced():
            self._divide(module)
        self._passed, self._ready = {}, {}
        if self._door is not None:
            self._pass()
        bucketing.entrance = self

    def leave(self) -> None:
        """After it, also when it raised."""
        bucketing.entrance = self._before.pop()
        self._passed, self._ready = {}, {}

    def cast(self, x: DTensor, types: AxisTypes, steps: Plan) -> DTensor | None:
        """Cast a parameter with its bucket; None: it has no bucket yet."""
        key = id(x), types
        member = self._members.get(key)
        with torch._C.DisableTorchFunctionSubclass():
            if member is None or member.parameter() is not x or not member.fits(x):
                self._learn(key, x, steps)
                return None
            if key not in self._ready:
                group = self._groups.get(key)
                if group is None or not self._cast_bucket(*group):
                    return None
            if member.then is None:
                made: DTensor = x.__dict__["_casts"][types][0]
                return made
            ready, self._ready[key] = self._ready[key], None
            return None if ready is None or ready[1] != _version(x) else ready[0]

    def _cast_bucket(self, bucket: Bucket, keys: list[Key]) -> bool:
        """Cast all parameters of a bucket; casts that are not moved are kept with them. False: it cannot be done."""
        members = [self._members[k] for k in keys]
        parameters: list[Any] = [m.parameter() for m in members]
        if not all(map(_Member.fits, members, parameters)):  # some are frozen now, or gone
            self._news = True
            return False
        passed = None
        if self._door is not None:
            if any(id(p) not in self._passed for p in parameters):
                return False
            passed = [self._passed[id(p)] for p in parameters]
        casts: Sequence[Any] = bucket(parameters, passed)
        for number, then in bucket.then.items():
            if keys[number] not in self._ready:
                cast = casts[number]
                cast.__class__, cast._spec = dtensor_class(), then.target
                self._ready[keys[number]] = cast, _version(parameters[number])
        return True

    def _learn(self, key: Key, x: DTensor, steps: Plan) -> None:
        if x.is_leaf and x.__dict__.get("_is_param"):  # an input of this call is not there in the next
            cast, then = _parts(steps)
            if cast is not None:
                self._members.pop(key, None)  # of a parameter that had this address: ranks differ in addresses
                self._members[key] = _Member(weakref.ref(x), cast, then)
                self._news = True

    def _replaced(self) -> bool:
        """Whether the module holds something else where it held what buckets cast."""
        try:
            now = list(map(operator.getitem, self._tables, self._names))
        except KeyError:
            return True
        return not all(map(operator.is_, now, [ref() for ref in self._there]))

    def _divide(self, module: nn.Module) -> None:
        """Make buckets of the members that the module holds."""
        self._news = False
        held = {id(p): (m._parameters, n) for m in module.modules() for n, p in m._parameters.items()}
        with torch._C.DisableTorchFunctionSubclass():
            alive = [(key, m, p) for key, m in self._members.items() if (p := m.parameter()) is not None]
            self._members = {key: m for key, m, _ in alive}
            fitting = [(key, m, p) for key, m, p in alive if id(p) in held and m.fits(p)]
            self._tables, self._names = [held[id(p)][0] for _, _, p in fitting], [held[id(p)][1] for _, _, p in fitting]
            self._there = [m.parameter for _, m, _ in fitting]
            buckets = divided([(m.steps, p) for _, m, p in fitting])
            self._groups = {}
            made = []
            for positions in buckets:
                members = [fitting[i] for i in positions]
                keys = [key for key, _, _ in members]
                bucket = self._bucket([(m, p) for _, m, p in members], waits=len(buckets) == 1)
                made.append(bucket)
                self._groups.update(dict.fromkeys(keys, (bucket, keys)))
        self._door = Door(made) if len(made) > 1 else None

    def _bucket(self, members: list[tuple[_Member, Tensor]], *, waits: bool) -> Bucket:
        casts = [(m.steps, p) for m, p in members]
        return Bucket(
            [steps for steps, _ in casts],
            exact=True,
            waits=waits,
            pool=pool_for(self._pool, casts),
            shared=[m.then is None for m, _ in members],
            then=[m.then for m, _ in members],
        )

    def _pass(self) -> None:
        """Let all parameters through the door, so that their gradients are waited for at the end."""
        assert self._door is not None
        with torch._C.DisableTorchFunctionSubclass():
            unique = {id(p): p for m in self._members.values() if m.fits(p := m.parameter())}
            parameters = [p for p in unique.values() if p is not None]
            self._passed = dict(zip(unique, self._door(parameters), strict=True))


def _parts(steps: Plan) -> tuple[Plan | None, Plan | None]:
    """The cast within a move, and what remains to be done within the rank; no cast: a bucket cannot do this move."""
    if steps.kind == "cast":
        return steps, None
    found = parts(steps)
    return found if found is not None and within_rank(found[1]) else (None, None)
