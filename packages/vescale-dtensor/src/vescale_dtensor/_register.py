"""`register_op`: sharding rules for operators that this package does not know."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch._library.custom_ops import CustomOpDef
from torch.utils._pytree import tree_map

from ._comm.move import strip
from ._dispatch.call import Call, Localized, Rewrite, Rule, Strategy, function_name
from ._dispatch.engine import Handler, clear_caches, keyed_handler, tensors_in
from ._dispatch.entry import RuleFunction
from ._dispatch.fallback import gather_fallback
from ._spec import Spec
from ._tensor import TABLE, DTensor
from .errors import RuleError, UnsupportedOperationError

_plugins_asked = False


class _Known(NamedTuple):
    """What is known of an operator that was registered."""

    func: Any
    """What runs on plain tensors."""
    rule: RuleFunction
    """Its rule, as given."""
    inplace: bool
    """Whether it changes its first argument."""


_known: dict[Any, _Known] = {}
"""By what users call."""


def rule_of(fn: Any) -> _Known:
    """What is registered for `fn`.

    Raises:
        ValueError: nothing is.
    """
    key = _key(fn)
    if key not in _known:
        raise ValueError(
            f"fn = {function_name(fn)} has no rule that register_op was given; register it, or check the rule as it is "
            "registered with register_op(fn, rule, verify=samples)"
        )
    return _known[key]


def _key(fn: Any) -> Any:
    if isinstance(fn, CustomOpDef):
        return fn._opoverload.overloadpacket
    if isinstance(fn, torch._ops.OpOverload) and fn not in _known:
        return fn.overloadpacket
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return owner.apply  # `fn` may be what it was before it got its rule
    return fn


def register_op(fn: Any, rule: RuleFunction, *, verify: Sequence[Any] | None = None) -> Any:
    """Add a sharding rule for a custom operator.

    A rule is a function `Call -> Rule | None` that reasons about one mesh axis: which placements of the
    operands give which placements of the results when the operator runs on local parts. "All replicated"
    is always added; None falls back to gathering the operands, which is reported as implicit
    communication.

    Args:
        fn: what the user calls: a `torch.ops` operator or one of its overloads, an object made by
            `torch.library.custom_op`, `apply` of a `torch.autograd.Function`, a function of torch, or any
            Python function of tensors (a Triton wrapper).
            A function that calls `torch.overrides.handle_torch_function` on itself, as functions of torch do,
            stays as it is; of another one, torch knows nothing.
        rule: the sharding rule.
        verify: sample calls; the rule is checked on them before it is registered, in this process and without
            a mesh: see `verify_rule`.

    Returns:
        What to call: `fn` itself, except for a Python function that does not hand its calls over: there a
        wrapper, that must be used in place of `fn`.

    Raises:
        TypeError: `fn` is none of these.
        ValueError: it has a rule already, or it changes arguments other than the first.
        RuleError: the rule is wrong on the samples of `verify`.

    >>> def rowwise(call):
    ...     return Rule([call.shape], [Strategy((0,), (0,))])
    >>> my_op = register_op(my_op, rowwise)  # doctest: +SKIP
    """
    if not callable(rule):
        raise TypeError(f"rule must be a function Call -> Rule | None, got {type(rule).__name__}")
    if isinstance(fn, CustomOpDef):
        _enter_overloads(fn._opoverload.overloadpacket, rule, verify)
        return fn
    if isinstance(fn, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        _enter_overloads(fn, rule, verify)
        return fn
    owner = getattr(fn, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        if isinstance(owner.__dict__.get("apply"), staticmethod):
            raise ValueError(f"{owner.__name__}.apply has a rule already")
        _verify(fn, rule, False, verify)
        wrapper = _dispatching(fn, rule, f"{owner.__name__}.apply")
        owner.apply = staticmethod(wrapper)  # type: ignore[method-assign]
        return wrapper
    if not callable(fn):
        raise TypeError(f"fn must be something that a user calls, got {type(fn).__name__}")
    if (getattr(fn, "__module__", None) or "torch").split(".")[0] == "torch" or _hands_over(fn):
        _verify(fn, rule, False, verify)
        _enter(fn, keyed_handler(on_plain_tensors(rule), gather_fallback))
        _known[fn] = _Known(fn, rule, False)
        return fn
    if not isinstance(fn, types.FunctionType | functools.partial) and not hasattr(fn, "__call__"):  # noqa: B004
        raise TypeError(f"fn must be an operator or a function, got {type(fn).__name__}")
    _verify(fn, rule, False, verify)
    return _dispatching(fn, rule, function_name(fn))


def _hands_over(fn: Any) -> bool:
    """Whether a Python function hands calls to `__torch_function__` itself, as functions of torch do."""
    return isinstance(fn, types.FunctionType) and "handle_torch_function" in fn.__code__.co_names


def _verify(func: Any, rule: RuleFunction, inplace: bool, samples: Sequence[Any] | None) -> None:
    if samples is not None:
        from ._verify import check_rule

        check_rule(func, rule, inplace, samples)


def _enter(func: Any, handler: Handler) -> None:
    known = TABLE.get(func)
    if known is not None and (hasattr(known, "cache") or func in _registered):
        raise ValueError(f"{function_name(func)} has a sharding rule already; rules cannot be replaced")
    _registered.add(func)
    TABLE[func] = handler
    clear_caches()


_registered: set[Any] = set()


def _enter_overloads(op: Any, rule: RuleFunction, samples: Sequence[Any] | None = None) -> None:
    packet = op.overloadpacket if isinstance(op, torch._ops.OpOverload) else op
    overloads = [getattr(packet, name) for name in packet.overloads()]
    if op is not packet and len(overloads) > 1:
        targets = [op]
        schemas = [op._schema]
    else:
        targets = [packet, *overloads]
        schemas = [o._schema for o in overloads]
    changed = {
        i for s in schemas for i, a in enumerate(s.arguments) if a.alias_info is not None and a.alias_info.is_write
    }
    if changed - {0}:
        raise ValueError(
            f"{packet} changes its arguments {sorted(changed)}; a rule can describe "
            f"an operator that changes nothing, or only its first "
            "argument. Wrap the call in local_map instead"
        )
    _verify(op, rule, bool(changed), samples)
    if changed:
        handler = keyed_handler(rule, _refuse, inplace=True)
    else:
        handler = keyed_handler(on_plain_tensors(rule), gather_fallback)
    for target in targets:
        _enter(target, handler)
        _known[target] = _Known(op, rule, bool(changed))


def on_plain_tensors(rule: RuleFunction) -> RuleFunction:
    """Hand the operator aliases of its arguments that are plain tensors.

    What it saves for its backward then comes back plain, as the gradients there are. The arguments
    themselves would come back as DTensors.
    """

    def plain_rule(call: Call) -> Rule | None:
        answer = rule(call)
        if answer is None:
            return None
        require_form(answer, call)
        inner = answer.localize

        def localize(ins: list[Spec], outs: list[Spec]) -> Localized:
            found = inner(ins, outs) if inner is not None else None

            def local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                args, kwargs = tree_map(_plain, (args, kwargs))
                if isinstance(found, Rewrite):
                    return found.function(args[0], *found.tail)
                return func(*args, **kwargs) if found is None else found(func, args, kwargs)

            return local

        return replace(answer, localize=localize)

    return plain_rule


def require_form(answer: Any, call: Call) -> None:
    """Raise RuleError if what a rule answered is not made of what it should be."""
    of = f"the rule of {call.name} answered {answer!r}"
    if not isinstance(answer, Rule):
        raise RuleError(f"{of}; a rule returns Rule(shapes, strategies), or None where it does not cover the call")
    for number, strategy in enumerate(answer.strategies):
        if not isinstance(strategy, Strategy) or not all(map(_are_types, strategy[:2])):
            raise RuleError(
                f"{of}: strategy {number} is {strategy!r}; write Strategy((0, R), (0,)): "
                "a tuple with one axis type per tensor operand, and one per tensor result"
            )
        for i, (kind, shape) in enumerate(zip(strategy.outs, answer.shapes, strict=False)):
            if type(kind) is int and kind >= len(shape):
                raise RuleError(
                    f"{of}: strategy {number}, {strategy!r}, cuts dim {kind} of result {i}, "
                    f"which has the shape {list(shape)}"
                )


def _are_types(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(v, int) for v in value)


def _plain(value: Any) -> Any:
    return strip(value) if isinstance(value, DTensor) else value


def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise UnsupportedOperationError(
        f"{func} changes its first argument, and its rule has no answer for "
        f"these placements; redistribute the arguments first"
    )


def _dispatching(fn: Callable[..., Any], rule: RuleFunction, name: str) -> Callable[..., Any]:
    """A function that goes by the rule where a DTensor is among its arguments."""
    handler = keyed_handler(on_plain_tensors(rule), gather_fallback)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch._C._is_torch_function_enabled() and any(isinstance(t, DTensor) for t in tensors_in(args, kwargs)):
            return handler(fn, args, kwargs)
        return fn(*args, **kwargs)

    wrapper.__name__ = wrapper.__qualname__ = name
    wrapper.__doc__ = getattr(fn, "__doc__", None)
    _known[wrapper] = _Known(fn, rule, False)
    return wrapper


class _Registry:
    """What plugins get."""

    def register(self, fn: Any, rule: RuleFunction) -> None:
        """Add a rule; see `register_op`."""
        if register_op(fn, rule) is not fn and not isinstance(getattr(fn, "__self__", None), type):
            raise TypeError(
                f"{function_name(fn)} is a Python function that torch cannot dispatch; decorate it with "
                "vescale_dtensor.register_op where it is defined, let it call torch.overrides.handle_torch_function, "
                "or make it a torch.library.custom_op"
            )


def ask_plugins() -> None:
    """Let plugins register rules, once."""
    global _plugins_asked
    if _plugins_asked:
        return
    _plugins_asked = True
    try:
        from ._hooks import register_ops

        register_ops(_Registry())
    except BaseException:
        _plugins_asked = False  # it fails again at the next use, rather than leaving rules out quietly
        raise
