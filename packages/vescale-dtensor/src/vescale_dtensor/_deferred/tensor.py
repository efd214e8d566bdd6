"""The class of tensors that are written down and not made: what they answer, and what they refuse.

While a construction is recorded they behave as tensors of the device that was asked for. Afterwards they have a
shape and a dtype, but anything that needs values, or would make a copy that nobody fills, is an error.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import UnsupportedOperationError
from .rewrites import rewritten
from .tape import is_deferred, mapped, memory_of, ref_of

_run = torch._C._disabled_torch_function_impl
_device = torch._C.TensorBase.device.__get__
_is_meta = torch._C.TensorBase.is_meta.__get__  # type: ignore[attr-defined]
_grad: Any = Tensor.grad.__get__  # type: ignore[union-attr]


class _Active(threading.local):
    recording = False
    """Whether this thread is inside `deferred_init`."""


active = _Active()


class DeferredTensor(torch.Tensor):
    """A tensor made inside `deferred_init`."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if not active.recording:
            return _outside(func, name, args, kwargs)
        func, args, kwargs = rewritten(func, name, args, kwargs)
        if name in _READS:
            return getattr(values(args[0]), name)(*args[1:], **kwargs)
        return mapped(_run(func, types, args, kwargs), label)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Device that was asked for while the construction runs, the meta device afterwards."""
        memory = memory_of(self) if active.recording else None
        return _run(_device, (), (self,), {}) if memory is None else memory.device

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """Whether the tensor has no values; not told to code that constructs."""
        return not active.recording and bool(_run(_is_meta, (), (self,), {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = ", parameter" if getattr(self, "_is_param", False) else ""
        return f"DeferredTensor(shape={list(self.shape)}, dtype={self.dtype}{kind})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if not active.recording:
            raise _refusal("copy.deepcopy", self)
        if id(self) in memo:
            return memo[id(self)]
        made: Any = self.detach().clone().requires_grad_(self.requires_grad)
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refusal("pickle", self)


_READS = frozenset("tolist numpy __array__".split())
"""Methods that read values without an operator."""
_ANSWERED = frozenset(
    """shape size dim ndim ndimension numel nelement stride dtype layout requires_grad is_leaf grad_fn element_size
    itemsize nbytes is_contiguous is_floating_point is_complex is_signed storage_offset requires_grad_ names
    __len__ __hash__ _version _backward_hooks _post_accumulate_grad_hooks is_sparse is_quantized is_cpu is_cuda
    is_mps is_xpu is_nested untyped_storage _cdata is_inference is_shared retains_grad output_nr __repr__ name
    is_same_size _is_view _base is_pinned __format__ get_device""".split()
)
"""What a tensor without values can say."""


def _outside(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name in ("__get__", "__set__") else name
    if attribute in _ANSWERED and (name != "__set__" or attribute == "requires_grad"):
        return _run(func, (), args, kwargs)
    raise _refusal(attribute or name, next(v for v in (*args, *kwargs.values(), *_nested(args)) if is_deferred(v)))


def _nested(args: tuple[Any, ...]) -> list[Any]:
    return [v for a in args if isinstance(a, list | tuple) for v in a]


def _refusal(what: str, tensor: Any) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        f"{what} got a tensor of shape {list(tensor.shape)} that was made inside deferred_init and has no values yet; "
        "call parallelize_module(module, mesh, plan), which makes each rank's part, or materialize(module) for the "
        "whole, before the module is used, copied or saved. Parameters become other objects: make optimizers afterwards"
    )


def gradient(tensor: Tensor) -> Tensor | None:
    """The gradient that a deferred tensor got inside `deferred_init`.

    To others `.grad` is refused: an optimizer that still holds the tensor would find none, and train nothing.
    """
    found: Tensor | None = _run(_grad, (), (tensor,), {})
    return found


def require_outside(what: str) -> None:
    """Raise inside `deferred_init`: there nothing has values that could be distributed."""
    if active.recording:
        raise UnsupportedOperationError(
            f"{what} inside deferred_init: tensors have no values there; leave the `with` block first"
        )


def label(value: Any) -> Any:
    """Give a meta tensor that stands for a memory this class; other values stay as they are."""
    if value.__class__ is Tensor and is_deferred(value):
        value.__class__ = DeferredTensor
    elif value.__class__ is nn.Parameter and is_deferred(value):
        value.__class__ = DeferredTensor  # type: ignore[assignment]
        value._is_param = True
    return value


def values(tensor: Tensor) -> Tensor:
    """The values of a deferred tensor, on the spot."""
    from .reads import read

    ref = ref_of(tensor)
    assert ref is not None
    with _disable_current_modes():
        return read(ref)
