"""Buckets: parameters that are cast together, and whose gradients are sent together.

A parameter that ranks of a mesh axis hold alike is cast where it meets sharded data: its gradient is a sum over these
ranks. A cast alone has a hook and a collective of its own (see `move`). Here one autograd node casts a bucket of
parameters, and its backward sends their gradients as one message, which leaves the bits as they are (see `ranked`)
unless nobody minds. With several buckets a second node, made first and so run last
by autograd, waits for all: the messages of one bucket travel while the gradients of the next are computed.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._spec import Spec
from ..placements import I, R
from .buffers import Pool, available
from .move import dtensor_class, forget_casts_of, move_local, run_plan, watchers
from .nodes import applied
from .plan import Plan, plan
from .record import begin, end
from .steps import AllReduce, KeepFirst, Waits

__all__ = ["Bucket", "Door", "divided", "parts", "pool_for", "within_rank"]

BUCKET_BYTES = 25 << 20
"""Bytes of gradients that travel together, about."""

_version = Tensor._version.__get__  # type: ignore[attr-defined]
_detach = torch._C.TensorBase.detach
_has_casts = operator.methodcaller("__contains__", "_casts")
Running = tuple[list[Waits | None], list[Tensor | None], object]
"""Works, the gradients that they reduce in place, and the token of a span."""


class Bucket:
    """Parameters whose gradients are summed over the same ranks, and how.

    Args:
        plans: of the casts, one per parameter; all have reducers over the same axes.
        exact: whether sums have the bits of gradients that travel alone; with False more than two ranks add in
            another order, in one exchange.
        waits: whether its backward waits for the sums; False: a `Door` does.
        pool: where the memory of messages comes from; None: anew in each step.
        shared: per parameter, whether calls that go back together share a cast, as those of the dynamic path do.
        then: per parameter, where to move its cast within the rank; the way back leaves gradients as they are.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        *,
        exact: bool,
        waits: bool,
        pool: Pool | None,
        shared: Sequence[bool],
        then: Sequence[Plan | None] = (),
    ) -> None:
        self.plans, self.exact, self.waits, self.pool = tuple(plans), exact, waits, pool
        self.__name__ = "bucket"
        self.kept = [p.target if kept else None for p, kept in zip(plans, shared, strict=True)]
        """Layouts of the casts that are kept with their parameters."""
        self.then = {i: steps for i, steps in enumerate(then) if steps is not None}
        reducer = plans[0].reducer
        assert isinstance(reducer, AllReduce)
        self.reducer = reducer
        self.running: list[Running] = []
        """What is under way, for the door."""
        self._owners: list[weakref.ref[Tensor]] = []
        """Parameters whose casts were kept in the last call, so that steps need not make references anew."""

    def __repr__(self) -> str:
        return f"<bucket of {len(self.plans)} gradients>"

    def __call__(self, parameters: list[Tensor], passed: list[Tensor] | None = None) -> Sequence[Tensor]:
        """Return the casts of parameters; casts that others made before, and have not gone back through, are shared.

        Args:
            parameters: what is cast.
            passed: the same after a `Door`; None: there is none.
        """
        for watch in watchers:
            watch()
        sources = parameters if passed is None else passed
        holders = [p.__dict__ for p in parameters]
        if any(map(_has_casts, holders)):
            return self._with_known(parameters, sources, holders)
        return self._enter(None, parameters, sources, holders)

    def _with_known(
        self, parameters: list[Tensor], sources: list[Tensor], holders: list[dict[str, Any]]
    ) -> Sequence[Tensor]:
        found = [
            None if spec is None else _known_cast(holder, spec.types, _version(parameter))
            for holder, spec, parameter in zip(holders, self.kept, parameters, strict=True)
        ]
        missing = [i for i, cast in enumerate(found) if cast is None]
        if missing:
            made = self._enter(
                missing, [parameters[i] for i in missing], [sources[i] for i in missing], [holders[i] for i in missing]
            )
            for i, cast in zip(missing, made, strict=True):
                found[i] = cast
        return found  # type: ignore[return-value]

    def _enter(
        self, members: list[int] | None, parameters: list[Tensor], sources: list[Tensor], holders: list[dict[str, Any]]
    ) -> Sequence[Tensor]:
        """Cast some of the parameters, None for all, and keep the casts with them."""
        specs = self.kept if members is None else [self.kept[i] for i in members]
        owners = [p for p, spec in zip(parameters, specs, strict=True) if spec is not None]
        casts: Sequence[Any] = _enter(self, members, self._references(owners), *sources)
        cls = dtensor_class()
        for holder, spec, cast, version in zip(holders, specs, casts, map(_version, parameters), strict=True):
            if spec is None:
                continue
            cast.__class__ = cls
            cast._spec, cast._is_cast = spec, True
            if "_casts" in holder:  # the same parameter may be cast to two layouts
                holder["_casts"][spec.types] = cast, version
            else:
                holder["_casts"] = {spec.types: (cast, version)}
        return casts

    def _references(self, parameters: list[Tensor]) -> list[weakref.ref[Tensor]]:
        owners = self._owners
        if len(owners) != len(parameters) or not all(map(operator.is_, [o() for o in owners], parameters)):
            owners = self._owners = list(map(weakref.ref, parameters))
        return owners

    def target_of(self, number: int) -> Spec:
        """Layout of what a parameter becomes."""
        return self.then.get(number, self.plans[number]).target

    def start(self, gradients: Sequence[Tensor | None]) -> Running:
        """Begin to sum gradients; None stays None."""
        token = begin("AllReduce")
        present = [g for g in gradients if g is not None]
        if len(present) > 1 and all(g.layout is torch.strided for g in present):
            works, summed = self._start_merged(present)
        else:
            summed = [g.clone(memory_format=torch.contiguous_format) for g in present]
            works = [self._sum(s) for s in summed]
        rest = iter(summed)
        return works, [None if g is None else next(rest) for g in gradients], token

    def _sum(self, out: Tensor) -> Waits | None:
        start = self.reducer.start_ranked if self.exact else self.reducer.start_in_place
        return start(out, self.pool)

    def _start_merged(self, gradients: list[Tensor]) -> tuple[list[Waits | None], list[Tensor]]:
        one, count = gradients[0], sum([g.numel() for g in gradients])
        if self.pool is None:
            flat: Tensor = torch._C._nn.flatten_dense_tensors(gradients)
        else:
            flat = self.pool.take(one, count)
            torch.cat([g.reshape(-1) for g in gradients], out=flat)
        return [self._sum(flat)], list(torch._C._nn.unflatten_dense_tensors(flat, gradients))


