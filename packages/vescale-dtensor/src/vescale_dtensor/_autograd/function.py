"""`torch.autograd.Function` with DTensor arguments: forward, setup_context and backward see global tensors.

`Function.apply` does not dispatch. Called with a DTensor it is made to run a subclass of the
user's Function that notes the specs of inputs, outputs and saved tensors in the forward pass; in the
backward pass it labels the gradients (duals of the outputs) and the saved tensors, calls the
user's backward, and takes local parts of the inputs' duals from what that returns. Functions that
get plain tensors, such as those of this package, go straight through.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .._dispatch.engine import label_one
from .._rules.gradients import local_gradient
from .._spec import Spec
from .._tap import slot
from .._tensor import DTensor, make
from ..errors import UnsupportedOperationError

_on = torch._C._is_torch_function_enabled
_Specs = tuple[Spec | None, ...]

_bridges: weakref.WeakKeyDictionary[type, type] = weakref.WeakKeyDictionary()
_has_setup_context = Function.setup_context
_PACKAGE = __name__.partition(".")[0]
_once_differentiable_code = once_differentiable(lambda ctx: None).__code__


def specs_of(values: Sequence[Any]) -> _Specs:
    """Spec of every DTensor among `values`, None for all else."""
    return tuple(v._spec if isinstance(v, DTensor) else None for v in values)


def labelled(value: Any, spec: Spec | None) -> Any:
    """An alias of a local tensor that is labelled, connected to its graph."""
    if spec is None or not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    return make(value, spec)


def unlabelled(grad: Any, spec: Spec | None) -> Any:
    """Local part of a gradient for an input of `spec`; for a plain input the whole gradient."""
    if spec is not None:
        return local_gradient(grad, spec) if isinstance(grad, Tensor) else grad
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _bridge_of(cls: type[Function]) -> type[Function]:
    bridge = _bridges.get(cls)
    if bridge is None:
        bridge = _bridges[cls] = _make_bridge(cls)
    return bridge


def _make_bridge(cls: type[Function]) -> type[Function]:
    """The subclass of a Function that translates between global and local tensors."""
    name = "vjp" if cls.vjp is not Function.vjp else "backward"
    inner_backward = getattr(cls, name)
    once = getattr(inner_backward, "__code__", None) is _once_differentiable_code
    user_backward: Callable[..., Any] = inner_backward.__wrapped__ if once else inner_backward

    def backward(ctx: Any, *grads: Any) -> Any:
        duals = [None if s is None else s.dual for s in ctx._vescale_outs]
        result = user_backward(ctx, *map(labelled, grads, duals))
        ins = ctx._vescale_ins
        results = _as_tuple(result)
        if len(results) < len(ins) or any(r is not None for r in results[len(ins) :]):
            return result  # torch's own error tells of the wrong number
        local = tuple(map(unlabelled, results, ins))
        return local if isinstance(result, tuple) else local[0]

    body: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    body[name] = staticmethod(once_differentiable(backward) if once else backward)
    if cls.setup_context is not _has_setup_context:

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx._vescale_ins, ctx._vescale_outs = specs_of(inputs), specs_of(_as_tuple(output))
            _calls.open[-1] = ctx._vescale_outs
            cls.setup_context(ctx, inputs, output)

        body["setup_context"] = staticmethod(setup_context)
    else:

        def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
            ctx._vescale_ins = specs_of(args)
            output = cls.forward(ctx, *args, **kwargs)
            ctx._vescale_outs = _calls.open[-1] = specs_of(_as_tuple(output))
            return output

        body["forward"] = staticmethod(forward)
    if cls.jvp is not Function.jvp:

        def jvp(ctx: Any, *tangents: Any) -> Any:
            raise UnsupportedOperationError(
                f"{cls.__name__}.jvp: forward-mode differentiation of DTensors is not supported; use backward"
            )

        body["jvp"] = staticmethod(jvp)
    bridge: Any = cast(Any, type(Function))(cls.__name__, (cls,), body)
    bridge._vescale_bridge = True
    bridge._backward_cls = type(
        bridge._backward_cls.__name__, (_Context, bridge._backward_cls), {"_forward_cls": bridge}
    )
    return bridge  # type: ignore[no-any-return]


class _Context:
    """What `ctx` of a bridge does differently: saved tensors come back as the DTensors that they were."""

    _vescale_saved: _Specs

    def save_for_backward(self, *tensors: Any) -> None:
        self._vescale_saved = specs_of(tensors)
        super().save_for_backward(*tensors)  # type: ignore[misc]

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        saved = super().saved_tensors  # type: ignore[misc]
        specs = getattr(self, "_vescale_saved", ())
        return tuple(map(labelled, saved, specs)) if len(specs) == len(saved) else saved


class _Calls(threading.local):
    """Output specs of the bridges that are running in this thread, innermost last."""

    def __init__(self) -> None:
        self.open: list[_Specs] = []


_calls = _Calls()


def _apply_bridge(
    cls: type[Function], original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    bridge = cls if getattr(cls, "_vescale_bridge", False) else _bridge_of(cls)
    _calls.open.append(())
    try:
        result = original(bridge, *args, **kwargs)
    finally:
        specs = _calls.open.pop()
    # A fresh output is labelled already; one that is an input comes back from autograd as a plain alias.
    if isinstance(result, tuple):
        return tuple(map(_labelled_output, result, specs))
    return _labelled_output(result, specs[0])


def _labelled_output(value: Any, spec: Spec | None) -> Any:
    """Label an output as forward gave it; autograd makes aliases of inputs under no_grad, where R becomes I."""
    if spec is None or not isinstance(value, Tensor):
        return value
    if isinstance(value, DTensor):
        value._spec = spec
        return value
    return label_one(value, spec)


def _refuse_dtensors(cls: type[Function], result: Any) -> None:
    """Refuse DTensors that a user's Function made of plain tensors: its backward would get local parts for them."""
    for value in _as_tuple(result):
        if value.__class__ is DTensor and value.requires_grad and not cls.__module__.startswith(_PACKAGE):
            checkpoint = cls.__name__ == "CheckpointFunction"
            instead = "pass use_reentrant=False to torch.utils.checkpoint" if checkpoint else "make it of DTensors"
            raise UnsupportedOperationError(
                f"{cls.__name__}.apply made a DTensor of plain tensors; its backward would see only this rank's part "
                f"of the gradient, as if it were the whole. Distribute its arguments before the call, or {instead}"
            )


def install() -> None:
    """Make `Function.apply` aware of DTensors; may be called again."""
    current = Function.__dict__["apply"]
    if hasattr(current.__func__, "_vescale_wrapped"):
        return
    original = current.__func__

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()) if kwargs else args:
            if value.__class__ is DTensor:
                if _on():
                    if slot.active and slot.recorder is not None:
                        slot.recorder.refuse(f"{cls.__name__}.apply runs Python on DTensors")
                    return _apply_bridge(cls, original, args, kwargs)
                break
        if slot.active and slot.recorder is not None:
            return slot.recorder.atomic(cls.apply, args, kwargs)
        try:
            result = original(cls, *args, **kwargs)
        except RuntimeError as error:
            if torch._C._are_functorch_transforms_active() and cls.__module__.startswith(_PACKAGE):
                raise UnsupportedOperationError(
                    "communication of a DTensor cannot be transformed by torch.vmap or torch.func: take full_tensor() "
                    "before the transform, or detach() the DTensor"
                ) from error
            raise
        if result.__class__ is DTensor or result.__class__ is tuple:
            _refuse_dtensors(cls, result)
        return result

    apply.__doc__, apply._vescale_wrapped = original.__doc__, original  # type: ignore[attr-defined]
    Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
