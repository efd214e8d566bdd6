"""Full backward hooks and pre-hooks of modules: they see DTensor gradients.

torch ties such hooks to a graph node of its own around the module's inputs and outputs, and the
engine calls that node with local gradients. The node is wrapped: what its hooks get is labelled with
the duals of the tensors that it stands for, and what they return is unlabelled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import BackwardHook

from .._tensor import DTensor
from ..errors import UnsupportedOperationError
from .function import labelled, specs_of, unlabelled


class _Node:
    """A graph node as `BackwardHook` uses it: something to register a hook on."""

    def __init__(self, node: Any, specs: tuple[Any, ...]) -> None:
        self._node, self._specs = node, specs

    def register_hook(self, hook: Callable[[Any, Any], Any]) -> Any:
        """Register a hook that works on DTensors."""
        specs = self._specs
        duals = [None if s is None else s.dual for s in specs]

        def wrapped(grad_inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...]) -> Any:
            # The node is an identity: its gradients on both sides are those of the same tensors.
            result = hook(tuple(map(labelled, grad_inputs, duals)), tuple(map(labelled, grad_outputs, duals)))
            return None if result is None else tuple(map(unlabelled, result, specs))

        return self._node.register_hook(wrapped)


def install() -> None:
    """Make module hooks aware of DTensors; may be called again."""
    original: Callable[..., Any] = BackwardHook._apply_on_tensors
    if hasattr(original, "_vescale_wrapped"):
        return

    def _apply_on_tensors(self: Any, fn: Callable[[Any], None], args: Any) -> Any:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if not any(t.__class__ is DTensor for t in tensors):
            return original(self, fn, args)
        specs = specs_of(tensors)
        return original(self, lambda node: fn(_Node(node, specs)), args)

    _apply_on_tensors._vescale_wrapped = original  # type: ignore[attr-defined]
    BackwardHook._apply_on_tensors = _apply_on_tensors  # type: ignore[method-assign]
    _refuse_old_hooks()


def _refuse_old_hooks() -> None:
    """Refuse the hooks of `register_backward_hook`, which hang on a node that is not the module's."""
    original: Callable[..., Any] = nn.Module._maybe_warn_non_full_backward_hook

    def warn(self: Any, inputs: Any, result: Any, grad_fn: Any) -> None:
        if any(t.__class__ is DTensor for t in tree_leaves((inputs, result))):
            raise UnsupportedOperationError(
                f"a hook of {type(self).__name__}.register_backward_hook would see only this rank's part of the "
                "gradients of DTensors; use register_full_backward_hook"
            )
        original(self, inputs, result, grad_fn)

    nn.Module._maybe_warn_non_full_backward_hook = warn  # type: ignore[method-assign]
