"""Guards at what records a program or runs it outside of Python: TorchScript, export, Dynamo.

A recording would hold local sizes, and TorchScript runs in C++ on the storage. What cannot be done
is refused; a scripted function that meets a DTensor runs as the Python function that it was made of.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.export
import torch.fx.experimental.proxy_tensor
import torch.jit._script
import torch.nn.attention._utils
import torch.utils._pytree as pytree
from torch import nn

from ._mesh import any_mesh
from ._patching import guard_argument, holds_dtensor, refusal, replace_once
from ._tensor import DTensor

_on = torch._C._is_torch_function_enabled


def _module_holds_dtensor(module: Any) -> bool:
    if not isinstance(module, nn.Module):
        return False
    return any(t.__class__ is DTensor for t in (*module.parameters(), *module.buffers()))


def _recorder(what: str) -> Callable[[Any], Any]:
    """Wrap a function that records a module or function called on example inputs."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            module = args[0] if args else next(iter(kwargs.values()), None)
            inputs = (*args[1:], *kwargs.values())
            if (
                _module_holds_dtensor(module)
                or holds_dtensor([inputs])
                or any(isinstance(i, dict) and holds_dtensor(i.values()) for i in inputs)
            ):
                raise refusal(what, "Use it on the single-device module, before that is parallelized")
            return original(*args, **kwargs)

        return wrapper

    return make


def _refuse_to_trace(original: Any) -> Any:
    """Wrap `make_fx`, whose graph would lack all communication."""
    instead = "Trace the function on plain tensors, or with torch.fx.symbolic_trace"

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        traced = original(*args, **kwargs)

        @functools.wraps(traced)
        def call(*inputs: Any) -> Any:
            if holds_dtensor(pytree.tree_leaves(inputs)):
                raise refusal("make_fx", instead)
            try:
                return traced(*inputs)
            except TypeError as error:
                if any_mesh() and "ProxyTorchDispatchMode" in str(error):  # a DTensor that the function captures
                    raise refusal("make_fx", instead) from error
                raise

        return call

    return wrapper


def _call_scripted(original: Any) -> Any:
    """Wrap the call of a scripted function."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _on() and (holds_dtensor(args) or (kwargs and holds_dtensor(kwargs.values()))):
            function = getattr(self, "_torchdynamo_inline", None)
            if function is None:  # loaded from a file
                raise refusal(
                    f"the TorchScript function {self.name}",
                    "Call the Python function that it was made of, or local_map",
                )
            return function(*args, **kwargs)
        return original(self, *args, **kwargs)

    return __call__


def _choose(original: Any) -> Any:
    """Wrap `torch.cond`, which compiles: with DTensors the branch is taken here, by the value of the predicate."""

    @functools.wraps(original)
    def cond(pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
        if holds_dtensor(pytree.tree_leaves((pred, operands))):
            return (true_fn if pred else false_fn)(*operands)
        return original(pred, true_fn, false_fn, operands)

    return cond


def _repeat(original: Any) -> Any:
    """Wrap `torch.while_loop`, which compiles: with DTensors it is a loop of Python."""

    @functools.wraps(original)
    def while_loop(cond_fn: Any, body_fn: Any, carried_inputs: Any) -> Any:
        if not holds_dtensor(pytree.tree_leaves(carried_inputs)):
            return original(cond_fn, body_fn, carried_inputs)
        carried = tuple(carried_inputs)
        while cond_fn(*carried):
            carried = tuple(body_fn(*carried))
        return carried

    return while_loop


def _guard_control_flow() -> None:
    for name, make in (("cond", _choose), ("while_loop", _repeat)):
        for owner in (torch, sys.modules.get(f"torch._higher_order_ops.{name}")):
            replace_once(owner, name, make)
    guard = guard_argument(
        "flex_attention", "Use F.scaled_dot_product_attention with a mask, or local_map with batch or heads sharded"
    )
    for space in (torch.nn.attention._utils, sys.modules.get("torch.nn.attention.flex_attention")):
        replace_once(space, "_validate_sdpa_input", guard)  # the first that flex_attention calls, by this name


@functools.cache
def _not_traceable() -> None:
    """Tell Dynamo to leave DTensors to the interpreter; cheap only once Dynamo is loaded, hence not at import."""
    from torch._dynamo import config, trace_rules

    config.nontraceable_tensor_subclasses.add(DTensor)
    trace_rules.add(__package__)  # frames of ours that see no DTensor, such as moves


def _guard_compile() -> None:
    if "torch._dynamo" in sys.modules:
        _not_traceable()

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            _not_traceable()
            return original(*args, **kwargs)

        return wrapper

    replace_once(torch, "compile", make)


def install() -> None:
    """Put the guards in place; may be called again."""
    for owner in (torch.jit, torch.jit._trace):
        for name in ("trace", "trace_module"):
            replace_once(owner, name, _recorder(f"torch.jit.{name}"))
    for owner in (torch.jit, torch.jit._script):
        replace_once(owner, "script", _recorder("torch.jit.script"))
    replace_once(torch.export, "export", _recorder("torch.export.export"))
    replace_once(torch.fx.experimental.proxy_tensor, "make_fx", _refuse_to_trace)
    replace_once(torch.jit.ScriptFunction, "__call__", _call_scripted)
    _guard_compile()
    _guard_control_flow()
