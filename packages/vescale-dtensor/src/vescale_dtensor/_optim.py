"""Stock optimizers on DTensor parameters: one alignment, then torch's own step on local parts.

An elementwise optimizer does the same to a part as to the whole. So `step()` of those is run with
dispatch off, where a DTensor is its local part: no per-operator cost, and foreach and fused
kernels are chosen as for plain tensors. Before it, gradients that are pending sums (those of
`Varying` parameters) are reduced together; after it, new state tensors are labelled like their
parameter. Optimizers that look at whole tensors (Adafactor, Muon, LBFGS, those of users) are left
alone: their operators dispatch one by one and see the global tensor.

torch's hooks around a step cannot do this: none runs when a step raises, and a process whose
dispatch stays off would take parts for wholes. Hence a wrapper of the `step` of eleven classes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as _torch_optimizer
from torch.utils import _foreach_utils

from ._dispatch import policy
from ._dispatch.engine import tag
from ._rules.copying import aligned
from ._rules.foreach import reduce_pending
from ._spec import Spec
from ._tensor import DTensor
from .placements import P

_run = torch._C._disabled_torch_function_impl
_Disabled = torch._C.DisableTorchFunctionSubclass
_get_grad: Any = Tensor.grad.__get__  # type: ignore[union-attr]
_set_grad = Tensor.grad.__set__  # type: ignore[union-attr]
_local_shape = torch._C.TensorBase.shape.__get__  # type: ignore[attr-defined]

ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam,
    torch.optim.RAdam, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.ASGD, torch.optim.Rprop,
)  # fmt: skip
"""Optimizers whose update of an element depends on that element's history alone."""

_SIMPLE = object()
"""Key in the cache of a spec: whether a gradient lies as its parameter."""

_COUNTERS = frozenset(("step", "eta", "mu", "mu_product"))
"""State that is one number per parameter, the same on every rank."""


