"""Making this rank's block of a deferred tensor, without the rest of it.

Each memory is given a *window*, the block that this rank holds: that of the tensor that is wanted, the same for
the tensors that it was computed from element by element, and the whole for all others. Whether a tensor can be made
in parts follows from shapes and operators alone, so all ranks take the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._mesh import MeshInfo
from .._pieces import read
from .._spec import Spec, replicated, spec_of
from ..placements import AxisTypes
from . import draws
from .tape import Constant, Memory, Node, Ref, mapped, needed
from .whole import as_recorded

_COPYING = frozenset("fill_ zero_ copy_ clone _to_copy".split())


class NotByParts(Exception):
    """The tensor can be made only whole."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the elements of a tensor argument stand in its memory."""

    dims: tuple[int | None, ...]
    """Dim of the memory for each dim of the argument; None for a dim of one position that the memory lacks."""
    start: tuple[int, ...]
    """First position per dim of the memory."""
    length: tuple[int, ...]
    """Number of positions per dim of the memory."""


def place_of(ref: Ref) -> Place:
    """Find the block of its memory that an argument is; `NotByParts` if it is none."""
    m = ref.memory
    if not m.contiguous or ref.dtype != m.dtype:
        raise NotByParts
    rest, start = ref.offset, []
    for stride, size in zip(m.stride, m.size, strict=True):
        start.append(min(rest // stride, max(size - 1, 0)))
        rest -= start[-1] * stride
    length: list[int] = [1] * len(m.size)
    dims: list[int | None] = []
    for size, stride in zip(ref.size, ref.stride, strict=True):
        fitting = [d for d, s in enumerate(m.stride) if s == stride and d not in dims and m.size[d] - start[d] >= size]
        fitting = [d for d in fitting if m.size[d] > 1] or fitting
        if size == 1 and (not fitting or m.size[fitting[0]] > 1):
            dims.append(next((d for d in fitting if m.size[d] == 1), None))
        elif fitting:
            length[fitting[0]] = size
            dims.append(fitting[0])
        else:
            raise NotByParts
    if rest or 0 in m.size:
        raise NotByParts
    return Place(tuple(dims), tuple(start), tuple(length))


def by_parts(ref: Ref, mesh: MeshInfo, types: AxisTypes) -> Tensor:
    """Return this rank's block of a deferred tensor.

    Raises:
        NotByParts: it takes the whole.
    """
    if not ref.is_whole or not ref.memory.contiguous:
        raise NotByParts
    nodes = needed(ref.memory)
    windows = Windows(mesh, _assign(nodes, ref.memory, types))
    last = {m: i for i, n in enumerate(nodes) for m in [r.memory for r in n.refs] + [m for _, m in n.made]}
    with torch.no_grad():
        for i, node in enumerate(nodes):
            windows.run(node)
            for memory in [m for m in windows.of if last[m] <= i and m is not ref.memory]:
                del windows.of[memory]
    return windows.of[ref.memory]


def is_elementwise(node: Node) -> bool:
    """Whether each element of the result depends on the elements at its place only."""
    if node.state is not None or len(node.made) + len(node.written) != 1:
        return False
    return torch.Tag.pointwise in node.func.tags or node.name in _COPYING


def _assign(nodes: list[Node], wanted: Memory, types: AxisTypes) -> dict[Memory, AxisTypes]:
    """Axis types of the memories that need not be whole, from the last operator to the first."""
    entire = {
        r.memory for n in nodes if not is_elementwise(n) and n.state is None for r in n.refs if r not in n.written
    }
    found = {wanted: types}
    for node in reversed(nodes):
        if not is_elementwise(node):
            continue
        result = node.made[0][1] if node.made else node.written[0].memory
        if result not in found:
            continue
        for r in node.refs:
            if r.is_whole and r.memory.contiguous and r.size == result.size and r.memory not in entire:
                found.setdefault(r.memory, types)
    return found


class Windows:
    """The blocks of memories that this rank has made."""

    def __init__(self, mesh: MeshInfo, types: dict[Memory, AxisTypes]) -> None:
        self.mesh, self.types = mesh, types
        self.of: dict[Memory, Tensor] = {}

    def spec(self, memory: Memory) -> Spec:
        """Layout of a memory: the whole on every rank, unless assigned."""
        types = self.types.get(memory)
        return replicated(self.mesh, memory.size) if types is None else spec_of(self.mesh, memory.size, types)

    def run(self, node: Node) -> None:
        """Run one operator on the blocks."""
        if node.name == "empty_strided":
            memory = node.made[0][1]
            if memory.contiguous:
                self.of[memory] = torch.empty(self.spec(memory).local_shape, dtype=memory.dtype, device=memory.device)
            else:
                self.of[memory] = node.run(node.args, node.kwargs)
        elif node.state is not None:
            self._draw(node)
        elif is_elementwise(node):
            self._elementwise(node)
        else:
            self._whole(node)

    def _draw(self, node: Node) -> None:
        if node.made:
            memory = node.made[0][1]
        else:
            memory = node.written[0].memory
            if not node.written[0].is_whole:
                self._whole(node)
                return
        if memory.contiguous and len(node.made) + len(node.written) == 1:
            spec = self.spec(memory)
            local = self.of.get(memory)
            if local is None:
                local = torch.empty(spec.local_shape, dtype=memory.dtype, device=memory.device)
            if draws.fill(node, local, spec):
                self.of[memory] = local
                return
        self._whole(node)

    def _whole(self, node: Node) -> None:
        """Run an operator on whole arguments; of what it makes, keep the block."""
        args, kwargs = mapped((node.args, node.kwargs), self._whole_argument)
        if node.state is None:
            result = node.run(args, kwargs)
        else:
            device = node.written[0].memory.device if node.written else node.made[0][1].device
            result = draws.run_whole(node, args, kwargs, device)
        results = list(result) if isinstance(result, list | tuple) else [result]
        for position, memory in node.made:
            made = as_recorded(results[position], memory)
            spec = self.spec(memory)
            if memory in self.types:
                made = read(made, spec.pieces_of(self.mesh.coordinate))
            self.of[memory] = made

    def _whole_argument(self, value: Any) -> Any:
        if isinstance(value, Constant):
            return value.value()
        if not isinstance(value, Ref):
            return value
        if value.memory in self.types:
            raise NotByParts
        base = self.of[value.memory]
        if value.is_whole:
            return base
        empty = torch.empty(0, dtype=value.dtype, device=base.device)
        return empty.set_(base.untyped_storage(), value.offset, value.size, value.stride)

    # ---------------------------------------------------------------- element by element

    def _elementwise(self, node: Node) -> None:
        if node.written:
            target = node.written[0]
        else:
            memory = node.made[0][1]
            target = Ref(memory, memory.size, memory.stride, 0, memory.dtype)
        if target.memory not in self.types and not any(r.memory in self.types for r in node.refs):
            self._whole(node)
            return
        place, spec = place_of(target), self.spec(target.memory)
        if spec.irregular:
            self._on_pieces(node, target, spec)
            return
        block = [
            _overlap(place.start[d], place.length[d], spec.local_offset[d], spec.local_shape[d])
            for d in range(spec.ndim)
        ]
        args, kwargs = mapped(
            (node.args, node.kwargs), lambda v: self._operand(v, target, place, block, v is target or v == target)
        )
        if any(n <= 0 for _, n in block):
            if node.made:
                self.of[target.memory] = torch.empty(spec.local_shape, dtype=target.dtype, device=target.memory.device)
            return
        result = node.run(args, kwargs)
        if node.made:
            self.of[target.memory] = result.contiguous()

    def _on_pieces(self, node: Node, target: Ref, spec: Spec) -> None:
        """Run an operator on local parts of several blocks; only on whole tensors of one shape, and numbers."""
        if not target.is_whole:
            raise NotByParts

        def operand(value: Any) -> Any:
            if isinstance(value, Ref) and value.memory in self.types:
                if not value.is_whole or value.size != target.size or self.types[value.memory] != spec.types:
                    raise NotByParts
                return self.of[value.memory]
            whole = self._whole_argument(value)
            if not isinstance(whole, Tensor) or not whole.ndim:
                return whole
            return read(whole.expand(target.size), spec.pieces_of(self.mesh.coordinate))

        result = node.run(*mapped((node.args, node.kwargs), operand))
        if node.made:
            self.of[target.memory] = result.contiguous()

    def _operand(self, value: Any, target: Ref, place: Place, block: list[tuple[int, int]], written: bool) -> Any:
        """The elements of an argument that stand where this rank's block of the result is."""
        if isinstance(value, Constant):
            return _cut(value.value(), target, place, block)
        if not isinstance(value, Ref):
            return value
        if value.memory not in self.types:
            return _cut(self._whole_argument(value), target, place, block)
        same = value.memory.size == target.memory.size and self.types.get(target.memory) == self.types[value.memory]
        if not written and not (same and place_of(value) == place):
            raise NotByParts
        base = self.of[value.memory]
        spec = self.spec(value.memory)
        for d, (start, length) in enumerate(block):
            base = base.narrow(d, max(start - spec.local_offset[d], 0), max(length, 0)) if length > 0 else base
        return _arranged(base, place) if all(n > 0 for _, n in block) else base


def _overlap(start: int, length: int, offset: int, held: int) -> tuple[int, int]:
    first, end = max(start, offset), min(start + length, offset + held)
    return first, end - first


def _arranged(block: Tensor, place: Place) -> Tensor:
    """Bring the dims of a memory's block into the order of the argument."""
    used = [d for d in place.dims if d is not None]
    left_out = [d for d in range(block.ndim) if d not in used]
    block = block.permute(*used, *left_out) if block.ndim else block
    for _ in left_out:
        block = block.squeeze(-1)
    for i, d in enumerate(place.dims):
        if d is None:
            block = block.unsqueeze(i)
    return block


def _cut(whole: Tensor, target: Ref, place: Place, block: list[tuple[int, int]]) -> Tensor:
    """The block of a whole argument, which may be broadcast."""
    missing = len(target.size) - whole.ndim
    for i, d in enumerate(place.dims):
        if d is None or i < missing or whole.shape[i - missing] == 1 or block[d][1] <= 0:
            continue
        whole = whole.narrow(i - missing, block[d][0] - place.start[d], block[d][1])
    return whole
