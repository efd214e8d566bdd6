"""Plan a whole model: which units share a group, how tensors are stored, and over how many ranks they are sharded.

Padding is bound by `ranks * block` elements per buffer, so larger groups, smaller blocks and fewer shards lessen it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import PlanError
from .blocks import Blocks, Storage, rules_for
from .bound import lower_bound
from .buffer import TensorSpec
from .choices import Tensor, Way, ways
from .even import even_shard
from .model_plan import GroupPlan, ModelPlan
from .models import Unit, model_units
from .packing import Item
from .parts import divide, plan_parts

__all__ = ["Knobs", "plan_model"]

SLACK = 0.005
"""Padding, as a share, that one buffer may have above several."""


@dataclass(frozen=True, slots=True)
class Knobs:
    """What the search may choose, and when it stops."""

    target: float = 0.1
    """Padding that is good enough, as a share of the parameters; among such plans the cheapest is chosen."""
    over_even: float = 0.0
    """How much more than the even layout a plan may pad, as a share of the parameters, to need fewer buffers."""
    storage: tuple[Storage, ...] = (Storage.TRANSPOSED, Storage.TILES)
    """Kinds of storage besides the given one, for parameters in `Block`s."""
    group_share: float = 0.25
    """Largest group, as a share of the model's elements; it may always be as large as the largest unit."""
    max_replicas: int = 1
    """How many copies of a shard there may be (HSDP); each costs the memory of the whole sharded model again."""
    multiple: int = 1
    """Every shard is a multiple of so many elements."""

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            PlanError: naming the knob.
        """
        for name in ("target", "over_even"):
            if not getattr(self, name) >= 0:
                raise PlanError(f"{name} is {getattr(self, name)}: padding is 0 or more, such as 0.1.")
        if not 0 <= self.group_share <= 1:
            raise PlanError(f"group_share is {self.group_share}: it is a share of the model, from 0 to 1.")
        if self.max_replicas < 1 or self.multiple < 1:
            raise PlanError(f"max_replicas is {self.max_replicas}, multiple {self.multiple}: both are 1 or more.")


def plan_model(
    model: str | Mapping[str, Any] | Sequence[Unit], world: int, *, blocks: Blocks = 1, knobs: Knobs | None = None
) -> ModelPlan:
    """Choose groups, storage and shards of a model with little padding, at the least cost.

    Among plans that reach the target and pad no more than the even layout (and `over_even`): full sharding before
    copies, storage that costs nothing before tiles, then the smallest largest group, the fewest buffers, the fewest
    transposed tensors. If none reaches it, the one with the least padding.

    Args:
        model: name of a known model, a Hugging Face config, or the units in the order of forward.
        world: number of ranks.
        blocks: what must stay on one rank: a rule for all parameters, or rules by regular expressions.
        knobs: what may be chosen; None: the defaults.

    Returns:
        The plan; its `explain()` tells all about it.

    Raises:
        PlanError: the model, a rule or a number makes no sense.

    Example:
        >>> from vescale_comm._plan import Block
        >>> plan = plan_model("llama-3-8b", 64, blocks=Block(32, 32))
        >>> plan.padding < 0.1
        True
    """
    begun = time.perf_counter()
    knobs = knobs or Knobs()
    if world < 1:
        raise PlanError(f"world is {world}: a buffer is shared by at least one rank.")
    units = model_units(model) if isinstance(model, str | Mapping) else tuple(model)
    tensors = _tensors(units, blocks, knobs)
    used = sum(tensor.numel for tensor in tensors)
    if not used:
        raise PlanError("The model has no elements: there is nothing to plan.")
    even = even_shard((_spec(tensor, Storage.GIVEN) for tensor in tensors), world) * world
    enough = min(even + int(used * knobs.over_even), int(used * (1 + knobs.target)))
    best: _Candidate | None = None
    for shard_world in (n for n in range(world, 0, -1) if world % n == 0 and world // n <= knobs.max_replicas):
        for way in ways(tensors):
            search = _Search(units, tensors, way, shard_world, knobs)
            found = search.best(enough, world // shard_world)
            best = found if best is None else min(best, found, key=lambda candidate: candidate.key)
        if best is not None and best.good:
            break
    assert best is not None, "a world has itself as divisor"
    groups = best.search.groups(best.cuts, best.slack)
    return ModelPlan(
        world=world,
        shard_world=best.search.world,
        groups=groups,
        storage={t.name: kind for t, kind in zip(tensors, best.search.way, strict=True) if kind is not Storage.GIVEN},
        even=even / used - 1,
        bound=_bound(groups, knobs.multiple) / used - 1,
        seconds=time.perf_counter() - begun,
    )


def _tensors(units: Sequence[Unit], blocks: Blocks, knobs: Knobs) -> list[Tensor]:
    pairs = [pair for unit in units for pair in unit.tensors]
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise PlanError(f"Two parameters are called {twice}: give each once, shared ones in their first unit.")
    rules = rules_for(names, blocks)
    return [Tensor.of(name, shape, rule, knobs.storage) for (name, shape), rule in zip(pairs, rules, strict=True)]


def _spec(tensor: Tensor, kind: Storage) -> TensorSpec:
    shape = tensor.shape
    if kind is Storage.TRANSPOSED:
        shape = (*shape[:-2], shape[-1], shape[-2])
    return TensorSpec(tensor.name, shape, tensor.grains[kind])


def _bound(groups: Sequence[GroupPlan], multiple: int) -> int:
    total = 0
    for buffer in (buffer for group in groups for buffer in group.buffers):
        specs = [TensorSpec(slot.name, slot.shape, slot.granularity) for slot in buffer.slots]
        total += lower_bound(specs, buffer.world, multiple=multiple) * buffer.world
    return total


@dataclass(frozen=True)
class _Candidate:
    search: _Search
    cuts: list[int]
    slack: float
    good: bool
    key: tuple[float, ...]


class _Search:
    """Cuts one sequence of units into groups, for one way to store them and one number of shards."""

    def __init__(self, units: Sequence[Unit], tensors: Sequence[Tensor], way: Way, world: int, knobs: Knobs) -> None:
        self.units, self.way, self.world, self.knobs = units, way, world, knobs
        self._specs: list[list[TensorSpec]] = []
        specs = iter([_spec(tensor, kind) for tensor, kind in zip(tensors, way, strict=True)])
        for unit in units:
            self._specs.append([next(specs) for _ in unit.tensors])
        self._items: list[list[Item]] = [[(s.numel, s.granularity) for s in unit if s.numel] for unit in self._specs]
        kinds: dict[tuple[Item, ...], int] = {}
        self._kinds = [kinds.setdefault(tuple(items), len(kinds)) for items in self._items]
        self._numels = [sum(numel for numel, _ in items) for items in self._items]
        self._costs: dict[tuple[float, tuple[int, ...]], tuple[int, int]] = {}

    def best(self, enough: int, replicas: int) -> _Candidate:
        """Return the groups with the smallest largest one that pad to no more than `enough` elements.

        Where there are none: those with the least padding.
        """
        found: list[_Candidate] = []
        for limit in self._limits():
            for slack in (SLACK, 0.0):
                padded, buffers, cuts = self._cut(limit, slack)
                good = padded * self.world <= enough
                tiles = sum(1 for kind in self.way if kind is Storage.TILES)
                turned = sum(1 for kind in self.way if kind is Storage.TRANSPOSED)
                cost = (replicas, tiles > 0, limit, buffers, turned) if good else ()
                key = (0.0, *cost, padded) if good else (1.0, padded * self.world, replicas, *cost)
                found.append(_Candidate(self, cuts, slack, good, key))
                if good:
                    return found[-1]
        return min(found, key=lambda candidate: candidate.key)

    def _limits(self) -> list[int]:
        """Elements that a group may have: as many as the largest of one unit, two units, and so on."""
        share = self.knobs.group_share * sum(self._numels)
        limits: list[int] = []
        for count in range(1, len(self.units) + 1):
            limit = max(sum(self._numels[i : i + count]) for i in range(len(self.units) - count + 1))
            if count > 1 and limit > max(share, limits[0]):
                break
            limits.append(limit)
        return sorted(set(limits))

    def _cut(self, limit: int, slack: float) -> tuple[int, int, list[int]]:
        """Return the sum of the shards, the number of buffers, and where groups end, for the least sum."""
        best: list[tuple[int, int, int]] = [(0, 0, 0)]
        for stop in range(1, len(self.units) + 1):
            numel = 0
            choice: tuple[int, int, int] | None = None
            for start in range(stop - 1, -1, -1):
                numel += self._numels[start]
                if numel > limit and start < stop - 1:
                    break
                shard, buffers = self._cost(tuple(self._kinds[start:stop]), start, stop, slack)
                total = (best[start][0] + shard, best[start][1] + buffers, start)
                if choice is None or total[:2] < choice[:2]:
                    choice = total
            assert choice is not None, "a unit alone may be a group"
            best.append(choice)
        cuts, at = [], len(self.units)
        while at:
            cuts.append(at)
            at = best[at][2]
        return best[-1][0], best[-1][1], cuts[::-1]

    def _cost(self, kinds: tuple[int, ...], start: int, stop: int, slack: float) -> tuple[int, int]:
        known = self._costs.get((slack, kinds))
        if known is None:
            items = [item for unit in self._items[start:stop] for item in unit]
            shards, parts = divide(items, self.world, self.knobs.multiple, slack)
            known = self._costs[slack, kinds] = (sum(shards), len(parts))
        return known

    def groups(self, cuts: Sequence[int], slack: float) -> tuple[GroupPlan, ...]:
        """Make the plans of groups that end at `cuts`."""
        found, start = [], 0
        for stop in cuts:
            specs = [spec for unit in self._specs[start:stop] for spec in unit]
            buffers = plan_parts(specs, self.world, multiple=self.knobs.multiple, tolerance=slack)
            found.append(GroupPlan(tuple(unit.name for unit in self.units[start:stop]), buffers))
            start = stop
        return tuple(found)
