"""Which parameter stands in which bucket, and where: the plan that gradients, parameters and states share.

Buckets are runs of parameters in the order of backward. Inside a bucket parameters of one group stand together where
they may be cut anywhere, so that the optimizer gets few long tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._plan import BufferPlan, TensorSpec
from .._plan.blocks import Block, Rows, Whole, granularity
from .._plan.ragged import plan_group, plan_ragged
from ..errors import PlanError

__all__ = ["Entry", "granularity_of", "is_elementwise", "partition"]

ALIGNMENT = 64
"""Bytes: a cache line."""
PADDING = 0.1
"""Share of padding above which buckets that keep blocks whole are made larger."""
ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)
"""Classes that update each element by its own gradient and state, and by numbers that all elements share."""
STRUCTURED = ("Muon", "Adafactor", "LBFGS", "SparseAdam")
"""Classes of torch.optim that do not."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A parameter to be placed."""

    name: str
    """Its name."""
    shape: tuple[int, ...]
    """Shape of this rank's part without this package; that of the parameter if it is plain."""
    dtype: torch.dtype
    """Its dtype."""
    device: torch.device
    """Its device."""
    group: int
    """Number of its group; entries of one group may be merged into one tensor."""
    granularity: int
    """Elements that stay together; 0: may be cut anywhere and merged with its neighbours."""

    @property
    def spec(self) -> TensorSpec:
        """Return what the planner takes."""
        return TensorSpec(self.name, self.shape, max(1, self.granularity))


def is_elementwise(cls: type[torch.optim.Optimizer]) -> bool:
    """Tell whether a class is known to treat elements alone: one of torch.optim, not a class derived of it."""
    return cls in ELEMENTWISE


def granularity_of(plan: Any, cls: type[torch.optim.Optimizer], name: str, shape: tuple[int, ...]) -> int:
    """Return the granularity of a parameter; 0 for one that may be merged with others.

    Args:
        plan: "flat", "whole", "auto"; a rule (`Rows`, `Block`, `Whole`, a number of elements); or a mapping from
            regular expressions of whole names to such.
        cls: the optimizer of the parameter.
        name: of the parameter.
        shape: of the parameter.

    Raises:
        PlanError: a plan that does not exist, that fits no name, or under which the optimizer would be wrong.
    """
    if isinstance(plan, Mapping):
        for pattern, value in plan.items():
            if re.fullmatch(pattern, name):
                return granularity_of(value, cls, name, shape)
        raise PlanError(f'plan: no pattern of {sorted(plan)} fits the parameter {name}; add ".*": "flat" for the rest.')
    if isinstance(plan, (Rows, Block, Whole)) or type(plan) is int:
        return granularity(plan, shape)
    if plan == "auto":
        plan = "flat" if is_elementwise(cls) else "whole"
    if plan == "whole":
        return max(1, math.prod(shape))
    if plan == "flat":
        if cls.__module__.startswith("torch.optim") and cls.__name__ in STRUCTURED:
            raise PlanError(
                f'plan: {cls.__name__} looks at whole matrices, so "flat" shards would change what it computes '
                f'(parameter {name}). Use plan="whole".'
            )
        return 0
    raise PlanError(f'plan: expected "auto", "flat", "whole", a rule or a mapping of patterns, but got {plan!r}.')


def partition(entries: Sequence[Entry], world: int, bucket_bytes: int) -> list[tuple[BufferPlan, tuple[Entry, ...]]]:
    """Return the plans of buckets, in the order in which backward will complete them.

    Args:
        entries: in the order of forward.
        world: number of ranks.
        bucket_bytes: about how large a bucket is; where blocks are kept whole and would leave much padding, buckets
            are as large as it takes.

    Returns:
        Each plan, with its entries in the order of its slots.
    """
    whole = sum(_bytes(entry) for entry in entries)
    while True:
        plans = [_plan(run, world) for run in _runs(entries, bucket_bytes)]
        blocks = any(entry.granularity > 1 for entry in entries)
        used, total = sum(plan.used for plan, _ in plans), sum(plan.numel for plan, _ in plans)
        if not blocks or bucket_bytes >= whole or total - used <= PADDING * total:
            return plans
        bucket_bytes *= 2


def _runs(entries: Sequence[Entry], bucket_bytes: int) -> list[list[Entry]]:
    """Cut the entries, last one first, into runs of one dtype and device, by the order in which they are full."""
    full: list[list[Entry]] = []
    open_runs: dict[tuple[torch.dtype, torch.device], list[Entry]] = {}
    for entry in reversed(entries):
        key = (entry.dtype, entry.device)
        run = open_runs.setdefault(key, [])
        run.append(entry)
        if sum(map(_bytes, run)) >= bucket_bytes:
            full.append(open_runs.pop(key))
    for run in open_runs.values():
        before = next((done for done in reversed(full) if _key(done) == _key(run)), None)
        if before is not None and sum(map(_bytes, run)) * 8 < bucket_bytes:
            # A collective of its own would cost more than it hides; but it then has to wait for the last parameters.
            full.remove(before)
            run[:0] = before
        full.append(run)
    return full


def _plan(run: Sequence[Entry], world: int) -> tuple[BufferPlan, tuple[Entry, ...]]:
    # Of one group in the order of forward, as memory is read.
    forward = run[::-1]
    ordered = sorted(forward, key=lambda entry: entry.group)
    multiple = max(1, ALIGNMENT // ordered[0].dtype.itemsize)
    specs = [entry.spec for entry in ordered]
    if any(entry.granularity > 1 for entry in ordered):
        plan = plan_ragged(specs, world, multiple=multiple)
    else:
        plan = plan_group(specs, world, multiple=multiple)
    by_name = {entry.name: entry for entry in ordered}
    return plan, tuple(by_name[slot.name] for slot in plan.slots)


def _key(run: Sequence[Entry]) -> tuple[torch.dtype, torch.device]:
    return run[0].dtype, run[0].device


def _bytes(entry: Entry) -> int:
    return math.prod(entry.shape) * entry.dtype.itemsize
