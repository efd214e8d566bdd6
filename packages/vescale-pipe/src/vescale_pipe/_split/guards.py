"""What Python code between modules read of the inputs, as a function that checks new inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .cut import Part, gather
from .names import Names
from .program import compile_program, write
from .tree import leaves
from .values import Context, Guard, Node, Recording, Value

__all__ = ["guard_function"]


def guard_function(recording: Recording, names: Names) -> Callable[[tuple[Any, ...], dict[str, Any]], bool]:
    """Return whether all that was read of the batch is the same for other arguments of the same shapes."""
    guards = [guard for guard in recording.guards if _depends_on_batch(guard)]
    if not guards:
        return lambda args, kwargs: True
    part = Part(0)
    wanted = [leaf for guard in guards for leaf in leaves((guard.args, guard.kwargs)) if isinstance(leaf, Value)]
    gather(part, wanted, {}, [part])
    readings = [_reading(guard, len(recording.values) + index) for index, guard in enumerate(guards)]
    nodes = sorted([*part.nodes.values(), *readings], key=lambda node: (node.number, node.known))
    inputs = [part.batch[number] for number in sorted(part.batch)]
    run = compile_program(write(nodes, inputs, [node.outputs[0] for node in readings]))
    expected = [_plain(guard.result) for guard in guards]
    held = _Model(names.model)

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        values = []
        for value in inputs:
            argument, leaf = value.key
            values.append(pytree.tree_leaves(args[argument] if isinstance(argument, int) else kwargs[argument])[leaf])
        with torch.no_grad():
            return [_plain(item) for item in run(held, *values)] == expected

    return check


class _Model:
    """What the code of a program takes for its stage."""

    def __init__(self, model: nn.Module) -> None:
        self._modules, self._parameters, self._buffers = model._modules, model._parameters, model._buffers
        self._mode = lambda: model.training


def _depends_on_batch(guard: Guard) -> bool:
    part = Part(0)
    gather(part, [leaf for leaf in leaves((guard.args, guard.kwargs)) if isinstance(leaf, Value)], {}, [part])
    return bool(part.batch)


def _reading(guard: Guard, number: int) -> Node:
    """Return a call that reads what the guard read, at the same moment."""
    node = Node(
        guard.node_count, None, guard.function, guard.args, guard.kwargs, Context(False, None), guard.place, known=False
    )
    node.outputs.append(
        Value(number, "node", (), torch.empty(0), True, torch.device("cpu"), number, "a value that was read", node)
    )
    return node


def _plain(result: Any) -> Any:
    """Return what was read as something that compares by value."""
    if isinstance(result, Tensor) or hasattr(result, "tolist"):
        return result.tolist()
    return result
