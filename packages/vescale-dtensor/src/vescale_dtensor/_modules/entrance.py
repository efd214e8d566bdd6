"""The parameters of a parallelized module, cast in buckets.

The first call of a module casts each parameter by itself, where it is used; `Entrance` learns which and in what order.
Later calls cast a bucket when the first of its parameters is needed: one autograd node, one message for all gradients.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._comm.buffers import Pool
from .._comm.gradients import Bucket, Door, divided, keeps_bits, pool_for
from .._comm.move import bucketing
from .._comm.plan import Plan
from .._tap import slot
from ..placements import AxisTypes

if TYPE_CHECKING:
    from .._tensor import DTensor

__all__ = ["Entrance"]

_requires_grad = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
Key = tuple[int, AxisTypes]
"""A parameter, by its address, and what it is cast to."""


@dataclass(slots=True)
class _Member:
    parameter: weakref.ref[Tensor]
    steps: Plan

    def fits(self, parameter: Any) -> bool:
        """Whether the parameter is still what it was; with dispatch off."""
        return parameter is not None and parameter._spec is self.steps.source and _requires_grad(parameter)


class Entrance:
    """What casts the parameters of one module."""

    def __init__(self) -> None:
        self._members: dict[Key, _Member] = {}
        """In the order of their first use."""
        self._groups: dict[Key, tuple[Bucket, list[Key]]] = {}
        self._door: Door | None = None
        self._passed: dict[int, Tensor] = {}
        self._news = False
        self._pool = Pool()
        self._before: list[Any] = []

    def __deepcopy__(self, memo: object) -> Entrance:
        return Entrance()

    def __reduce__(self) -> tuple[Any, ...]:
        return Entrance, ()

    def enter(self) -> None:
        """Before a call of the module."""
        self._before.append(bucketing.entrance)
        recorded = slot.active and slot.recorder is not None  # programs cast their parameters themselves
        if recorded or not torch.is_grad_enabled():
            bucketing.entrance = None
            return
        if self._news:
            self._divide()
        self._passed = {}
        if self._door is not None:
            self._pass()
        bucketing.entrance = self

    def leave(self) -> None:
        """After it, also when it raised."""
        bucketing.entrance = self._before.pop()
        self._passed = {}

    def cast(self, x: DTensor, types: AxisTypes, steps: Plan) -> bool:
        """Cast a parameter with its bucket, and keep the casts with the parameters; False: it has no bucket yet."""
        key = id(x), types
        group = self._groups.get(key)
        with torch._C.DisableTorchFunctionSubclass():
            if group is None or not self._members[key].fits(x) or self._members[key].parameter() is not x:
                self._learn(key, x, steps)
                return False
            bucket, keys = group
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
            bucket(parameters, passed)
        return True

    def _learn(self, key: Key, x: DTensor, steps: Plan) -> None:
        if x.is_leaf and x.__dict__.get("_is_param"):  # an input of this call is not there in the next
            self._members[key] = _Member(weakref.ref(x), steps)
            self._news = True

    def _divide(self) -> None:
        """Make buckets of the members that there are."""
        self._news = False
        with torch._C.DisableTorchFunctionSubclass():
            alive = [(key, m, p) for key, m in self._members.items() if (p := m.parameter()) is not None]
            self._members = {key: m for key, m, _ in alive}
            fitting = [(key, m.steps, p) for key, m, p in alive if m.fits(p)]
            buckets = divided([(steps, p) for _, steps, p in fitting])
            self._groups = {}
            made = []
            for positions in buckets:
                members = [fitting[i] for i in positions]
                keys = [key for key, _, _ in members]
                bucket = self._bucket([(steps, p) for _, steps, p in members], waits=len(buckets) == 1)
                made.append(bucket)
                self._groups.update(dict.fromkeys(keys, (bucket, keys)))
        self._door = Door(made) if len(made) > 1 else None

    def _bucket(self, casts: list[tuple[Plan, Tensor]], *, waits: bool) -> Bucket:
        plans = [steps for steps, _ in casts]
        pool = pool_for(self._pool, casts)
        return Bucket(plans, merged=keeps_bits(plans[0]), waits=waits, pool=pool, shared=[True] * len(plans))

    def _pass(self) -> None:
        """Let all parameters through the door, so that their gradients are waited for at the end."""
        assert self._door is not None
        with torch._C.DisableTorchFunctionSubclass():
            unique = {id(p): p for m in self._members.values() if m.fits(p := m.parameter())}
            parameters = [p for p in unique.values() if p is not None]
            self._passed = dict(zip(unique, self._door(parameters), strict=True))
