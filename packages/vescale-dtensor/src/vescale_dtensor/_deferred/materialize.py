"""Making tensors of what was written down: the part that a rank holds, or the whole."""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._bytes import bytes_of, hash_of
from .._mesh import MeshInfo
from ..placements import AxisTypes, P
from .parts import NotByParts, by_parts
from .tape import Constant, Memory, Ref, forget_freed, is_deferred, leaves, mapped, memory_of, needed, ref_of
from .tensor import gradient
from .whole import whole

T = TypeVar("T", nn.Module, Tensor)


def materialize(target: T) -> T:
    """Make the whole of what was constructed inside `deferred_init`, with the numbers of an ordinary construction.

    Args:
        target: a module, which is changed in place (its parameters become other objects), or a tensor.

    Returns:
        The module, or a real tensor: a leaf, a Parameter for a Parameter.

    >>> from vescale_dtensor import deferred_init
    >>> with deferred_init():
    ...     model = nn.Linear(2, 2, bias=False)
    >>> materialize(model).weight.shape
    torch.Size([2, 2])
    """
    if isinstance(target, Tensor):
        return _real(target)  # type: ignore[no-any-return]
    if not isinstance(target, nn.Module):
        raise TypeError(f"target must be a module or a tensor, got {type(target).__name__}")
    made: dict[int, Any] = {}
    wholes: dict[Memory, Tensor] = {}
    for owner in target.modules():
        for held in (owner._parameters, owner._buffers):
            for name, tensor in held.items():
                if tensor is not None and is_deferred(tensor):
                    if id(tensor) not in made:
                        made[id(tensor)] = _real(tensor, f"{type(owner).__name__}.{name}", wholes)
                    held[name] = made[id(tensor)]
    finish(target, made, wholes)
    return target


def finish(module: nn.Module, made: dict[int, Any], wholes: dict[Memory, Tensor] | None = None) -> None:
    """Let plain attributes of modules, and lists and dicts there, hold what parameters and buffers were turned into.

    Args:
        module: the module, its submodules included. Other deferred tensors of such attributes are made: whole.
        made: what stands for tensors that were turned into others, by the id of these.
        wholes: values of memories that were made already.
    """
    known, values = made, {} if wholes is None else wholes
    for owner in module.modules():
        for name, value in vars(owner).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            where = f"{type(owner).__name__}.{name}"

            def real(value: Any, where: str = where) -> Any:
                if id(value) not in known and isinstance(value, Tensor) and is_deferred(value):
                    known[id(value)] = _real(value, where, values)
                return known.get(id(value), value)

            if type(value) in (list, tuple, dict):
                if any(id(v) in known or is_deferred(v) for v in leaves(value)):
                    vars(owner)[name] = mapped(value, real)
            elif isinstance(value, Tensor):
                vars(owner)[name] = real(value)
    forget_freed()


def _real(tensor: Tensor, where: str = "the tensor", wholes: dict[Memory, Tensor] | None = None) -> Any:
    ref = ref_of(tensor)
    if ref is None:
        return tensor
    if not tensor.is_leaf:
        raise ValueError(
            f"{where} is a result that autograd recorded inside deferred_init, so that values of its own would not "
            "follow the parameters; compute it in forward (as torch.nn.utils.parametrizations does), or detach it"
        )
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise ValueError(f"{where} has gradient hooks, which stay with the deferred tensor; register them afterwards")
    if is_lazy(tensor):
        memory = memory_of(tensor)
        assert memory is not None
        lazy: Any = type(tensor)
        return lazy(requires_grad=tensor.requires_grad, device=memory.device, dtype=tensor.dtype)
    value: Any = _whole(ref, {} if wholes is None else wholes)
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    else:
        value = value.requires_grad_(tensor.requires_grad)
    for key, item in tensor.__dict__.items():
        if key != "_is_param":
            setattr(value, key, item)
    grad = gradient(tensor)
    if grad is not None:
        value.grad = _real(grad, f"the gradient of {where}", wholes)
    return value


def _whole(ref: Ref, wholes: dict[Memory, Tensor]) -> Tensor:
    """A tensor that shares its memory with the others of the same memory, as on one device."""
    base = wholes.get(ref.memory)
    if base is None:
        wholes[ref.memory] = base = whole(ref)
        return base.detach()
    if base.dtype != ref.dtype:
        return whole(ref)
    return base.new_empty(0).set_(base.untyped_storage(), ref.offset, ref.size, ref.stride)


def deferred_local(tensor: Tensor, mesh: MeshInfo, types: AxisTypes) -> Tensor | None:
    """This rank's part of a deferred tensor, in memory of its own; None if it can be made only whole.

    Args:
        tensor: the deferred tensor.
        mesh: the mesh.
        types: how it is to lie there.
    """
    ref = ref_of(tensor)
    assert ref is not None
    if P in types:
        return None
    try:
        local = by_parts(ref, mesh, types)
    except NotByParts:
        return None
    return local.to(mesh.device_type) if local.device.type != mesh.device_type else local


def whole_on(tensor: Tensor, mesh: MeshInfo) -> Tensor:
    """The whole of a deferred tensor, on the devices of a mesh."""
    ref = ref_of(tensor)
    assert ref is not None
    return whole(ref).to(mesh.device_type)


def fingerprint(tensor: Tensor) -> str:
    """Text that equals on ranks that would make the same values: their operators, numbers and generator states."""
    ref = ref_of(tensor)
    assert ref is not None
    digest = hashlib.blake2b(digest_size=12)
    names: dict[Any, int] = {}

    def describe(value: Any) -> Any:
        if isinstance(value, Ref):
            number = names.setdefault(value.memory, len(names))
            return number, value.size, value.stride, value.offset, value.dtype
        if isinstance(value, Constant):
            return value.tensor.shape, value.tensor.dtype, hash_of(value.value())
        return None if isinstance(value, torch.Generator) else value

    for node in needed(ref.memory):
        digest.update(repr((str(node.func), mapped((node.args, node.kwargs), describe))).encode())
        if node.state is not None:
            digest.update(bytes_of(node.state))
    return f"{list(tensor.shape)} {tensor.dtype} deferred {digest.hexdigest()}"
