"""Handler of the operators without a closed form: every rank draws the whole result and keeps its part.

The tensor arguments are gathered first. The generators are in step, so all ranks draw the same numbers and stay so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .._draw.fill import take as take_into
from .._draw.interception import InterceptRandom
from .._draw.keep import keep
from .._draw.mode import active_sampler
from .._layout import Part, part_of_mesh
from ..errors import UnsupportedRandomOperatorError
from .operands import refuse_plain, take, whole_of
from .places import dense_stride, place_of, wrap
from .ready import ready, refuse_overlap

__all__ = ["draw_whole", "restored_if_it_fails"]


def draw_whole(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the whole of its tensor arguments, and keep this rank's part of what it returns and writes."""
    given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
    sharded = {name: value for name, value in given.items() if isinstance(value, DTensor)}
    generator = given.get("generator")
    _refuse_what_cannot_be(op, given, generator)
    first = next(iter(sharded.values()))
    for name in _written(op):
        if name in sharded and place_of(sharded[name]).overlaps:
            refuse_overlap(sharded[name]._local_tensor)
    if _nothing_to_draw(op, sharded.values(), generator):
        return _without_drawing(op, given, sharded)
    wholes = {name: whole_of(value) for name, value in sharded.items()}
    device = first._local_tensor.device
    with torch.no_grad(), restored_if_it_fails(device, generator):
        found = _call(op, given | wholes)
        for name, value in sharded.items():
            if wholes[name].shape != value.shape:
                raise UnsupportedRandomOperatorError(
                    f"{op}: {name} has shape {tuple(value.shape)}, but the result {tuple(wholes[name].shape)}, and a "
                    f"DTensor cannot be resized. Give a DTensor of that shape"
                )
    for name in _written(op):
        if name in sharded:
            place = place_of(sharded[name])
            local = ready(str(op), place, sharded[name]._local_tensor, None)
            if local is not None:
                take_into(wholes[name], local, place.part)
    return _results(op, found, given, sharded, lambda value, spec, part, stride: take(value, part, stride))


def _refuse_what_cannot_be(op: Any, given: dict[str, Any], generator: Any) -> None:
    for value in given.values():
        if isinstance(value, Tensor) and not isinstance(value, DTensor):
            refuse_plain(str(op), value)
    sampler = active_sampler()
    if sampler is not None and generator is None and not _is_intercepted():
        raise UnsupportedRandomOperatorError(
            f"{op} is not defined for {type(sampler).__name__}; draw it outside of the block, or give a torch.Generator"
        )


def _is_intercepted() -> bool:
    """Whether operators on plain tensors are drawn by the sampler too, or refused by it: on the thread of its block."""
    return any(isinstance(mode, InterceptRandom) for mode in _get_current_dispatch_mode_stack())


def _nothing_to_draw(op: Any, sharded: Iterable[DTensor], generator: torch.Generator | None) -> bool:
    found = [ready(str(op), place_of(value), value._local_tensor, generator) for value in sharded]
    return any(local is None for local in found)


def _call(op: Any, given: dict[str, Any]) -> Any:
    names = [a.name for a in op._schema.arguments if not a.kwarg_only]
    positional = [given[name] for name in names if name in given]
    return op(*positional, **{name: value for name, value in given.items() if name not in names})


def _without_drawing(op: Any, given: dict[str, Any], sharded: dict[str, DTensor]) -> Any:
    """On the meta device, with fake tensors and outside of the mesh: results of the right shape, and nothing drawn."""
    metas = {
        name: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        for name, value in sharded.items()
    }
    rest = {name: value for name, value in given.items() if not isinstance(value, torch.Generator)}
    found = _call(op, rest | metas)
    device = next(iter(sharded.values()))._local_tensor.device

    def empty(value: Tensor, spec: DTensorSpec, part: Part, stride: tuple[int, ...]) -> Tensor:
        return torch.empty_strided(part.local_shape, stride, dtype=value.dtype, device=device)

    return _results(op, found, given, sharded, empty)


def _written(op: Any) -> list[str]:
    return [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def _results(op: Any, found: Any, given: dict[str, Any], sharded: dict[str, DTensor], make: Any) -> Any:
    values = found if isinstance(found, tuple | list) else (found,)
    results = []
    for value, slot in zip(values, op._schema.returns, strict=True):
        if slot.alias_info is not None and slot.alias_info.is_write:
            results.append(given[_aliased(op, slot)])
        else:
            spec, part = _spec_of(value, list(sharded.values()))
            results.append(wrap(make(value, spec, part, dense_stride(part.local_shape, value.stride())), spec))
    return tuple(results) if isinstance(found, tuple | list) else results[0]


def _aliased(op: Any, slot: Any) -> str:
    names = set(slot.alias_info.before_set)
    aliases: dict[str, Any] = {a.name: a.alias_info for a in op._schema.arguments if a.alias_info is not None}
    return next(name for name, alias in aliases.items() if set(alias.before_set) == names)


def _spec_of(value: Tensor, sharded: list[DTensor]) -> tuple[DTensorSpec, Part]:
    """Return how a result is sharded: as an argument of its shape, as the rows of one, or not at all."""
    meta = TensorMeta(value.shape, value.stride(), value.dtype)
    first = sharded[0]
    mesh = first.device_mesh
    if mesh.get_coordinate() is None:
        spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)
        return spec, Part((0,), (1,), (0,), (), ())
    for model in sharded:
        if model.shape == value.shape:
            place = place_of(model)
            made = place.like_meta(value)
            part = place.part
            return made.spec, Part(part.global_shape, value.stride(), part.local_shape, part.boxes, part.windows)
    placements = tuple(
        p if type(p) is Shard and p.dim == 0 and _same_rows(value, first) else Replicate() for p in first.placements
    )
    spec = DTensorSpec(mesh, placements, tensor_meta=meta)
    if spec.shard_order != _order_of_rows(first, placements):
        placements = (Replicate(),) * mesh.ndim
        spec = DTensorSpec(mesh, placements, tensor_meta=meta)
    return spec, part_of_mesh(tuple(value.shape), mesh, placements, value.stride())


def _same_rows(value: Tensor, source: DTensor) -> bool:
    return value.dim() == source.dim() > 1 and value.shape[0] == source.shape[0]


def _order_of_rows(source: DTensor, placements: tuple[Any, ...]) -> Any:
    """The shard order of what is left of the shards of `source`."""
    if all(p.is_replicate() for p in placements):
        return ()
    return tuple(entry for entry in source._spec.shard_order or () if entry.tensor_dim == 0)


@contextlib.contextmanager
def restored_if_it_fails(device: torch.device, generator: torch.Generator | None = None) -> Iterator[None]:
    """Put the generators that a block uses back as they were if it raises."""
    go_back = keep(device, generator)
    try:
        yield
    except BaseException:
        go_back()
        raise
