"""Watches a forward for operators that use weights, through torch's own switch for that: a `TorchFunctionMode`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from types import FunctionType, MethodWrapperType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from .kept import Kept
from .ops import SPLIT, TRANSPOSES, other, transpose

__all__ = ["RecordingMode"]

_grad_enabled = torch.is_grad_enabled
_compiling = torch.compiler.is_dynamo_compiling
_split = SPLIT.get
_GRADIENTLESS = frozenset(
    "requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad backward detach size dim numel".split()
)
"""Methods that must see a weight itself, or that have nothing to do with its gradient."""
_VIEWS = frozenset(("H", "mH", "real"))
"""Properties that are a use of a weight."""


def _never(*args: Any) -> bool:
    return False


_NO_QUESTIONS = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _never)


def _opened(func: Any) -> Any:
    """Return a Python function of torch as one whose inner calls can be watched.

    As it stands it would ask the mode about itself for ever. The copy shares its code; only the question is gone.
    """
    copied = FunctionType(
        func.__code__,
        {**func.__globals__, **_NO_QUESTIONS},
        func.__name__,
        func.__defaults__,
        func.__closure__,
    )
    copied.__kwdefaults__ = func.__kwdefaults__
    return copied


_OPENED = {one: _opened(one) for one in (F.multi_head_attention_forward, Tensor.backward, torch.autograd.backward)}
"""Attention uses linears; backward runs parts of the forward again where there are checkpoints."""


class RecordingMode(TorchFunctionMode):
    """Splits the backward of operators that use weights."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = Kept()
        """State of the micro-batch that is running."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run one operator.

        Args:
            func: what was called.
            types: not used.
            args: positional arguments.
            kwargs: named arguments.
        """
        if _compiling():
            return func(*args, **(kwargs or {}))
        handler = _split(func)
        kept = self.kept
        if handler is not None:
            if _grad_enabled():
                y = handler(kept, func, args, kwargs or {})
                if y is not NotImplemented:
                    return y
        elif not kwargs and not kept.views:
            # Most operators have no weight.
            for value in args:
                kind = type(value)
                if kind is Parameter or kind is list or kind is tuple:
                    break
            else:
                if func not in _OPENED:
                    return func(*args)
        if func in _OPENED:
            with self:
                return _OPENED[func](*args, **(kwargs or {}))
        if type(func) is MethodWrapperType and not _uses(func):
            return func(*args, **(kwargs or {}))
        if not _grad_enabled():
            # Perhaps the first run of a checkpoint that runs again in backward, with gradients.
            kept.again = True
            return func(*args, **(kwargs or {}))
        return _plain(kept, func, args, kwargs or {})


def _uses(getter: Any) -> bool:
    """Return whether a property of a weight has a graph."""
    return getter in TRANSPOSES or getter.__self__.__name__ in _VIEWS


def _plain(kept: Kept, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that is left to autograd."""
    weights: list[Any] = []
    views = kept.views
    for value in args:
        kind = type(value)
        if kind is Parameter or (views and kind is Tensor and id(value) in views):
            weights.append(value)
        elif kind is list or kind is tuple:
            weights += [one for one in value if type(one) is Parameter or id(one) in views]
    if kwargs:
        weights += [one for one in kwargs.values() if type(one) is Parameter or id(one) in views]
    if not weights:
        return func(*args, **kwargs)
    if func in TRANSPOSES and args and type(args[0]) is Parameter and args[0].requires_grad:
        return transpose(kept, args[0], func, args, kwargs)
    if getattr(func, "__name__", "") in _GRADIENTLESS:
        return func(*args, **kwargs)
    recorded = kept.recorded
    if any(id(views[id(one)][1] if id(one) in views else one) in recorded for one in weights):
        # Each argument its own: autograd adds them one by one.
        use, slots = kept.count(), count()
        args = tuple(_stand_in(kept, value, use, slots) for value in args)
        kwargs = {name: _stand_in(kept, value, use, slots) for name, value in kwargs.items()}
        return func(*args, **kwargs)
    y = func(*args, **kwargs)
    if _has_graph(y) and not any(y is one for one in weights):
        for one in weights:
            other(kept, one)
    return y


def _stand_in(kept: Kept, value: Any, use: int, slots: Iterator[int]) -> Any:
    if type(value) is list or type(value) is tuple:
        return type(value)(_stand_in(kept, one, use, slots) for one in value)
    return other(kept, value, use, next(slots))


def _has_graph(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    return isinstance(value, (tuple, list)) and any(_has_graph(one) for one in value)
