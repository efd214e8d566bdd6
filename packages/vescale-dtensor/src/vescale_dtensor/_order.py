"""The order in memory that one device would give a tensor, which decides the draw that each element gets.

The local part tells it, by its strides. A rank that holds at most one position of a dim sees less: operators that
make new tensors may lose the order there. Where ranks may differ in that, the one that holds most decides for all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ._irregular import Ragged, cut_dims_of
from ._spec import Spec, global_stride

__all__ = ["agreed_stride", "in_order", "keep_order", "loses_order", "ranks_may_differ"]

_shape = Tensor.shape.__get__  # type: ignore[attr-defined]
_stride = Tensor.stride
_run = torch._C._disabled_torch_function_impl


def in_order(result: Tensor, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return `result` with its dims in memory in the order of a tensor of `shape` and `stride`; copied if need be."""
    wanted = _stride_like(tuple(result.shape), shape, stride)
    if wanted is None or tuple(result.stride()) == wanted:
        return result
    out = torch.empty_strided(tuple(result.shape), wanted, dtype=result.dtype, device=result.device)
    return out.copy_(result)


def _stride_like(new: tuple[int, ...], shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of a dense tensor of shape `new`, its dims ordered as those of another; None for the usual order."""
    ndim = len(shape)
    if any(s == 0 and n > 1 for s, n in zip(stride, shape, strict=True)):
        return None  # an expanded tensor has no order to keep
    order = sorted(range(ndim), key=lambda d: (stride[d], max(shape[d], 1), -d))
    if order == list(range(ndim - 1, -1, -1)):
        return None
    wanted, step = [0] * ndim, 1
    for d in order:
        wanted[d] = step
        step *= max(new[d], 1)
    return tuple(wanted)


def loses_order(spec: Spec) -> bool:
    """Whether this rank holds at most one position of a dim, so that elementwise operators may forget the order."""
    if spec.irregular and _is_ragged(spec):
        return False  # what is flattened lies in the usual order
    return sum(n > 1 for n in spec.shape) > 1 and any(spec.local_shape[d] < 2 <= spec.shape[d] for d in spec.sharded)


def _is_ragged(spec: Spec) -> bool:
    return any(isinstance(t, Ragged) for t in spec.types)


def keep_order(result: Tensor, operands: Iterable[object], memory_format: torch.memory_format | None = None) -> Tensor:
    """Give the local result of an elementwise operator the order that the whole has; copies nothing.

    For a tensor that `loses_order`: to torch it is contiguous in any order, while the whole is not.

    Args:
        result: what the operator gave.
        operands: the first of them that has its shape decides.
        memory_format: the order that the caller asked for, if any.
    """
    shape = _run(_shape, (), (result,), {})
    stride = _run(_stride, (), (result,), {})
    wanted: tuple[int, ...] | None = None
    if memory_format is not None and memory_format is not torch.preserve_format:
        wanted = torch.empty(shape, device="meta", memory_format=memory_format).stride()
    else:
        for value in operands:
            if isinstance(value, Tensor) and _run(_shape, (), (value,), {}) == shape:
                of_operand = _run(_stride, (), (value,), {})
                if of_operand == stride:
                    return result
                wanted = _stride_like(tuple(shape), shape, of_operand)
                break
    if wanted is None or stride == wanted or not _equivalent(shape, stride, wanted):
        return result
    return _run(Tensor.as_strided, (), (result, tuple(shape), wanted), {})  # type: ignore[no-any-return]


def _equivalent(shape: Sequence[int], one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether two strides reach the same elements: they may differ where there is only one position."""
    return 0 in shape or all(a == b or n == 1 for n, a, b in zip(shape, one, other, strict=True))


def agreed_stride(spec: Spec, local_stride: Sequence[int]) -> tuple[int, ...]:
    """Return the stride that one device would give the whole tensor, the same on all ranks of the mesh.

    Every rank of the mesh calls it where `ranks_may_differ`: it communicates then.
    """
    mine = global_stride(spec, local_stride)
    mesh = spec.mesh
    if not ranks_may_differ(spec) or dist.get_backend() == "fake":
        return mine
    axes = tuple(range(mesh.ndim))
    said = torch.tensor(mine, dtype=torch.int64, device=mesh.device_type)
    # Chunks do not grow along an axis, so that the first rank of all axes holds most in every dim.
    dist.broadcast(said, group=mesh.group(axes), group_src=mesh.members(axes).index((0,) * mesh.ndim))
    return tuple(said.tolist())


def ranks_may_differ(spec: Spec) -> bool:
    """Whether some rank holds at most one position of a dim of which another one holds more (or none)."""
    found: bool | None = spec.cache.get(ranks_may_differ)
    if found is None:
        found = spec.cache[ranks_may_differ] = (
            sum(n > 1 for n in spec.shape) > 1
            and not _is_ragged(spec)
            and any(len(_kinds(spec, dim)) > 1 for dim in spec.sharded)
        )
    return found


def _kinds(spec: Spec, dim: int) -> set[int]:
    """Numbers of positions of a dim that ranks hold: 0, 1, or 2 for more."""
    ranges = [range(n) if dim in cut_dims_of(t) else range(1) for n, t in zip(spec.mesh.sizes, spec.types, strict=True)]
    return {min(spec.pieces_of(c).shape[dim], 2) for c in itertools.product(*ranges)}