def _is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the stock update runs; a subclass may add to `step` but must not replace how groups are read."""
    cls = type(optimizer)
    if cls in ELEMENTWISE:
        return True
    base = next((c for c in cls.__mro__ if c in ELEMENTWISE), None)
    return base is not None and getattr(cls, "_init_group", None) is getattr(base, "_init_group", None)


def _parameters(optimizer: torch.optim.Optimizer) -> list[DTensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.__class__ is DTensor]


def local_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the `step` of an elementwise optimizer."""

    @functools.wraps(step)
    def wrapper(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        ours = _parameters(self)
        if not ours or not _is_elementwise(self) or any(g.get("differentiable") for g in self.param_groups):
            return step(self, closure)
        loss = None
        if closure is not None:  # runs with dispatch on; the stock step would call it first as well
            with torch.enable_grad():
                loss = closure()
        work = _Work()
        try:
            with _Disabled():
                _look(self, ours, work)
            if work.pending or work.foreign:
                _align(type(self).__name__, work)
            if threading.active_count() == 1:
                work.internal += ours
            with _Disabled():
                for t in work.internal:
                    t.__class__ = Tensor
                step(self)
        finally:
            for t in work.internal:
                t.__class__ = DTensor
            for p, grad in work.restore:
                _run(_set_grad, (), (p, grad), {})
            if work.unlabelled:
                _label_state(self, work.unlabelled)
        return loss

    wrapper._vescale_wrapped = step  # type: ignore[attr-defined]
    wrapper._torchdynamo_inline = step  # type: ignore[attr-defined]  # see `_patching.replace_once`
    return wrapper


class _Work:
    """What stands between a step and its local parts."""

    __slots__ = ("foreign", "internal", "pending", "restore", "unlabelled")

    def __init__(self) -> None:
        self.pending: list[tuple[DTensor, Tensor]] = []
        """Parameters with gradients that lie otherwise."""
        self.foreign: list[tuple[DTensor, dict[str, Any], str]] = []
        """State tensors that lie otherwise than their parameter, or are plain."""
        self.internal: list[Any] = []
        """What is plain during the step, for torch takes lists of exact tensors much faster: state, gradients, and
        parameters where there is no other thread that could look at one and take its part for the whole."""
        self.restore: list[tuple[DTensor, Tensor]] = []
        """Gradients to put back after the step."""
        self.unlabelled: list[DTensor] = []
        """Parameters whose state the step will make."""


def _look(optimizer: torch.optim.Optimizer, parameters: list[DTensor], work: _Work) -> None:
    """Find what must be aligned; every step runs this, so it only compares (dispatch is off: no hops)."""
    for p in parameters:
        grad = _get_grad(p)
        if grad is not None:
            spec = p._spec
            simple = spec.cache.get(_SIMPLE)
            if simple is None:
                simple = spec.cache[_SIMPLE] = _check_parameter(spec, optimizer)
            if not simple or (grad.__class__ is DTensor and grad._spec is not spec):
                work.pending.append((p, grad))
            elif grad.__class__ is DTensor:
                work.internal.append(grad)
    state: Any = optimizer.state
    for p, held in state.items():  # a lookup per parameter would hash tensors, which is slower than all of this
        if p.__class__ is DTensor:
            spec = p._spec
            if not held:
                work.unlabelled.append(p)
            for name, value in held.items():
                if value.__class__ is DTensor:
                    if value._spec is spec:
                        work.internal.append(value)
                    else:
                        work.foreign.append((p, held, name))
                elif value is None:
                    work.unlabelled.append(p)
                elif name not in _COUNTERS and isinstance(value, Tensor) and value.numel() != 1:
                    work.foreign.append((p, held, name))
    if len(state) < len(parameters) or work.unlabelled:
        work.unlabelled = parameters


def _check_parameter(spec: Spec, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the gradient of a parameter of `spec` lies as the parameter does."""
    if any(t == P and size > 1 for t, size in zip(spec.types, spec.mesh.sizes, strict=True)):
        raise ValueError(
            f"{type(optimizer).__name__}: a parameter is a pending sum ({spec!r} on {spec.mesh!r}); every rank would "
            "apply the whole update to its part of the sum. Redistribute the parameter to Replicate() or Shard(dim)"
        )
    return spec.dual is spec


def _align(optimizer: str, work: _Work) -> None:
    """Make gradients and state tensors lie as their parameters do."""
    with torch.no_grad():
        for p, held, name in work.foreign:
            value, spec, what = held[name], p._spec, f"{optimizer} state {name!r}"
            if value.__class__ is DTensor:
                if value._spec.shape == spec.shape:
                    held[name] = aligned(value, spec, what)
            else:
                held[name] = _adopt(value, spec, what)
        grads = [g if g.__class__ is DTensor else tag(g, p._spec.dual) for p, g in work.pending]
        for (p, grad), value in zip(work.pending, reduce_pending(grads), strict=True):
            moved = aligned(value, p._spec, f"the gradient of a parameter of {optimizer}")
            work.restore.append((p, grad))
            _run(_set_grad, (), (p, moved), {})


def _adopt(value: Tensor, spec: Spec, name: str) -> DTensor:
    """Take plain state, for example of a single-device checkpoint, for the whole where plain tensors are allowed."""
    policy.check_plain(name, tuple(value.shape))
    return aligned(value, spec, name)


def _label_state(optimizer: torch.optim.Optimizer, parameters: list[DTensor]) -> None:
    """Label the state tensors that the local step made."""
    state = optimizer.state
    for p in parameters:
        held = state.get(p)
        if held:
            spec = p._spec
            for name, value in held.items():
                if value.__class__ is Tensor and name not in _COUNTERS and _local_shape(value) == spec.local_shape:
                    tag(value, spec)


def install() -> None:
    """Wrap the stock steps and let foreach kernels be chosen for DTensors; may be called again."""
    for types in (_torch_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if DTensor not in types:
            types.append(DTensor)
    for cls in ELEMENTWISE:
        step = cls.__dict__.get("step")
        if step is None:  # AdamW takes Adam's
            continue
        if getattr(step, "hooked", False):  # an optimizer exists already: go beneath torch's hooks
            inner = step.__wrapped__
            if not hasattr(inner, "_vescale_wrapped"):
                hooked: Any = torch.optim.Optimizer.profile_hook_step(local_step(inner))
                hooked.hooked = True
                cls.step = hooked  # type: ignore[method-assign]
        elif not hasattr(step, "_vescale_wrapped"):
            cls.step = local_step(step)  # type: ignore[method-assign]
