"""What a recording consists of: values, the nodes that make them, and what was read of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .tree import Leaf

__all__ = ["Context", "Guard", "Node", "Recording", "Touch", "Value", "call_name"]


class Context(NamedTuple):
    """What surrounded a call, as far as it differs from what surrounded the model."""

    no_grad: bool
    """Whether gradients were switched off."""
    autocast: tuple[str, bool, torch.dtype] | None
    """Device type, whether enabled, type; None as outside."""


@dataclass(eq=False, slots=True)
class Value(Leaf):
    """A tensor of the forward: given, held by the model, or made by a node."""

    number: int
    """Counts the values of a recording."""
    source: str
    """`batch`, `parameter`, `buffer`, `constant` or `node`."""
    key: Any
    """(argument, leaf) of the batch, name in the model, tensor of a constant, or path in the result of a node."""
    tensor: Tensor
    """What stands for it while recording: real where `known`, else on meta."""
    known: bool
    """Whether it depends on the batch and constants only, so that each stage can compute it for itself."""
    device: torch.device
    """Where it lives when the model runs."""
    group: int
    """Values of one group share memory."""
    text: str
    """What it is called in messages."""
    node: Node | None = None
    """What made it."""
    alias: Value | None = None
    """The value whose memory it was made to share."""
    copied: bool = False
    """Whether a stage must copy this batch value first, because it is changed in place."""
    twin: Tensor | None = None
    """A stand-in on meta for a known one."""


class Touch(NamedTuple):
    """A value that a node changed in place, and what it is called from then on."""

    old: Value
    """Before."""
    new: Value
    """After; the same object in memory."""


@dataclass(eq=False, slots=True)
class Node:
    """A call: of a module of the model or of a function."""

    number: int
    """Order of the calls."""
    module: str | None
    """Name of the module, or None for a function."""
    function: Any
    """The function; None for a module."""
    args: tuple[Any, ...]
    """Arguments with a `Value` in place of each tensor."""
    kwargs: dict[str, Any]
    """Keyword arguments likewise."""
    context: Context
    """What surrounded it."""
    place: str
    """Where the call stands in the user's code."""
    known: bool = False
    """Whether each stage may repeat it: it depends on the batch only, draws nothing and changes nothing else."""
    recompute: bool = False
    """Whether it was called within torch.utils.checkpoint."""
    outputs: list[Value] = field(default_factory=list)
    """Tensors of its result."""
    touched: list[Touch] = field(default_factory=list)
    """Values it changed in place."""
    changed_buffers: tuple[str, ...] = ()
    """Buffers that a module changed."""
    cost: float = 0.0
    """Estimated multiply-adds, or 0 where not asked for."""

    def __str__(self) -> str:
        name = f"module {self.module!r}" if self.module is not None else call_name(self.function)
        return f"{name} ({self.place})"


class Guard(NamedTuple):
    """Something that Python code read of a value; the recording holds only while it is the same."""

    node_count: int
    """Nodes recorded before it."""
    function: Any
    """What read it, such as Tensor.__bool__."""
    args: tuple[Any, ...]
    """Its arguments, with values for tensors."""
    kwargs: dict[str, Any]
    """Its keyword arguments likewise."""
    result: Any
    """What it gave."""
    place: str
    """Where."""


@dataclass(eq=False, slots=True)
class Recording:
    """One forward of a model."""

    values: list[Value]
    """All of them, by number."""
    nodes: list[Node]
    """All calls in order."""
    output: Any
    """What the model returned, with values for tensors."""
    entries: dict[str, int]
    """Per module that was called: how many nodes were recorded before its first call."""
    guards: list[Guard]
    """What Python code read of the batch."""
    training: bool
    """Whether the model was in training mode."""


def call_name(function: Any) -> str:
    """Return how a function is called in messages."""
    name = str(getattr(function, "__name__", function))
    owner = getattr(function, "__self__", None)
    if name == "apply" and isinstance(owner, type):
        return owner.__name__
    return name.strip("_") if name.startswith("__") else name
