"""The state of a sharded optimizer in terms of whole parameters: by name, with no trace of buckets or padding.

Tensors with an element per element of a parameter are `ShardTensor`s that share memory with the optimizer's own state.
Numbers, such as the step, are copies. So the state of one number of ranks loads into any other, through a checkpoint
that reads layouts, or as whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._objects import gather_objects
from .._shards import Box, ShardTensor, Whole, run_boxes
from ..errors import CommError, MismatchError
from .inner import Inner
from .segments import Member, Segment, state_tensor

__all__ = ["MAIN", "load_groups", "load_states", "piece_of", "states_of", "whole_states"]

MAIN = "main"
"""Key of the main parameters, where they have another dtype than the parameters."""


def states_of(inner: Inner, wholes: Mapping[str, Whole], with_main: Sequence[bool]) -> dict[str, dict[str, Any]]:
    """Return the state of every parameter of which this rank knows some.

    Args:
        inner: the optimizers.
        wholes: of each parameter by name.
        with_main: per bucket, whether its main parameters are a copy of their own.
    """
    found: dict[str, dict[str, Any]] = {}
    for segment in inner.segments:
        state = inner.state(segment)
        for member in segment.members:
            whole = wholes[member.name]
            values = found.setdefault(member.name, {})
            if with_main[segment.bucket]:
                values[MAIN] = _share(segment.tensor.detach(), member, whole)
            for key, value in state.items():
                elements = state_tensor(value, segment)
                if elements is not None:
                    values[key] = _share(elements, member, whole)
                else:
                    values[key] = value.clone() if isinstance(value, Tensor) and not value.ndim else value
    return {name: values for name, values in found.items() if values}


def _share(elements: Tensor, member: Member, whole: Whole) -> ShardTensor:
    flat = elements.view(-1)[member.offset : member.offset + member.numel]
    return ShardTensor.make(flat, whole, member.start, member.stop)


def load_groups(given: Sequence[Mapping[str, Any]], groups: Sequence[dict[str, Any]]) -> dict[Any, str]:
    """Take over hyperparameters, and return the names of the parameters under their saved keys.

    Args:
        given: the saved groups, whose "params" are names, or the numbers that torch's optimizers use.
        groups: the groups of the optimizer, with "param_names"; they are changed.

    Raises:
        MismatchError: other numbers of groups or parameters, or other names.
    """
    if len(given) != len(groups):
        raise MismatchError(f"state_dict: has {len(given)} parameter groups, this optimizer has {len(groups)}.")
    names: dict[Any, str] = {}
    for number, (saved, group) in enumerate(zip(given, groups, strict=True)):
        keys, own = list(saved["params"]), group["param_names"]
        if len(keys) != len(own):
            raise MismatchError(
                f"state_dict: group {number} has {len(keys)} parameters, this optimizer's has {len(own)}."
            )
        if all(isinstance(key, str) for key in keys):
            if set(keys) != set(own):
                other = sorted(set(keys) ^ set(own))
                raise MismatchError(f"state_dict: group {number} has other parameters: {', '.join(other[:5])}.")
            names.update((key, key) for key in keys)
        else:
            names.update(zip(keys, own, strict=True))
    for saved, group in zip(given, groups, strict=True):
        group.update(
            deepcopy({key: v for key, v in saved.items() if key not in ("params", "param_names", "optimizer")})
        )
    return names


def load_states(inner: Inner, wholes: Mapping[str, Whole], states: Mapping[str, Mapping[str, Any]]) -> bool:
    """Give the optimizers a saved state; what is saved for other ranks' parameters is passed over.

    Args:
        inner: the optimizers.
        wholes: of each parameter by name.
        states: by name; values are `ShardTensor`s with the elements of this rank, or whole tensors.

    Returns:
        Whether main parameters were among it.

    Raises:
        MismatchError: tensors that do not fit the parameters.
    """
    inner_segments, main = list(inner.segments), False
    while inner_segments:
        segment = inner_segments.pop(0)
        given = [dict(states.get(member.name, {})) for member in segment.members]
        mains = [values.pop(MAIN, None) for values in given]
        for member, value in zip(segment.members, mains, strict=True):
            if value is not None:
                main = True
                view = segment.tensor.detach().view(-1)[member.offset : member.offset + member.numel]
                view.copy_(piece_of(value, member, wholes[member.name], MAIN))
        if len(given) > 1 and not _uniform(given, segment, inner, wholes):
            inner_segments = [*inner.split(segment), *inner_segments]
        elif not given[0]:
            inner.put_state(segment, {})
        else:
            inner.put_state(segment, dict(_joined(given, segment, inner, wholes)))
    return main


def _joined(
    given: Sequence[Mapping[str, Any]], segment: Segment, inner: Inner, wholes: Mapping[str, Whole]
) -> Iterator[tuple[str, Any]]:
    old = inner.state(segment)
    for key, first in given[0].items():
        if not _is_elementwise(key, first, segment, wholes[segment.members[0].name], old):
            yield key, _number(first, old.get(key), segment)
            continue
        target = old.get(key)
        if not isinstance(target, Tensor) or tuple(target.shape) != segment.shape:
            dtype = segment.tensor.dtype if first.is_floating_point() else first.dtype
            target = torch.zeros(segment.shape, dtype=dtype, device=segment.tensor.device)
        for member, values in zip(segment.members, given, strict=True):
            view = target.view(-1)[member.offset : member.offset + member.numel]
            view.copy_(piece_of(values[key], member, wholes[member.name], key))
        yield key, target


def _is_elementwise(key: str, value: Any, segment: Segment, whole: Whole, old: Mapping[str, Any]) -> bool:
    if not isinstance(value, Tensor):
        return False
    known = old.get(key)
    expected = known is not None and state_tensor(known, segment) is not None
    if isinstance(value, ShardTensor) or (value.ndim and (segment.merged or expected)):
        return True  # and refused where it does not fit
    if tuple(value.shape) != whole.shape:
        return False
    # A parameter without dims has states of the shape of a number.
    return bool(whole.shape) or (key != "step" and (known is None or expected))


def _number(value: Any, old: Any, segment: Segment) -> Any:
    if not isinstance(value, Tensor):
        return deepcopy(value)
    device = old.device if isinstance(old, Tensor) else value.device
    if value.ndim:
        device = segment.tensor.device
    return value.detach().clone().to(device)


def _uniform(given: Sequence[Mapping[str, Any]], segment: Segment, inner: Inner, wholes: Mapping[str, Whole]) -> bool:
    """Tell whether parameters may go on in one segment: all have a state, with equal numbers."""
    first, old = given[0], inner.state(segment)
    for member, values in zip(segment.members, given, strict=True):
        if values.keys() != first.keys():
            return False
        for key, value in values.items():
            if _is_elementwise(key, value, segment, wholes[member.name], old):
                continue
            same = torch.equal(value, first[key]) if isinstance(value, Tensor) else value == first[key]
            if not same:
                return False
    return True


def piece_of(value: Tensor, member: Member, whole: Whole, key: str) -> Tensor:
    """Return the elements of a parameter that this rank holds, in one dimension.

    Args:
        value: a `ShardTensor` with just these elements, or the whole tensor.
        member: the parameter in its segment.
        whole: the parameter as a whole.
        key: of the value, for messages.

    Raises:
        MismatchError: it has neither.
    """
    boxes = run_boxes(whole.boxes, member.start, member.stop)
    if isinstance(value, ShardTensor):
        if value.global_shape != whole.shape or tuple(value.boxes) != boxes:
            raise MismatchError(
                f"state_dict: {key} of {member.name} holds {list(value.boxes)} of a tensor of "
                f"{list(value.global_shape)}, but this rank needs {list(boxes)} of {list(whole.shape)}. It was made by "
                f"another number of ranks or another plan: load it through vescale_ckpt, or save full_state_dict()."
            )
        return value.plain()
    if tuple(value.shape) != whole.shape:
        raise MismatchError(
            f"state_dict: {key} of {member.name} has shape {list(value.shape)}, the parameter {list(whole.shape)}."
        )
    if not boxes:
        return value.new_empty(0)
    return torch.cat([value[_slices(box)].reshape(-1) for box in boxes])


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))


def whole_states(
    own: Mapping[str, Mapping[str, Any]], names: Iterable[str], group: dist.ProcessGroup
) -> dict[str, dict[str, Any]]:
    """Return the state of every parameter with whole tensors, on the CPU; every rank of the group must call it.

    Args:
        own: what this rank knows, as `states_of` tells it.
        names: of all parameters, in the order of the result.
        group: the ranks that share the state.
    """
    parts = {
        name: {
            key: (value.global_shape, value.boxes, value.plain().cpu()) if isinstance(value, ShardTensor) else value
            for key, value in values.items()
        }
        for name, values in own.items()
    }
    every = gather_objects(parts, group)
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        held = [one[name] for one in every if name in one]
        keys = dict.fromkeys(key for values in held for key in values)
        if keys:
            found[name] = {key: _whole([values[key] for values in held if key in values]) for key in keys}
    return found


def _whole(values: Sequence[Any]) -> Any:
    """Put the parts of ranks together; of other values return the first."""
    first = values[0]
    if not (isinstance(first, tuple) and len(first) == 3 and isinstance(first[2], Tensor)):
        return first
    whole = torch.empty(first[0], dtype=first[2].dtype)
    filled = 0
    for _, boxes, flat in values:
        at = 0
        for box in boxes:
            whole[_slices(box)] = flat[at : at + box.numel].view(box.shape)
            at += box.numel
        filled += at
    if filled < whole.numel():
        raise CommError(f"Only {filled} of {whole.numel()} elements of a state are on the ranks of this group.")
    return whole
