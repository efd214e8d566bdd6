"""A training step as tasks: what each strategy computes, sends and keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .._plan import BufferPlan, TensorSpec, Unit, plan_buckets, plan_group
from .costs import MeshCosts, volume
from .simulate import COMPUTE, Task

__all__ = ["STRATEGIES", "Setup", "Step", "build_step"]

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
BUCKETS = {"ddp": 25 << 20, "zero1": 25 << 20, "zero2": 8 << 20}
"""Limits of buckets in bytes, unless others are given."""
ALIGNMENT = 64
"""Bytes to which shards are aligned."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What is trained, and how."""

    units: tuple[Unit, ...]
    """In the order of forward. One without a name is that of a root: it stays gathered for the whole step."""
    mesh: Mapping[str, int]
    """Sizes of the data parallel axes, by name, outermost first."""
    costs: MeshCosts
    """Of these axes."""
    forward: tuple[float, ...]
    """Seconds of each unit."""
    backward: tuple[float, ...]
    """Seconds of each unit."""
    update: float = 0.0
    """Seconds in which one rank would update all parameters."""
    bucket_bytes: int | None = None
    """Limit of a bucket; None: that of the strategy."""
    param_bytes: int = 4
    """Bytes of an element that modules compute with, and that is gathered."""
    grad_bytes: int = 4
    """Bytes of an element of a gradient, and of what is reduced."""
    state_bytes: int = 8
    """Bytes of optimizer state per element, with the main parameters if those are kept apart."""
    activation_bytes: float = 0.0
    """Bytes that the forward leaves for the backward."""
    prefetch: int = 1
    """Units that are gathered before they are needed."""
    reshard: bool = True
    """Whether gathered parameters are given back after the forward."""
    copy: float | None = None
    """Seconds per byte to bring a gradient into its buffer; None: as for all copies, see `HostCosts`."""
    measured_overlap: bool = False
    """Whether computing goes on beside a collective as fast as it was measured, where it was."""

    @property
    def gradient_copy(self) -> float:
        """Seconds per byte to bring a gradient into its buffer."""
        return self.costs.host.copy if self.copy is None else self.copy


@dataclass(slots=True)
class Step:
    """A step under construction."""

    setup: Setup
    """What is trained."""
    tasks: list[Task] = field(default_factory=list)
    """In the order of their launch."""
    sent: dict[str, float] = field(default_factory=dict)
    """By queue, bytes that each rank sends."""
    fixed: float = 0.0
    """Bytes that are in use all the time."""

    def compute(
        self, name: str, seconds: float, after: Sequence[int] = (), takes: float = 0.0, gives: float = 0.0
    ) -> int:
        """Add something that this rank does itself, and return its index."""
        self.tasks.append(Task(name, COMPUTE, seconds, tuple(after), takes, gives))
        return len(self.tasks) - 1

    def own(self, name: str, seconds: float, after: Sequence[int]) -> tuple[int, ...]:
        """Add something that this rank does before what comes next, if it takes any time; return what to wait for."""
        return (self.compute(name, seconds, after),) if seconds else tuple(after)

    def send(
        self,
        operation: str,
        name: str,
        nbytes: float,
        axes: Sequence[str],
        after: Sequence[int] = (),
        takes: float = 0.0,
        gives: float = 0.0,
    ) -> int:
        """Add a collective over some axes and return its index; those of one group run one after the other."""
        setup = self.setup
        ranks = math.prod(setup.mesh[axis] for axis in axes)
        seconds, speed = _collective(setup, operation, nbytes, axes, ranks)
        queue = "x".join(axes)
        self.sent[queue] = self.sent.get(queue, 0.0) + nbytes * volume(operation, ranks)
        self.tasks.append(Task(f"{operation} {name}", queue, seconds, tuple(after), takes, gives, speed))
        return len(self.tasks) - 1


