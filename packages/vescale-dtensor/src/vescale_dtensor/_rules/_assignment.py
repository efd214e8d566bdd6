"""`x[index] = value` for ints, slices and None: every rank writes what falls into its own block.

`x` never moves. The value moves to where it is needed: along an axis that shards a dim which the
index takes whole it is sharded alike, along one whose dim the index cuts every rank gets all of it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from .._comm.move import move
from .._dispatch import policy
from .._dispatch.engine import label_one
from .._dispatch.solve import unwanted
from .._spec import Spec, replicated
from .._tensor import DTensor
from ..placements import AxisTypes, P, R
from ._index import Part, as_index, cut_dims, layout_of
from ._windows import Range, Window

_run = torch._C._disabled_torch_function_impl
_setitem = Tensor.__setitem__


def as_tensor(x: DTensor, value: Any) -> DTensor:
    """Return a value to assign, a number perhaps, as a tensor like `x`."""
    if isinstance(value, DTensor):
        return value
    local = torch.tensor(value, dtype=x.dtype, device=x.device)
    return label_one(local, replicated(x._spec.mesh, local.shape))


class Assignment:
    """How to assign to one index of tensors of one spec."""

    def __init__(self, spec: Spec, parts: list[Part]) -> None:
        self.spec, self.parts = spec, parts
        self.cut = cut_dims(parts, spec)
        self.index = tuple(as_index(p) for p in parts)
        self.shape, pairs = layout_of(parts)
        self.place = dict(pairs)
        self.pending = P in spec.types
        ranges = {p.dim: p.value for p in parts if p.kind == "range" and p.dim in self.cut}
        self.window = Window(spec, ranges) if self.cut else None
        self.types: dict[Spec, AxisTypes] = {}

    def __call__(self, x: DTensor, value: Any) -> None:
        """Assign a number or a DTensor."""
        if self.pending:
            value = as_tensor(x, value)
        if isinstance(value, DTensor):
            value = self._moved(value)
        if self.window is None:
            _run(_setitem, (), (x, self.index, value), {})
        elif isinstance(value, DTensor):
            _run(self._copy, (), (x, value), {})
        else:
            _run(self._fill, (), (x, value), {})

    def _moved(self, value: DTensor) -> DTensor:
        types = self.types.get(value._spec)
        if types is None:
            source = value._spec
            value = self._fit(value)
            types = self._types_of(value)
            if source is value._spec and len(self.types) < 64:
                self.types[source] = types
        if value._spec.types == types:
            return value
        if policy.state.communication != "allow" and unwanted(self.spec.mesh, value._spec.types, types):
            policy.report("x[index] = value", [(value._spec, types)])
        return move(value, types)

    def _fit(self, value: DTensor) -> DTensor:
        """Drop leading dims of length 1 that the indexed part does not have; check that the value broadcasts."""
        given = list(value.shape)
        while value.ndim > len(self.shape) and value.shape[0] == 1:
            value = cast(DTensor, value.squeeze(0))
        lead = len(self.shape) - value.ndim
        if lead < 0 or any(n not in (1, m) for n, m in zip(value.shape, self.shape[lead:], strict=True)):
            raise RuntimeError(
                f"shape mismatch: value tensor of shape {given} cannot be broadcast to indexing "
                f"result of shape {self.shape}"
            )
        return value

    def _types_of(self, value: DTensor) -> AxisTypes:
        lead = len(self.shape) - value.ndim
        types = []
        for t in self.spec.types:
            own = self.place[t] - lead if t >= 0 and t not in self.cut else -1
            types.append(t if t < 0 else own if own >= 0 and value.shape[own] == self.spec.shape[t] else R)
        return tuple(types)

    # ---------------------------------------------------------------- on local parts

    def _block(self, x: Tensor) -> Tensor:
        """This rank's part of what is assigned, with all dims: an int leaves a dim of length 1 or 0."""
        assert self.window is not None
        index = list(self.window.local)
        for p in self.parts:
            if p.kind == "range" and p.dim not in self.cut:
                r: Range = p.value
                index[p.dim] = slice(r.start, r.start + (r.length - 1) * r.step + 1 if r.length else r.start, r.step)
        return x[tuple(index)]

    def _fill(self, x: Tensor, value: Any) -> None:
        self._block(x).fill_(value)

    def _copy(self, x: Tensor, value: Tensor) -> None:
        assert self.window is not None
        shape = list(self.shape)
        for d, b in self.place.items():
            if d in self.spec.sharded and d not in self.cut:
                shape[b] = self.spec.local_shape[d]
        value = value.expand(shape)
        at = 0
        for p in self.parts:  # bring the value to the dims of x: no dims for None, dims of length 1 for ints
            if p.kind == "new":
                value = value.select(at, 0)
                continue
            if p.value.single:
                value = value.unsqueeze(at)
            at += 1
        offset, length = self.window.held
        for d in self.cut:
            value = value.narrow(d, offset[d] if length[d] else 0, length[d])
        self._block(x).copy_(value)