class Door:
    """Through which all parameters of a program pass before they reach their buckets.

    Args:
        buckets: that do not wait by themselves.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = tuple(buckets)
        self.__name__ = "door"

    def __repr__(self) -> str:
        return f"<waits for {len(self.buckets)} buckets>"

    def __call__(self, parameters: list[Tensor]) -> Sequence[Tensor]:
        """Return the parameters, for buckets; their gradients are waited for on the way back."""
        passed: Sequence[Tensor] = _pass(self, *parameters)
        return passed


def parts(steps: Plan) -> tuple[Plan, Plan] | None:
    """Return the cast within a move, which sums gradients, and the rest of the move; None: it has no such cast."""
    source, types = steps.source, steps.target.types
    between = tuple(R if a == I and b == R else a for a, b in zip(source.types, types, strict=True))
    cast = plan(source, between)
    return (cast, plan(cast.target, types)) if cast.kind == "cast" else None


def within_rank(steps: Plan) -> bool:
    """Whether a bucket can make a move after its casts: nothing is sent, and gradients stay as they are."""
    return all(isinstance(step, KeepFirst) for step in steps.steps)


def gradient_bytes(steps: Plan, parameter: Tensor) -> int:
    """Return the bytes of the gradient of a cast on this rank; with dispatch off."""
    return math.prod(steps.source.local_shape) * parameter.element_size()


def pool_for(pool: Pool, casts: Sequence[tuple[Plan, Tensor]]) -> Pool | None:
    """Return a pool where the message of a bucket is worth keeping, else None."""
    return pool if available(casts[0][1].device, sum(gradient_bytes(*cast) for cast in casts)) else None


def divided(casts: Sequence[tuple[Plan, Tensor]]) -> list[list[int]]:
    """Divide casts into buckets by axes, dtype and device, then by size, from the last one backward.

    Args:
        casts: plans and parameters, in the order of their use.

    Returns:
        Positions in `casts`, bucket by bucket.
    """
    groups: dict[Any, list[list[int]]] = {}
    sizes = [gradient_bytes(*cast) for cast in casts]
    for position in reversed(range(len(casts))):
        steps, parameter = casts[position]
        key = steps.source.mesh, steps.axes, parameter.dtype, parameter.device
        buckets = groups.setdefault(key, [[]])
        if buckets[-1] and sum(sizes[i] for i in buckets[-1]) + sizes[position] > BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append(position)
    return [members[::-1] for buckets in groups.values() for members in buckets]


def wait(running: Running) -> list[Tensor | None]:
    """Return the sums of gradients once they are there."""
    works, gradients, token = running
    for work in works:
        if work is not None:
            work.wait()
    end(token)
    return gradients


def _known_cast(holder: dict[str, Any], types: Any, version: int) -> Tensor | None:
    hit = holder.get("_casts", {}).get(types)
    return None if hit is None or hit[1] != version else hit[0]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, bucket: Bucket, members: list[int] | None, owners: list[weakref.ref[Tensor]], *sources: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.bucket, ctx.members, ctx.owners = bucket, members, owners
        if not bucket.then:
            return tuple(map(_detach, sources))
        casts = list(map(_detach, sources))
        for number, steps in bucket.then.items():
            at = number if members is None else members.index(number)  # a cast that is moved is never shared
            casts[at] = run_plan(casts[at], steps)
        return tuple(casts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        bucket: Bucket = ctx.bucket
        forget_casts_of(ctx.owners)
        if any(g is not None and g.requires_grad for g in gradients):  # create_graph=True: stay differentiable
            numbers = range(len(bucket.plans)) if ctx.members is None else ctx.members
            moved = [
                None if g is None else move_local(g, bucket.target_of(i).dual, bucket.plans[i].source.dual.types)
                for g, i in zip(gradients, numbers, strict=True)
            ]
            return None, None, None, *moved
        running = bucket.start(gradients)
        if bucket.waits:
            return None, None, None, *wait(running)
        bucket.running.append(running)
        return None, None, None, *running[1]


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, door: Door, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.door = door
        return tuple(map(_detach, parameters))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        for bucket in ctx.door.buckets:
            running, bucket.running = bucket.running, []
            for one in running:
                wait(one)
        return None, *gradients


_enter, _pass = applied(_Enter), applied(_Pass)
