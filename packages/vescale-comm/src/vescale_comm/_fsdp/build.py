"""Plans of a module's units, agreed by the ranks, and the units themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import ProcessGroup

from .._objects import gather_objects
from .._plan import Blocks, BufferPlan, TensorSpec, granularity, plan_parts
from .._plan.blocks import rules_for
from .._transport import Transport, transport
from ..errors import MismatchError, PlanError
from .channels import Groups
from .choose import assign
from .entry import Entry
from .flat import Dtypes, Flat
from .gradients import Gradients, Sums
from .reduction import Channels, rows_of
from .unit import Unit

__all__ = ["Options", "build", "plan_units"]

ALIGNMENT = 64
"""Bytes: a cache line."""
PADDING = 0.05
"""Share of padding that is taken to save a buffer."""


@dataclass(frozen=True, slots=True)
class Options:
    """How parameters are kept, sent and reduced."""

    blocks: Blocks
    """What stays on one rank."""
    keep: bool
    """Whether units stay gathered from forward to backward."""
    param_dtype: torch.dtype | None
    """Of gathered parameters; None: their own."""
    reduce_dtype: torch.dtype | None
    """Of gradients; None: that of shards."""
    average: bool
    """Whether sums are divided by the number of ranks."""
    offload: bool
    """Whether shards are in main memory."""
    check_finite: bool
    """Whether gradients are looked at."""


@dataclass(slots=True)
class PlannedUnit:
    """A unit before its parameters are cut."""

    name: str
    """Name of its module."""
    module: nn.Module
    """Its module."""
    inside: list[nn.Module]
    """Its modules that are in no unit further in."""
    buffers: list[tuple[BufferPlan, list[Entry], Dtypes]]
    """Plan, parameters by slot, and dtypes of each buffer."""


def plan_units(root: nn.Module, chosen: dict[str, nn.Module], world: int, options: Options) -> list[PlannedUnit]:
    """Plan the buffers of each unit.

    Args:
        root: the module.
        chosen: units by name, the root first.
        world: ranks among which parameters are cut.
        options: of the user.

    Raises:
        PlanError: a parameter that cannot be sharded, or a pattern that matches none.
    """
    owned, inside = assign(root, chosen)
    entries = [entry for unit in owned for entry in unit]
    rules = rules_for([entry.name for entry in entries], options.blocks)
    for entry, rule in zip(entries, rules, strict=True):
        entry.granularity = granularity(rule, tuple(entry.kind.local.shape))
    planned = []
    for (name, module), unit, modules in zip(chosen.items(), owned, inside, strict=True):
        buffers = []
        for part in _parts(unit):
            dtypes = Dtypes(part[0].kind.local.dtype, options.param_dtype, options.reduce_dtype)
            specs = [TensorSpec(e.name, tuple(e.kind.local.shape), e.granularity) for e in part]
            by_name = {entry.name: entry for entry in part}
            multiple = max(1, ALIGNMENT // dtypes.store.itemsize)
            plans = plan_parts(specs, world, multiple=multiple, tolerance=PADDING)
            buffers += [(plan, [by_name[slot.name] for slot in plan.slots], dtypes) for plan in plans]
        planned.append(PlannedUnit(name, module, modules, buffers))
    return planned


def _parts(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Yield the parameters that can share a buffer: one dtype, trained or not, gradients summed over the same ranks."""
    parts: dict[object, list[Entry]] = {}
    for entry in entries:
        key = (entry.parameter.dtype, entry.parameter.requires_grad, tuple(map(id, entry.kind.partial)))
        parts.setdefault(key, []).append(entry)
    yield from parts.values()


def check_same(planned: Sequence[PlannedUnit], options: Options, groups: Groups, channels: Channels) -> None:
    """Compare the plans of all ranks before anything is cut.

    Raises:
        MismatchError: they differ; the text names the first difference.
    """
    lines = [f"options {options}"]
    for unit in planned:
        lines.append(f"unit {unit.name or '(root)'}")
        for plan, entries, dtypes in unit.buffers:
            lines += [
                f"parameter {e.name}: shape {tuple(e.kind.local.shape)}, {e.parameter.dtype}, requires_grad="
                f"{e.parameter.requires_grad}, blocks of {e.granularity}, {dtypes.compute}, {dtypes.reduce}"
                for e in entries
            ]
            lines.append(f"buffer {plan.fingerprint}")
    digest = hashlib.sha256("\n".join(lines).encode()).digest()[:16]
    row = torch.tensor(list(digest), dtype=torch.uint8, device=channels.device)
    for group, link in ((groups.shard, channels.shard), (groups.replicas, channels.replicas)):
        if link is not None and group is not None:
            rows = rows_of(link, row).cpu()
            if bool((rows != rows[0]).any()):
                _raise_difference(lines, group)


def _raise_difference(lines: list[str], group: ProcessGroup) -> None:
    every: list[list[str]] = gather_objects(lines, group)
    for rank, others in enumerate(every):
        for place in range(max(len(others), len(every[0]))):
            first, other = (told[place] if place < len(told) else "nothing more" for told in (every[0], others))
            if first != other:
                raise MismatchError(
                    f"fully_shard: ranks of the group differ: rank 0 has {first!r}, rank {rank} has {other!r}. "
                    f"Make the same module with the same arguments on all ranks."
                )
    raise MismatchError("fully_shard: plans of the ranks differ.")


def build(planned: Sequence[PlannedUnit], options: Options, groups: Groups, channels: Channels) -> list[Unit]:
    """Cut the parameters.

    Args:
        planned: what `plan_units` returned.
        options: of the user.
        groups: the ranks.
        channels: to them.

    Returns:
        The units; the modules have shards now.
    """
    store = torch.device("cpu") if options.offload else groups.device
    pin = options.offload and groups.device.type != "cpu"
    spread = (groups.shard,)
    copies = (groups.replicas,) if groups.replicas is not None else ()
    divisor = groups.size if options.average else 1
    further: dict[int, Transport] = {}
    units = []
    for index, plan_of in enumerate(planned):
        unit = Unit(index, plan_of.name, plan_of.module, keep=options.keep or index == 0)
        unit.modules = plan_of.inside
        for plan, entries, dtypes in plan_of.buffers:
            if len({entry.kind.local.device.type for entry in entries} - {"meta", groups.device.type}):
                wrong = next(e for e in entries if e.kind.local.device.type not in ("meta", groups.device.type))
                raise PlanError(
                    f"{wrong.name} is on {wrong.kind.local.device}, but the ranks communicate on {groups.device}: "
                    f"move the module there before fully_shard."
                )
            flat = Flat(plan, entries, dtypes, channels.shard.rank, spread, copies, groups.device, store, pin)
            for group in entries[0].kind.partial:
                if id(group) not in further:
                    further[id(group)] = transport(group, "auto", device=groups.device)
            others = [channels.replicas] if channels.replicas is not None else []
            others += [further[id(group)] for group in entries[0].kind.partial]
            sums = Sums(channels.shard, tuple(others), divisor)
            unit.flats.append(flat)
            unit.gradients.append(Gradients(flat, sums, options.check_finite))
        units.append(unit)
    return units
