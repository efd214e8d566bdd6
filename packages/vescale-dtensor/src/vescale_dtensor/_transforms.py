"""Guards at function transforms: `torch.vmap`, `torch.func` and forward-mode differentiation.

A transform wraps tensors, or gives them a tangent, below dispatch: of a DTensor it would take the local part for the
whole, and no collective knows of tangents. A DTensor that enters a transform is refused at once. One that a
function captures is refused where it meets a transformed tensor: while a transform runs, a torch-function mode
watches out for that.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from ._dispatch.engine import tensors_in
from ._mesh import any_mesh
from ._patching import guard_argument, refusal, replace_once
from ._tensor import DTensor

_run = torch._C._disabled_torch_function_impl
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_unpack: Any = torch._VF._unpack_dual
_INSTEAD = (
    "Write the batch dim out (operators broadcast over it), or use torch.autograd.grad; for a local computation "
    "use local_map or to_local()"
)


def _has_tangent(x: Tensor, level: int) -> bool:
    try:
        return _run(_unpack, (), (x,), {"level": level})[1] is not None
    except RuntimeError:  # within vmap tensors do not tell
        return True


def _transformed(tensors: list[Tensor]) -> bool:
    level = forward_ad._current_level
    return any(map(_is_wrapped, tensors)) or (level >= 0 and any(_has_tangent(t, level) for t in tensors))


class _Watch(TorchFunctionMode):
    """Refuses calls in which a DTensor meets a tensor that a transform is at work on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types and _transformed(tensors_in(args, kwargs)):
            raise refusal("a transform (torch.vmap, torch.func, forward-mode differentiation)", _INSTEAD)
        return func(*args, **(kwargs or {}))


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a context manager that a transform runs in."""

    @functools.wraps(original)
    @contextlib.contextmanager
    def nesting(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with original(*args, **kwargs) as level, _Watch() if any_mesh() else contextlib.nullcontext():
            yield level

    return nesting


class _Levels(threading.local):
    """What watches over the levels of forward-mode differentiation that are open in this thread."""

    def __init__(self) -> None:
        self.open: list[contextlib.AbstractContextManager[Any]] = []


_levels = _Levels()


def _enter_level(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def enter_dual_level() -> Any:
        level = original()
        _levels.open.append(_Watch() if any_mesh() else contextlib.nullcontext())
        _levels.open[-1].__enter__()
        return level

    return enter_dual_level


def _exit_level(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def exit_dual_level(*, level: Any = None) -> None:
        original(level=level)
        if _levels.open:
            _levels.open.pop().__exit__(None, None, None)

    return exit_dual_level


def install() -> None:
    """Put the guards in place; may be called again."""
    from torch._functorch import eager_transforms, vmap

    for name in ("_add_batch_dim", "_remove_batch_dim"):
        replace_once(vmap, name, guard_argument("torch.vmap", _INSTEAD))
    for name in ("_wrap_for_grad", "_unwrap_for_grad", "_wrap_functional_tensor", "_unwrap_functional_tensor"):
        replace_once(eager_transforms, name, guard_argument("a torch.func transform", _INSTEAD))
    for owner in (torch.func, eager_transforms):
        replace_once(owner, "linearize", guard_argument("torch.func.linearize", _INSTEAD))
    replace_once(vmap, "vmap_increment_nesting", _watched)
    for name in ("grad_increment_nesting", "jvp_increment_nesting"):
        replace_once(eager_transforms, name, _watched)
    replace_once(forward_ad, "enter_dual_level", _enter_level)
    replace_once(forward_ad, "exit_dual_level", _exit_level)


__all__ = ["install"]
