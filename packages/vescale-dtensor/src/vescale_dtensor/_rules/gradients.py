"""The functions through which a program meets autograd: backward, grad, hooks.

The engine works on local parts. What goes in is turned into the local part of the dual type
(a seed of one is one on the first rank only where the root is replicate-varying), what comes out is
labelled with the dual spec. The engine is never entered with dispatch off: hooks and recomputation
would see local parts as if they were whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .._comm.move import move, strip
from .._dispatch import policy
from .._dispatch.engine import label_one, tag
from .._dispatch.fallback import enter
from .._dispatch.table import register
from .._spec import Spec, replicated
from .._tensor import TABLE, DTensor
from ..placements import R

_run = torch._C._disabled_torch_function_impl
_requires_grad = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_local_backward = torch.autograd.backward
_backward = enter(torch.autograd.backward)  # type: ignore[arg-type]
_grad = enter(torch.autograd.grad)  # type: ignore[arg-type]


def _many(value: Any) -> list[Any] | None:
    if value is None:
        return None
    return list(value) if isinstance(value, list | tuple) else [value]


def _bind(names: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = dict(zip(names.split(), args, strict=False))
    bound.update(kwargs)
    return bound


class LabelledEdge(GradientEdge):
    """The gradient edge of a DTensor, which the engine knows the local part of only."""

    spec: Spec


def _spec_of(x: Any) -> Spec | None:
    """Spec of a DTensor, or of the one that an edge belongs to."""
    return x._spec if isinstance(x, DTensor) else x.spec if isinstance(x, LabelledEdge) else None


def seed(root: DTensor) -> Tensor:
    """Local part of a gradient of one for a scalar root."""
    spec = root._spec
    if spec.numel != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    first = R not in spec.types or all(c == 0 for t, c in zip(spec.types, spec.mesh.coordinate, strict=True) if t == R)
    return _run(torch.ones_like if first else torch.zeros_like, (), (root,), {})  # type: ignore[no-any-return]


def local_gradient(grad: Any, spec: Spec) -> Tensor:
    """Local part, of the dual type, of a gradient for a tensor of `spec`; a plain one is the same on every rank."""
    if not isinstance(grad, DTensor):
        grad = tag(grad.as_subclass(Tensor), replicated(spec.mesh, grad.shape))
    if grad._spec.shape != spec.shape:
        raise RuntimeError(
            f"a gradient of shape {list(grad._spec.shape)} was given for a tensor of shape {list(spec.shape)}"
        )
    return strip(move(grad, spec.dual.types))


def _seeds(roots: Sequence[Any], grads: list[Any] | None) -> list[Any]:
    grads = grads if grads is not None else [None] * len(roots)
    seeds = []
    for root, grad in zip(roots, grads, strict=True):
        spec = _spec_of(root)
        if spec is None:
            seeds.append(grad.full_tensor() if isinstance(grad, DTensor) else grad)
        elif grad is None and isinstance(root, LabelledEdge):
            raise RuntimeError("the gradient edge of a DTensor needs its gradient given; pass grad_outputs")
        elif grad is None:
            seeds.append(seed(root) if _run(_requires_grad, (), (root,), {}) else None)
        else:
            seeds.append(local_gradient(grad, spec))
    return seeds


def _locals(tensors: Sequence[Any]) -> list[Any]:
    # Checkpoints call backward within backward, where grad mode is off and an alias would lose its graph.
    with torch.enable_grad():
        return [
            strip(t) if isinstance(t, DTensor) else GradientEdge(*t) if isinstance(t, LabelledEdge) else t
            for t in tensors
        ]


class _as_in_forward:
    """Recomputation of checkpointed parts of a parallelized module runs under the module's policy."""

    __slots__ = ("entered",)

    def __enter__(self) -> None:
        self.entered = policy.state.modules_exist
        policy.state.inside_modules += self.entered

    def __exit__(self, *_: object) -> None:
        policy.state.inside_modules -= self.entered


