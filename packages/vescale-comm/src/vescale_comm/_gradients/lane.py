"""A lane: parameters that are reduced over the same ranks with the same divisor, with their buckets and flags."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Parameter

from .._plan import BufferPlan, TensorSpec, plan_buckets
from .._transport import Transport
from ..errors import CommError
from .agree import check_same
from .bucket import Bucket
from .flags import Flags
from .local import local_of
from .member import Member

__all__ = [
    "BucketOptions",
    "Lane",
    "LaneState",
    "check_agreement",
    "check_lanes",
    "check_mode",
    "digest_of",
    "lines_of",
    "plan_members",
]


@dataclass(frozen=True)
class Lane:
    """Parameters of one reduction group."""

    parameters: Sequence[tuple[str, Parameter]]
    """Names and parameters, the same on all ranks."""
    transport: Transport
    """Over the ranks of the group."""
    divisor: float
    """Of the sums: the number of ranks with different data, which need not be that of the group."""
    axes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Per name the axes of the parameter's mesh over which its gradient comes as a pending sum."""

    @property
    def device(self) -> torch.device:
        """That of the first parameter."""
        return local_of(self.parameters[0][1]).device if self.parameters else torch.device("cpu")


@dataclass(frozen=True)
class BucketOptions:
    """How buckets are made."""

    scatter: bool
    """Whether each rank gets its shard of the sums only."""
    bucket_bytes: int
    """Limit of a bucket."""
    accumulate: torch.dtype | None
    """Dtype of buffers and sums; None: that of the gradients."""
    compressor: Callable[..., Any] | None
    """Makes the compressor of a bucket from plan, dtype and device."""
    release: bool = False
    """Whether buckets have the memory of their buffers only while they need it."""


class LaneState:
    """A lane at work.

    Args:
        lane: the parameters.
        options: how buckets are made.
        order: names in the order in which backward finishes them; None: the last parameter comes first.
        plans: the plans of the buckets, in the order of backward; None: they are made here.
    """

    def __init__(
        self,
        lane: Lane,
        options: BucketOptions,
        order: Sequence[str] | None = None,
        plans: Sequence[BufferPlan] | None = None,
    ) -> None:
        self.lane = lane
        self.members = [
            Member(name, param, index, lane.axes.get(name, ())) for index, (name, param) in enumerate(lane.parameters)
        ]
        self.touched = bytearray(len(self.members))
        """Per parameter, whether a backward of this window added to it."""
        self.used = bytearray(len(self.members))
        """Per parameter, what this rank tells the others about it."""
        self.device = device = lane.device
        self.flags = Flags(lane.transport, len(self.members), device)
        by_name = {member.name: member for member in self.members}
        self.order = list(order) if order is not None else [member.name for member in reversed(self.members)]
        """Names, in the order in which backward is expected to finish them."""
        self._version: int | None = None
        self._scatter = options.scatter
        self.buckets: list[Bucket] = []
        if plans is None:
            plans = plan_members([by_name[name] for name in self.order], lane.transport.size, options)
        for plan in plans:
            members = [by_name[slot.name] for slot in plan.slots]
            dtype = options.accumulate or members[0].param.dtype
            make = options.compressor
            self.buckets.append(
                Bucket(
                    plan,
                    members,
                    lane.transport,
                    dtype=dtype,
                    divisor=lane.divisor,
                    scatter=options.scatter,
                    compressor=None if make is None else make(plan, dtype, device),
                    release=options.release,
                )
            )
        _check_cover(self.members, self.buckets)

    def written(self) -> bool:
        """Tell whether parameters were written to since the last call; never at the first one.

        Where the buckets are of shards this is False: their optimizer takes all ranks along.
        """
        if self._scatter:
            return False
        before, self._version = self._version, sum([member.param._version for member in self.members])
        return before not in (None, self._version)

    def clear(self) -> None:
        """Begin a window."""
        for flags in (self.touched, self.used):
            flags[:] = bytes(len(flags))


def _describe(name: str, param: Parameter) -> str:
    local = local_of(param)
    strides = "" if local.is_contiguous() else f" strides {tuple(local.stride())}"
    return f"{name} {tuple(local.shape)} {str(param.dtype).removeprefix('torch.')} on {local.device.type}{strides}"


