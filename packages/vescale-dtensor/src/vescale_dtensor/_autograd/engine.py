"""What enters the autograd engine, whoever calls it: local gradients, and modes that see local tensors.

`backward` of a plain tensor asks its class only, not that of the gradient that it is given. And a
leaf that autograd saved comes back as the DTensor that it is, which no kernel minds; but a
`TorchDispatchMode` (a FLOP counter, say) runs Python on it, with dispatch on, and would take it for the whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .._rules.gradients import LabelledEdge, local_gradient
from .._tensor import DTensor

_count_modes = torch._C._len_torch_dispatch_stack
_Disabled = torch._C.DisableTorchFunctionSubclass
_TRACING = (
    torch._C._TorchDispatchModeKey.FUNCTIONAL,
    torch._C._TorchDispatchModeKey.PROXY,
    torch._C._TorchDispatchModeKey.FAKE,
)


class _Local(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets the modes below it see local tensors, as they do in the forward pass."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _Disabled():
            return func(*args, **(kwargs or {}))


def _is_tracing() -> bool:
    return any(torch._C._get_dispatch_mode(key) is not None for key in _TRACING)


def _gradient(root: Any, gradient: Any) -> Any:
    if root.__class__ is LabelledEdge:
        return local_gradient(gradient, root.spec)
    return gradient.full_tensor() if gradient.__class__ is DTensor else gradient


def _labelled_edge(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_gradient_edge(tensor: Any) -> Any:
        edge = original(tensor)
        if tensor.__class__ is DTensor:
            edge = LabelledEdge(*edge)
            edge.spec = tensor._spec
        return edge

    get_gradient_edge._vescale_wrapped = get_gradient_edge._torchdynamo_inline = original  # type: ignore[attr-defined]
    return get_gradient_edge


def _guarded(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def engine(roots: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        # Those of DTensors are local parts already, but for edges, which may come without any DTensor.
        if any(g.__class__ is DTensor for g in gradients) or any(r.__class__ is LabelledEdge for r in roots):
            gradients = tuple(map(_gradient, roots, gradients))
        if not _count_modes() or _is_tracing():
            return original(roots, gradients, *args, **kwargs)
        with _Local():  # type: ignore[no-untyped-call]
            return original(roots, gradients, *args, **kwargs)

    engine._vescale_wrapped = engine._torchdynamo_inline = original  # type: ignore[attr-defined]
    return engine


def install() -> None:
    """Guard the engine where `torch.autograd` looks it up; may be called again."""
    module: Any = torch.autograd
    if not hasattr(module._engine_run_backward, "_vescale_wrapped"):
        module._engine_run_backward = _guarded(module._engine_run_backward)
        torch.autograd.graph.get_gradient_edge = _labelled_edge(torch.autograd.graph.get_gradient_edge)


__all__ = ["install"]
