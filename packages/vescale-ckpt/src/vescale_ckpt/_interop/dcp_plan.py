"""What torch.distributed.checkpoint's plans say, as tensors and boxes of ours: one list of tensors for all ranks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from .. import _state
from .._geometry import Box, Explicit, Layout
from .._state import TensorSpec
from ..errors import LayoutError, RanksError, StateError
from .nesting import KeyPath, nest
from .streaming import layout_of, marker

__all__ = ["Whole", "box_of", "names_step", "step_of", "whole_of"]

_DIGITS = re.compile(r"(\d+)\D*$", re.ASCII)


@dataclass(slots=True)
class Whole:
    """The state of all ranks."""

    specs: list[TensorSpec]
    """Its tensors, in the order of their numbers."""
    numbers: dict[str, int]
    """Key as DCP has it -> number of the tensor."""
    paths: dict[str, KeyPath]
    """Key -> keys on the way, for all leaves."""
    plans: list[SavePlan] = field(default_factory=list)
    """What each rank writes, nothing twice."""

    def tree(self, values: Mapping[str, Any]) -> Any:
        """Return the JSON of the state, given the values of the leaves that are no tensors.

        Raises:
            StateError: values have keys that make the names of tensors ambiguous.
        """
        packed, markers = _pack(self.paths, self.numbers, values)
        names = [name for name, _ in packed.tensors]
        if names != [spec.name for spec in self.specs]:
            raise StateError("state: keys of values are spelled like keys of tensors. Use different keys.")
        del markers
        return packed.tree


def step_of(checkpoint_id: Any) -> int:
    """Return the number of the step that a `checkpoint_id` means: the last number in its last part.

    Example:
        >>> step_of("outputs/checkpoint/step-1000")
        1000
    """
    name = str(checkpoint_id).rstrip("/").rpartition("/")[2]
    match = _DIGITS.search(name)
    if match is None:
        raise ValueError(
            f"checkpoint_id: {str(checkpoint_id)!r} ends in no number, which would be the step. The store is known "
            f"already, so leave it out, or pass one such as 'step-1000'."
        )
    return int(match[1])


def names_step(checkpoint_id: Any) -> bool:
    """Tell whether a `checkpoint_id` means a step."""
    try:
        step_of(checkpoint_id)
    except ValueError:
        return False
    return True


def box_of(item: WriteItem) -> Box:
    """Return which elements of its tensor an item holds."""
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def whole_of(plans: Sequence[SavePlan]) -> Whole:
    """Put the plans of all ranks together.

    Raises:
        RanksError: ranks have different tensors under one key.
        LayoutError: the boxes of a tensor do not make it up.
        StateError: a dtype that is not saved, or keys that cannot be told apart.
    """
    kinds: dict[str, tuple[str, tuple[int, ...], int]] = {}
    parts: dict[str, dict[Box, int]] = {}
    leaves: dict[str, None] = {}
    kept = []
    for rank, plan in enumerate(plans):
        items = []
        for item in plan.items:
            name = item.index.fqn
            if item.type is WriteItemType.BYTE_IO or item.tensor_data is None:
                if name not in leaves:
                    items.append(item)
                leaves.setdefault(name)
                continue
            leaves.setdefault(name)
            kind = _state.dtype_name(item.tensor_data.properties.dtype), tuple(item.tensor_data.size)
            *other, first = kinds.setdefault(name, (*kind, rank))
            if tuple(other) != kind:
                raise RanksError(
                    f"state: {name} is {other[0]} {other[1]} on rank {first}, but {kind[0]} {kind[1]} on rank {rank}."
                )
            box = box_of(item)
            if parts.setdefault(name, {}).setdefault(box, rank) == rank:
                items.append(item)
        kept.append(dataclasses.replace(plan, items=items))
    paths = _paths_of(plans, list(leaves))
    packed, markers = _pack(paths, kinds, {})
    number_of = {id(tensor): number for number, (_, tensor) in enumerate(packed.tensors)}
    numbers = {name: number_of[id(markers[name])] for name in kinds}
    specs: list[Any] = [None] * len(numbers)
    for name, number in numbers.items():
        dtype, shape, _ = kinds[name]
        layout = _layout(name, shape, parts[name])
        specs[number] = TensorSpec(packed.tensors[number][0], dtype, shape, layout)
    return Whole(specs, numbers, paths, kept)


def _pack(
    paths: Mapping[str, KeyPath], tensors: Mapping[str, Any], values: Mapping[str, Any]
) -> tuple[_state.Packed, dict[str, Tensor]]:
    markers = {name: marker() for name in tensors}
    leaves = [(path, markers[name] if name in markers else values.get(name)) for name, path in paths.items()]
    return _state.pack(nest(leaves)), markers


def _paths_of(plans: Sequence[SavePlan], names: Sequence[str]) -> dict[str, KeyPath]:
    """Return the path of each key; the key itself where the planner does not tell."""
    told: dict[str, Any] = {}
    for plan in plans:
        if isinstance(plan.planner_data, dict):
            told |= plan.planner_data
    if not all(isinstance(told.get(name), tuple) for name in names):
        return {name: (name,) for name in names}
    # In the order of the state, which the mapping of the first rank has, not in that in which items were spread.
    known = set(names)
    return {name: path for name, path in told.items() if name in known}


def _layout(name: str, shape: tuple[int, ...], parts: Mapping[Box, int]) -> Layout:
    boxes = [box for box in parts if box.numel]
    if not _state.covers(shape, boxes):
        raise LayoutError(
            f"state: {name}: the {len(boxes)} boxes that the ranks want to write do not make up a tensor of shape "
            f"{shape}, each element once."
        )
    if not boxes:
        return layout_of(shape, [Box.whole(shape)])
    ranks = sorted({parts[box] for box in boxes})
    if len(ranks) == 1:
        return layout_of(shape, boxes, ranks[0])
    return Explicit(tuple((rank, tuple(box for box in boxes if parts[box] == rank)) for rank in ranks))
