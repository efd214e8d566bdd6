"""`softmax` and `log_softmax` (`softmin` is a softmax to its rule).

Other dims may be sharded freely. Over a sharded dim (logits sharded over the vocabulary) the
largest element and the sum of exponentials are all-reduced, and one sum in the backward: three
messages of the size of a reduced result, whatever the length of the dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._comm.move import strip
from .._dispatch.call import Call, Localized, Rewrite, Rule, Strategy, normalize_dim
from .._dispatch.engine import Cache, Handler, execute, remember
from .._dispatch.entry import Entry, NoRule, RuleFunction, miss
from .._dispatch.table import register
from .._spec import Spec
from ._across import Across, filled
from ._canonical import unary


class _Softmax(torch.autograd.Function):
    """Softmax over a dim whose parts lie on the ranks of `across`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, across: Across) -> Tensor:
        ctx.dim, ctx.across = dim, across
        shifted, total = _exponentials(x, dim, across)
        y = shifted.exp_().div_(total)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (y,) = ctx.saved_tensors
        across = ctx.across
        dot = across.vary(across.total((grad * y).sum(ctx.dim, keepdim=True)))
        return y * (grad - dot), None, None


class _LogSoftmax(torch.autograd.Function):
    """Logarithm of the softmax over a dim whose parts lie on the ranks of `across`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, across: Across) -> Tensor:
        ctx.dim, ctx.across = dim, across
        shifted, total = _exponentials(x, dim, across)
        y = shifted.sub_(total.log_())
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (y,) = ctx.saved_tensors
        across = ctx.across
        total = across.vary(across.total(grad.sum(ctx.dim, keepdim=True)))
        return grad - y.exp() * total, None, None


def _exponentials(x: Tensor, dim: int, across: Across) -> tuple[Tensor, Tensor]:
    """`x` minus the global maximum, and the global sum of its exponentials."""
    top = across.extreme(filled(x, (dim,), -torch.inf).amax(dim, keepdim=True), largest=True)
    shifted = x - top
    return shifted, across.total(shifted.exp().sum(dim, keepdim=True))


def softmax_rule(function: Any, distributed: type[torch.autograd.Function]) -> RuleFunction:
    """Rule of `function(x, dim, dtype)`.

    Args:
        function: what to run where the dim is whole.
        distributed: what to run where it is sharded.
    """

    def rule(call: Call) -> Rule:
        _, dim, dtype = call.args
        if not isinstance(dim, int):
            raise NoRule
        position = normalize_dim(dim, call.ndim)
        shape = tuple(call.shape)

        def localize(ins: list[Spec], outs: list[Spec]) -> Localized:
            axes = tuple(a for a, t in enumerate(ins[0].types) if t == position and call.mesh.sizes[a] > 1)
            if not axes:
                return Rewrite(function, (dim,)) if dtype is None else Rewrite(function, (dim, dtype))
            across = Across(call.mesh, axes)

            def local(x: Any) -> Tensor:
                plain = strip(x) if dtype is None else strip(x).to(dtype)
                if not plain.dtype.is_floating_point:
                    return function(plain, dim)  # type: ignore[no-any-return]  # torch's own error
                # torch computes in float32 where it stores half precision; so does this
                wide = plain.float() if plain.dtype in (torch.float16, torch.bfloat16) else plain
                y: Tensor = distributed.apply(wide, position, across)  # type: ignore[no-untyped-call]
                return y if wide.dtype == plain.dtype else y.to(plain.dtype)

            return Rewrite(local, ())

        strategies = [Strategy((d,), (d,), block=d == position) for d in range(call.ndim)]
        return Rule([shape], strategies, localize, uniform=True)

    return rule


def _signature(input: Tensor, dim: Any, dtype: Any = None) -> tuple[Any, ...]:
    return input, dim, dtype


def _functional(input: Tensor, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> tuple[Any, ...]:
    """Signature of the functions of torch.nn.functional; a missing dim is left to them, with their warning."""
    return input, dim, dtype


def _quick_functional(handler: Handler, rule: RuleFunction) -> Handler:
    """Look up a call of torch.nn.functional by what decides it; torch passes all its parameters by name."""
    known: dict[Any, Entry] = Cache()
    find = known.get

    def functional(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            x = args[0]
            dim, dtype = kwargs["dim"], kwargs["dtype"]
            e = find((x._spec, dim, dtype))
            if e is None:
                e = remember(known, (x._spec, dim, dtype), miss(func, (x, dim, dtype), {}, rule))
        except (AttributeError, IndexError, KeyError, NoRule):  # other spellings; a dim that torch must guess
            return handler(func, args, kwargs)
        return execute(e, func, (x,), {})

    return functional


for _name, _distributed in (("softmax", _Softmax), ("log_softmax", _LogSoftmax)):
    _rule = softmax_rule(getattr(torch, _name), _distributed)
    unary(f"{_name} special.{_name}", _signature, _rule)
    _handler = unary(f"nn.functional.{_name}", _functional, _rule)  # overrides the entry of the line above
    register(f"nn.functional.{_name}", _quick_functional(_handler, _rule))
