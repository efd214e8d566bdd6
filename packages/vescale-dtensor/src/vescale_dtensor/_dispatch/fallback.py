"""What happens to a function without a sharding rule.

A C++ function gathers its arguments, runs whole, and gives a replicated result: right by
construction, reported under the communication policy. A function that changes an argument in
place is run out of place and copied back; where it has no such form, it is an error, because the
change would be lost. A Python function of torch is entered: its inner calls are dispatched.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .._comm.move import move
from .._spec import replicated
from .._tap import alias
from .._tensor import DTensor
from ..errors import UnsupportedOperationError
from ..placements import I, R
from . import policy
from .call import Call, function_name
from .copies import before_write, mark_copies, share_memory
from .engine import out_variant, tag
from .solve import unwanted


def gather_fallback(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` on whole tensors."""
    if kwargs.get("out") is not None:
        return out_variant(gather_fallback, func, args, kwargs)
    call = Call(func, args, kwargs)
    whole = (I,) * call.mesh.ndim
    for operand, plain in zip(call.operands, call.plain, strict=True):
        if plain and operand.numel() != 1:
            policy.check_plain(call.name, tuple(operand.shape))
    moves = [(s, whole) for s in call.specs if unwanted(call.mesh, s.types, whole)]
    if moves and policy.state.communication != "allow":
        policy.report(call.name, moves, " (it has no sharding rule for these arguments)")

    moved: list[tuple[Tensor, DTensor]] = []

    def local(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        part = move(value, whole).to_local()
        if not {I, R}.issuperset(value._spec.types):
            moved.append((part, value))
        return part

    args, kwargs = tree_map(local, (args, kwargs))
    passed = {id(t) for t in call.operands}

    def labelled(r: Any) -> Any:
        if not isinstance(r, Tensor) or isinstance(r, DTensor) or r.layout != torch.strided:
            return r
        if id(r) in passed:
            r = alias(r)
        if r.__class__ is Tensor:
            r = tag(r, replicated(call.mesh, r.shape))
        for part, source in moved:
            if share_memory(r, part):
                mark_copies(r, call.name, source)
        return r

    return tree_map(labelled, func(*args, **kwargs))


def inplace_fallback(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do an in-place function as its out-of-place form and a copy into the first argument."""
    if not args:  # named; methods want it by position
        name = "input" if "input" in kwargs else "self"
        args, kwargs = (kwargs[name],), {k: v for k, v in kwargs.items() if k != name}
    target = args[0]
    functional = _functional_form(func)
    if functional is None:
        raise UnsupportedOperationError(
            f"{function_name(func)} changes its argument in place and has no sharding rule for {target._spec!r}; "
            "use its out-of-place form, or redistribute the tensor to Replicate() first"
        )
    if not isinstance(target, DTensor):
        raise UnsupportedOperationError(
            f"{function_name(func)} would write a DTensor into a plain tensor of shape {list(target.shape)}; "
            "distribute the plain tensor first, or use the out-of-place form"
        )
    if torch.is_grad_enabled():  # the backward may need the old values, which are about to be overwritten
        old = target.clone()
        args = tuple(old if a is target else a for a in args)
    value = functional(*args, **kwargs)
    return write_back(target, value)


def write_back(target: DTensor, value: DTensor) -> DTensor:
    """Copy `value` into `target` in place. A pending sum stays one: its views go on taking it for one."""
    _run = torch._C._disabled_torch_function_impl
    spec = target._spec
    before_write(target, "an in-place operation")
    if value._spec.shape != spec.shape:
        raise UnsupportedOperationError(
            f"an in-place operation on {spec!r} gave {value._spec!r}; the shape of the argument cannot change in place"
        )
    _run(Tensor.copy_, (), (target, move(value, spec.types)), {})
    return target


_INPLACE_OPERATORS = {
    "__iadd__": "add", "__isub__": "sub", "__imul__": "mul", "__itruediv__": "div", "__ifloordiv__": "floor_divide",
    "__imod__": "remainder", "__ipow__": "pow", "__iand__": "bitwise_and", "__ior__": "bitwise_or",
    "__ixor__": "bitwise_xor", "__ilshift__": "bitwise_left_shift", "__irshift__": "bitwise_right_shift",
}  # fmt: skip


def _functional_form(func: Any) -> Any:
    name = function_name(func)
    plain = _INPLACE_OPERATORS.get(name) or (name[:-1] if name.endswith("_") and not name.endswith("__") else None)
    if plain is None:
        return None
    for owner in (Tensor, torch, torch.nn.functional):
        found = getattr(owner, plain, None)
        if found is not None:
            return found
    return None


def enter(func: types.FunctionType) -> Any:
    """Copy of a Python function of torch that does not hand itself to `__torch_function__` again.

    Its checks `has_torch_function*` answer no, so the body runs and the calls inside are
    dispatched one by one. Names are looked up in the original module as it is at call time.
    """
    no = _no
    overlay = _Overlay(func.__globals__)
    overlay.update(has_torch_function=no, has_torch_function_unary=no, has_torch_function_variadic=no)
    closure = func.__closure__
    if closure:
        closure = tuple(_enter_cell(c) for c in closure)
    copy = types.FunctionType(func.__code__, overlay, func.__name__, func.__defaults__, closure)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _no(*args: Any) -> bool:
    return False


def _enter_cell(cell: types.CellType) -> types.CellType:
    content = cell.cell_contents
    module = getattr(content, "__module__", "") or ""
    if isinstance(content, types.FunctionType) and module.startswith("torch"):
        return types.CellType(enter(content))
    return cell


class _Overlay(dict[str, Any]):
    """Globals that fall back to another module's globals."""

    def __init__(self, below: dict[str, Any]) -> None:
        super().__init__(__builtins__=below["__builtins__"], __name__=below.get("__name__"))
        self._below = below

    def __missing__(self, name: str) -> Any:
        return self._below[name]