def plan_members(members: Sequence[Member], world: int, options: BucketOptions) -> list[BufferPlan]:
    """Plan buckets, each of one dtype and device, in the order in which the last of their members comes."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Member]] = {}
    for member in members:
        kinds.setdefault((member.param.dtype, member.param.device), []).append(member)
    place = {member.name: number for number, member in enumerate(members)}
    found: list[BufferPlan] = []
    for (dtype, _), group in kinds.items():
        specs = [TensorSpec(member.name, tuple(local_of(member.param).shape)) for member in group]
        itemsize = (options.accumulate or dtype).itemsize
        found += plan_buckets(specs, world, bucket_bytes=options.bucket_bytes, itemsize=itemsize)
    return sorted(found, key=lambda plan: max(place[slot.name] for slot in plan.slots))


def _check_cover(members: Sequence[Member], buckets: Sequence[Bucket]) -> None:
    """Check that each parameter is in one bucket, and that what shares a bucket can."""
    counts = dict.fromkeys((member.name for member in members), 0)
    for bucket in buckets:
        kinds = {(member.param.dtype, member.param.device) for member in bucket.members}
        if len(kinds) > 1:
            raise CommError(f"The parameters {bucket.names} share a bucket, but differ in dtype or device: {kinds}.")
        for name in bucket.names:
            counts[name] += 1
    wrong = [name for name, count in counts.items() if count != 1]
    if wrong:
        raise CommError(f"{wrong[0]} is in {counts[wrong[0]]} buckets; every parameter must be in one.")


def check_mode(mode: str, changes: bool) -> None:
    """Check what a reducer is to do.

    Args:
        mode: what each rank gets.
        changes: whether it changes buckets or gradients by itself.

    Raises:
        ValueError: there is no such mode, or it does not go with changes.
    """
    if mode not in ("all_reduce", "reduce_scatter"):
        raise ValueError(f'mode is {mode!r}; it is "all_reduce" or "reduce_scatter".')
    if mode == "reduce_scatter" and changes:
        raise ValueError('learn and view change buckets or gradients that others own: only with mode "all_reduce".')


def check_lanes(lanes: Sequence[Lane]) -> None:
    """Check the parameters of lanes.

    Raises:
        CommError: one cannot have a gradient, or there is another one of its name, or it is there twice.
    """
    names: set[str] = set()
    seen: dict[int, str] = {}
    for lane in lanes:
        for name, param in lane.parameters:
            if not param.is_leaf or not (param.dtype.is_floating_point or param.dtype.is_complex):
                raise CommError(f"{name}: only leaf tensors of floating point have gradients; this is a {param.dtype}.")
            if id(param) in seen:
                raise CommError(f"{name} and {seen[id(param)]} are one object; give a shared parameter once.")
            if name in names:
                raise CommError(f"Two parameters have the name {name}; names tell them apart.")
            names.add(name)
            seen[id(param)] = name


def lines_of(lanes: Sequence[Lane], changes: int = 0) -> list[str]:
    """Return what ranks must agree on: a line per parameter, with the name first, and how often they changed."""
    lines = [
        f"{_describe(name, param)} over {lane.transport.size} ranks / {lane.divisor:g}"
        for lane in lanes
        for name, param in lane.parameters
    ]
    return [*lines, f"the parameters of change {changes}"]


def check_agreement(lanes: Sequence[Lane], compressor: Any = None) -> None:
    """Check that ranks have the same parameters and compressors: over the first lane, those of all lanes.

    Raises:
        MismatchError: they have not.
    """
    advice = "Every rank must wrap the same model, with the same parameters in the same order."
    label = None if compressor is None else getattr(compressor, "label", "given")
    for number, lane in enumerate(lanes):
        if lane.transport.name != "fake" and lane.transport.size > 1:
            lines = [*lines_of([lane] if number else lanes), f"compressor {label}"]
            check_same(lane.transport, lane.device, lines, "parameters", advice)


def digest_of(lines: Sequence[str]) -> bytes:
    """Return eight bytes, equal for equal lines."""
    return hashlib.sha256("\n".join(lines).encode()).digest()[:8]
