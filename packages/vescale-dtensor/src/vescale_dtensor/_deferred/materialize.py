"""Making tensors of what was written down: the part that a rank holds, or the whole."""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .._mesh import MeshInfo
from ..placements import AxisTypes, I, R
from .parts import NotByParts, by_parts
from .tape import Constant, Ref, forget_freed, is_deferred, leaves, mapped, needed, ref_of
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
    for owner in target.modules():
        for held in (owner._parameters, owner._buffers):
            for name, tensor in held.items():
                if tensor is not None and is_deferred(tensor):
                    held[name] = made[id(tensor)] if id(tensor) in made else made.setdefault(id(tensor), _real(tensor))
    finish(target, made)
    return target


def finish(module: nn.Module, made: dict[int, Any] | None = None) -> None:
    """Make the deferred tensors that stand in plain attributes of modules, or in lists and dicts there: whole.

    Args:
        module: the module, its submodules included.
        made: what stands for tensors that were made already, by their id.
    """
    known: dict[int, Any] = {} if made is None else made

    def real(value: Any) -> Any:
        if not isinstance(value, Tensor) or not is_deferred(value):
            return value
        if id(value) not in known:
            known[id(value)] = _real(value)
        return known[id(value)]

    for owner in module.modules():
        for name, value in vars(owner).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            if type(value) in (list, tuple, dict) and not any(is_deferred(v) for v in leaves(value)):
                continue
            if type(value) in (list, tuple, dict) or isinstance(value, Tensor):
                vars(owner)[name] = mapped(value, real)
    forget_freed()


def _real(tensor: Tensor) -> Any:
    ref = ref_of(tensor)
    if ref is None:
        return tensor
    if not tensor.is_leaf:
        raise ValueError("the tensor is a result that autograd recorded; materialize the leaves, or detach it inside")
    value: Any = whole(ref)
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    else:
        value = value.requires_grad_(tensor.requires_grad)
    for key, item in tensor.__dict__.items():
        if key != "_is_param":
            setattr(value, key, item)
    return value


def deferred_local(tensor: Tensor, mesh: MeshInfo, types: AxisTypes) -> Tensor | None:
    """This rank's part of a deferred tensor, in memory of its own; None if it can be made only whole.

    Args:
        tensor: the deferred tensor.
        mesh: the mesh.
        types: how it is to lie there.
    """
    ref = ref_of(tensor)
    assert ref is not None
    if any(t < 0 and t not in (I, R) for t in types):
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
            return value.value().cpu().flatten().tolist() if value.tensor.numel() < 4096 else value.tensor.shape
        return None if isinstance(value, torch.Generator) else value

    for node in needed(ref.memory):
        digest.update(repr((str(node.func), mapped((node.args, node.kwargs), describe))).encode())
        if node.state is not None:
            digest.update(node.state.numpy().tobytes())
    return f"{list(tensor.shape)} {tensor.dtype} deferred {digest.hexdigest()}"