def _collective(
    setup: Setup, operation: str, nbytes: float, axes: Sequence[str], ranks: int
) -> tuple[float, float | None]:
    """Return how long a collective takes, and the speed of computing meanwhile; None: as for all.

    A computation that goes on beside it ends later by `seconds * (1 - speed)`: by what was measured, if it was.
    """
    if ranks < 2:
        return 0.0, None
    cost = setup.costs.of(axes, setup.mesh)
    alone = cost.seconds(operation, nbytes, ranks)
    if not setup.measured_overlap or cost.beside is None:
        return alone, None
    beside = cost.seconds_beside(operation, nbytes, ranks)
    longest = max(alone, beside)
    return longest, 1 - beside / longest if longest else 1.0


def build_step(setup: Setup, strategy: str) -> Step:
    """Lay out one step of many: what a step leaves to the next one, such as a gather, stands at the beginning.

    Args:
        setup: what is trained.
        strategy: of `STRATEGIES`.
    """
    step = Step(setup)
    numel = sum(unit.numel for unit in setup.units)
    ranks = math.prod(setup.mesh.values())
    if strategy == "fsdp":
        shards = list(setup.mesh.values())[-1]
        step.fixed = numel / shards * (setup.param_bytes + setup.grad_bytes + setup.state_bytes)
        _fsdp(step)
    else:
        whole, shared = setup.param_bytes, setup.state_bytes
        if strategy == "zero2":
            shared += setup.grad_bytes
        else:
            whole += setup.grad_bytes
        step.fixed = numel * (whole + shared / (1 if strategy == "ddp" else ranks))
        _bucketed(step, strategy)
    return step


def _name(unit: Unit) -> str:
    return unit.name or "the root"


def _specs(units: Sequence[Unit]) -> list[TensorSpec]:
    return [TensorSpec(name, shape) for unit in units for name, shape in unit.tensors]


def _activations(setup: Setup) -> list[float]:
    total = sum(setup.forward) or 1.0
    return [setup.activation_bytes * seconds / total for seconds in setup.forward]


def _bucketed(step: Step, strategy: str) -> None:
    """Lay out a step with whole parameters and buckets of gradients."""
    setup, axes = step.setup, list(step.setup.mesh)
    ranks = math.prod(setup.mesh.values())
    backward_order = _specs(setup.units)[::-1]
    limit = BUCKETS[strategy] if setup.bucket_bytes is None else setup.bucket_bytes
    plans = plan_buckets(backward_order, ranks, bucket_bytes=limit, itemsize=setup.grad_bytes)
    owner = {name: index for index, unit in enumerate(setup.units) for name, _ in unit.tensors}
    members = [{owner[slot.name] for slot in plan.slots} for plan in plans]
    kept = _activations(setup)
    gathers: dict[int, int] = {}
    if strategy != "ddp":
        for number in reversed(range(len(plans))):
            nbytes = plans[number].numel * setup.param_bytes
            gathers[number] = step.send("all_gather", f"bucket {number}", nbytes, axes)
    for index, unit in enumerate(setup.units):
        needs = [gathers[number] for number, inside in enumerate(members) if index in inside and number in gathers]
        step.compute(f"forward {_name(unit)}", setup.forward[index], needs, takes=kept[index])
    reductions = []
    for index in reversed(range(len(setup.units))):
        unit = setup.units[index]
        takes = unit.numel * setup.grad_bytes if strategy == "zero2" else 0.0
        done = step.compute(f"backward {_name(unit)}", setup.backward[index], takes=takes, gives=kept[index])
        for number, plan in enumerate(plans):
            if min(members[number]) == index:
                reductions.append(_reduce_bucket(step, strategy, number, plan, axes, done))
    share = 1 if strategy == "ddp" else ranks
    step.compute("update", setup.update / share, reductions)


def _reduce_bucket(step: Step, strategy: str, number: int, plan: BufferPlan, axes: Sequence[str], ready: int) -> int:
    setup, nbytes = step.setup, plan.numel * step.setup.grad_bytes
    host = setup.costs.host
    filling = setup.gradient_copy * nbytes + host.hook * len(plan.slots)
    if strategy == "zero2":  # its buffers come and go
        filling += host.fresh * nbytes
    if filling:
        ready = step.compute(f"fill bucket {number}", filling, (ready,))
    operation = "all_reduce" if strategy == "ddp" else "reduce_scatter"
    gives = sum(slot.numel for slot in plan.slots) * setup.grad_bytes if strategy == "zero2" else 0.0
    return step.send(operation, f"bucket {number}", nbytes, axes, (ready,), gives=gives)