def tensor_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`Tensor.backward`."""
    if len(args) == 1 and not kwargs and _run(_requires_grad, (), args, {}):
        # loss.backward(): straight into the engine, which takes a DTensor as the local tensor that it is.
        seeds = (seed(args[0]),)
        with _as_in_forward():
            torch.autograd._engine_run_backward(  # type: ignore[attr-defined]
                args, seeds, False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        return
    bound = _bind("self gradient retain_graph create_graph inputs", args, kwargs)
    autograd_backward(
        func,
        (bound["self"], bound.get("gradient"), bound.get("retain_graph"), bound.get("create_graph", False)),
        {"inputs": bound.get("inputs")},
    )


def autograd_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`torch.autograd.backward`."""
    bound = _bind("tensors grad_tensors retain_graph create_graph grad_variables inputs", args, kwargs)
    roots = _many(bound["tensors"]) or []
    given = bound.get("grad_tensors")
    seeds = _seeds(roots, _many(given if given is not None else bound.get("grad_variables")))
    create = bool(bound.get("create_graph", False))
    retain = bound.get("retain_graph")
    inputs = bound.get("inputs")
    with _as_in_forward():
        if inputs is None:  # all plain: torch's own function, which is faster than its copy
            _local_backward(_locals(roots), seeds, create if retain is None else retain, create)
        else:
            _backward(_locals(roots), seeds, create if retain is None else retain, create, inputs=_many(inputs))


def autograd_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """`torch.autograd.grad`."""
    bound = _bind(
        "outputs inputs grad_outputs retain_graph create_graph only_inputs allow_unused is_grads_batched "
        "materialize_grads",
        args,
        kwargs,
    )
    if bound.get("is_grads_batched"):
        from ..errors import UnsupportedOperationError

        raise UnsupportedOperationError(
            "torch.autograd.grad(is_grads_batched=True) runs under vmap, which sees only local parts of DTensors; "
            "call it once per gradient instead"
        )
    roots, inputs = _many(bound["outputs"]) or [], _many(bound["inputs"]) or []
    rest = {
        k: bound[k]
        for k in ("retain_graph", "create_graph", "allow_unused", "materialize_grads")
        if bound.get(k) is not None
    }
    with _as_in_forward():
        grads = _grad(_locals(roots), inputs, _seeds(roots, _many(bound.get("grad_outputs"))), **rest)
    return tuple(
        label_one(g, spec.dual) if isinstance(g, Tensor) and spec is not None else g
        for g, spec in zip(grads, map(_spec_of, inputs), strict=True)
    )


def get_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.grad`."""
    (x,) = args
    grad = _run(func, (), args, kwargs)
    if grad is None or not isinstance(x, DTensor):
        return grad
    if grad.__class__ is Tensor:
        tag(grad, x._spec.dual)
        if R in x._spec.types:
            grad.__dict__["_is_grad"] = True  # in-place functions leave it pending: autograd adds to it
    return grad


def set_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`x.grad = g`: the gradient is moved to the dual of `x`."""
    x, grad = args
    if grad is None:
        _run(func, (), args, kwargs)
        return
    if isinstance(grad, DTensor) and not isinstance(x, DTensor):
        raise RuntimeError(
            "a DTensor gradient was assigned to a plain tensor; assign grad.full_tensor() or grad.to_local()"
        )
    if isinstance(grad, DTensor) and grad._spec is not x._spec.dual:
        if grad._spec.shape != x._spec.shape:
            raise RuntimeError(
                f"assigned grad has data of a different size: {list(grad._spec.shape)} "
                f"for a tensor of {list(x._spec.shape)}"
            )
        detached: Any = grad.detach()
        grad = move(detached, x._spec.dual.types)
    elif isinstance(grad, Tensor) and not isinstance(grad, DTensor):
        policy.check_plain("assigning .grad", tuple(grad.shape))
        grad = tag(local_gradient(grad.detach(), x._spec), x._spec.dual)
    if isinstance(grad, DTensor) and R in x._spec.types:
        grad.__dict__["_is_grad"] = True
    _run(func, (), (x, grad), kwargs)


def register_hook(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.register_hook(fn)`: the hook sees and may return a DTensor of the dual spec."""
    bound = _bind("self hook", args, kwargs)
    x, hook = bound["self"], bound["hook"]
    return _run(func, (), (x, distributed_hook(hook, x._spec)), {})


def distributed_hook(hook: Callable[[Any], Any], spec: Spec) -> Callable[[Tensor], Tensor | None]:
    """Wrap a gradient hook so that it works on DTensors though the engine hands out local parts."""

    def wrapped(grad: Tensor | None) -> Tensor | None:
        result = hook(None if grad is None else tag(grad.as_subclass(Tensor), spec.dual))
        return None if result is None else local_gradient(result, spec)

    return wrapped


register("backward", tensor_backward)
TABLE[torch.autograd.backward] = autograd_backward
TABLE[torch.autograd.grad] = autograd_grad
TABLE[Tensor.backward] = tensor_backward
TABLE[Tensor.grad.__get__] = get_grad  # type: ignore[union-attr]
TABLE[Tensor.grad.__set__] = set_grad  # type: ignore[union-attr]
register("register_hook", register_hook)
