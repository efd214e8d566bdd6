"""Values that a construction reads while it is written down, such as whether a draw must be repeated."""

from __future__ import annotations

from torch import Tensor

from .. import _random
from .._imagined import imagined_mesh
from . import draws
from .parts import NotByParts, by_parts
from .tape import Node, Ref, needed
from .whole import whole

BLOCK = 1 << 20
"""Elements of a tensor that are made at a time where the question is whether any or all of them are true."""


def read(ref: Ref) -> Tensor:
    """Return the values of a deferred tensor that the construction itself asks for."""
    for node in needed(ref.memory):
        if node.state is not None:
            draws.require_one_stream(node)
    asked = _question(ref)
    if asked is not None:
        try:
            return _answer(*asked)
        except NotByParts:
            pass
    return whole(ref)


def _question(ref: Ref) -> tuple[Node, Ref] | None:
    """The operator and its argument, if the value is "any" or "all" of a large tensor that can be made in blocks."""
    node = ref.memory.writes[-1]
    if len(ref.memory.writes) != 1 or str(node.func) not in ("aten.any.default", "aten.all.default"):
        return None
    of = node.args[0]
    if not isinstance(of, Ref) or not of.size or of.memory.writes[-1].index > node.index:
        return None
    numel = 1
    for n in of.size:
        numel *= n
    one_stream = _random.state.mode == "shard" and _random.provider() is not None
    return (node, of) if one_stream and numel > BLOCK and of.size[0] > 1 else None


def _answer(node: Node, of: Ref) -> Tensor:
    numel = 1
    for n in of.size:
        numel *= n
    count = min(-(-numel // BLOCK), of.size[0])
    result: Tensor | None = None
    for i in range(count):
        mesh = imagined_mesh(count, i, of.memory.device.type)
        _random._agreed.add(mesh)  # there is no other rank to compare generators with
        block = node.func(by_parts(of, mesh, (0,)))
        result = block if result is None else node.func(result.new_tensor([bool(result), bool(block)]))
        if bool(result) == (node.name == "any"):
            break  # the rest cannot change the answer
    assert result is not None
    return result