def _fsdp(step: Step) -> None:
    """Lay out a step in which parameters are gathered unit by unit, over the last axis of the mesh.

    On each rank, gathering costs a copy of its shard, and memory for the whole; reducing costs a copy of the gradients
    and memory for them, and a copy of the shard of the sum, which is made when the next unit is to be reduced. Until
    then one reduction is under way at a time. Sums over replicas come at the end.
    """
    setup, host = step.setup, step.setup.costs.host
    *replicas, shard = setup.mesh
    ranks = setup.mesh[shard]
    stages = ranks > 1 and setup.costs.of((shard,), setup.mesh).stages
    multiple = max(1, ALIGNMENT // setup.param_bytes)
    numels = [plan_group(_specs([unit]), ranks, multiple=multiple).numel for unit in setup.units]
    kept = _activations(setup)
    count = len(setup.units)
    here: dict[int, int] = {}

    def gather(index: int, after: Sequence[int]) -> None:
        if 0 <= index < count and index not in here:
            nbytes = numels[index] * setup.param_bytes
            name = _name(setup.units[index])
            copied = nbytes / ranks * (2 if stages else 1)
            ready = step.own(f"shard of {name}", host.copy * copied + host.fresh * nbytes, after)
            here[index] = step.send("all_gather", name, nbytes, (shard,), ready, takes=nbytes)

    last: tuple[int, ...] = ()
    for index, unit in enumerate(setup.units):
        for ahead in range(setup.prefetch + 1):
            gather(index + ahead, last)
        stays = not setup.reshard or index == count - 1 or not unit.name
        gives = 0.0 if stays else numels[index] * setup.param_bytes
        seconds = setup.forward[index] + host.unit / 2
        done = step.compute(f"forward {_name(unit)}", seconds, (here[index],), takes=kept[index], gives=gives)
        last = (done,)
        if not stays:
            del here[index]
    under_way: tuple[int, ...] = ()
    kept_shards: list[int] = []
    for index in reversed(range(count)):
        unit = setup.units[index]
        for ahead in range(setup.prefetch + 1):
            gather(index - ahead, last)
        nbytes = numels[index] * setup.grad_bytes
        filling = (setup.gradient_copy + host.fresh) * nbytes + host.shard * len(unit.tensors)
        if stages:  # all but the own part
            filling += host.copy * nbytes * (ranks - 1) / ranks
        done = step.compute(
            f"backward {_name(unit)}",
            setup.backward[index] + host.unit / 2 + filling,
            (here[index],),
            takes=nbytes,
            gives=numels[index] * setup.param_bytes + kept[index],
        )
        last = (done,)
        if under_way:
            kept_shards.append(_keep_shard(step, index + 1, numels[index + 1], under_way))
            last = (kept_shards[-1],)
        under_way = (step.send("reduce_scatter", _name(unit), nbytes, (shard,), last, gives=nbytes),)
    kept_shards.append(_keep_shard(step, 0, numels[0], under_way))
    needs = kept_shards
    if replicas:
        own = [numel * setup.grad_bytes / ranks for numel in numels]
        needs = [
            step.send("all_reduce", f"shard of {_name(unit)}", nbytes, replicas, kept_shards)
            for unit, nbytes in zip(setup.units, own, strict=True)
        ]
    step.compute("update", setup.update / ranks, needs)


def _keep_shard(step: Step, index: int, numel: int, reduced: Sequence[int]) -> int:
    """Wait for a reduction, and copy the shard of the sum out of the buffer of the gradients."""
    setup = step.setup
    own = numel * setup.grad_bytes / list(setup.mesh.values())[-1]
    seconds = (setup.costs.host.copy + setup.costs.host.fresh) * own
    return step.compute(f"sum of {_name(setup.units[index])}", seconds, reduced)
