"""Which torch functions read values, which only ask for a shape, and how tensors go to meta."""

from __future__ import annotations

import enum
import types
from typing import Any

import torch
from torch import Tensor, nn

from .tree import Path, leaves, mapped
from .values import Node, Value

__all__ = [
    "Reads",
    "blank_tensor",
    "device_of",
    "device_question",
    "draws",
    "is_setter",
    "meta_call",
    "meta_result",
    "on_meta",
    "plain_function",
    "shape_of",
    "sized_by_values",
]

# Results of these are Python values that a recording would freeze.
Reads = frozenset(
    "item tolist numpy __bool__ __int__ __float__ __complex__ __index__ __contains__ __array__ equal allclose "
    "is_nonzero".split()
)

_DEVICE = frozenset("device is_cpu is_cuda is_meta is_mps is_xpu".split())
_ONCE = frozenset(
    "batch_norm bernoulli bernoulli_ cauchy_ exponential_ geometric_ instance_norm log_normal_ multinomial normal "
    "normal_ poisson random_ uniform_".split()
)
_SIZED = frozenset("argwhere bincount masked_select nonzero one_hot repeat_interleave".split())
_MASKS = (torch.bool, torch.uint8)
_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    range,
    slice,
    type(...),
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Generator,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
)


def plain_function(item: Any) -> bool:
    """Return whether something is a constant that can hold no tensor: a number, a name, a type, a function."""
    return isinstance(item, _PLAIN)


def is_setter(function: Any) -> bool:
    """Return whether a function sets an attribute of a tensor."""
    return getattr(function, "__name__", "") == "__set__"


def device_question(function: Any) -> str | None:
    """Return `device`, `is_cuda` and the like if that is what a function asks of a tensor."""
    name = str(getattr(getattr(function, "__self__", None), "__name__", ""))
    return name if name in _DEVICE and function.__name__ == "__get__" else None


def draws(node: Node, module: nn.Module | None) -> bool:
    """Return whether a call looks like one that must run once per forward: it draws numbers, or counts statistics."""
    if module is not None:
        return any("dropout" in type(part).__name__.lower() for part in module.modules())
    name = str(getattr(node.function, "__name__", ""))
    named = name in _ONCE or name.startswith("rand") or "dropout" in name
    return named or any(isinstance(leaf, torch.Generator) for leaf in leaves((node.args, node.kwargs)))


def sized_by_values(node: Node) -> bool:
    """Return whether the shape of a function's result depends on values, as that of nonzero does."""
    name = str(getattr(node.function, "__name__", ""))
    if name == "__getitem__":
        return any(isinstance(leaf, Value) and leaf.tensor.dtype in _MASKS for leaf in leaves(node.args[1]))
    if name == "where":
        return len(node.args) + len(node.kwargs) == 1
    return name in _SIZED or name.startswith("unique")


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor."""
    return tuple(tensor.shape)


def on_meta(tensor: Tensor) -> Tensor:
    """Return a tensor like another on meta; no leaf, so that it may change."""
    twin = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad
    )
    return twin.view_as(twin) if tensor.requires_grad else twin


def blank_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros that take no memory, for a module that looks at the shape, type or device of an argument only."""
    return torch.zeros((), dtype=dtype, device="cpu" if device.type == "meta" else device).expand(shape)


def meta_result(item: Tensor) -> Tensor:
    """Return a stand-in on meta for a real result."""
    twin = torch.empty_strided(
        item.shape, item.stride(), dtype=item.dtype, device="meta", requires_grad=item.requires_grad
    )
    return twin.view_as(twin)


def meta_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return a call with every device in its arguments replaced by meta."""
    name = getattr(func, "__name__", "")
    if name in ("cpu", "cuda"):
        return Tensor.to, (args[0], torch.device("meta")), {}

    def leaf(item: Any, path: Path) -> Any:
        return torch.device("meta") if isinstance(item, torch.device) else item

    new, named = mapped(leaf, (args, kwargs))
    if isinstance(named.get("device"), (str, int)):
        named = {**named, "device": torch.device("meta")}
    if name == "to" and len(new) > 1 and isinstance(new[1], (str, int)):
        new = (new[0], torch.device("meta"), *new[2:])
    return func, new, named


def device_of(node: Node, values: list[Value]) -> torch.device:
    """Return the device of a result that is on meta while recording: the one asked for, or that of the first input."""
    asked = [leaf for leaf in leaves((node.args, node.kwargs)) if isinstance(leaf, torch.device)]
    name = getattr(node.function, "__name__", "")
    if name in ("cpu", "cuda"):
        asked = [torch.device(name)]
    text = node.kwargs.get("device", node.args[1] if name == "to" and len(node.args) > 1 else None)
    if isinstance(text, (str, int)) and not isinstance(text, bool):
        asked = [torch.device(text)]
    if asked:
        return asked[0]
    # Numbers in a tensor (0-dim, on the CPU) do not decide where a result lives.
    return next(
        (value.device for value in values if value.tensor.dim()),
        values[0].device if values else torch.get_default_device(),
    )
