"""Operators that torch builds from others on a CPU, but not on a GPU: dropout, attention and recurrent layers.

`dropout` of a CPU tensor is taken apart before a dispatch mode can see it, also where C++ code calls it. So while an
emulation lasts, these operators get kernels that run what a GPU would run, or refuse what is not modelled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..errors import UnsupportedRandomOperatorError

__all__ = ["on_gpu", "registered"]

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def on_gpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """What a GPU runs in place of a composite operator, or None where it runs the same.

    Raises:
        UnsupportedRandomOperatorError: if what it runs draws numbers in a way that is not modelled.
    """
    name = func._schema.name.removeprefix("aten::")
    if name != "dropout" and name != "scaled_dot_product_attention" and name not in _RECURRENT:
        return None
    names = [a.name for a in func._schema.arguments]
    given = {a.name: a.default_value for a in func._schema.arguments} | dict(zip(names, args, strict=False)) | kwargs
    if name == "dropout":
        x, p = given["input"], given["p"]
        if given["train"] and 0.0 < p < 1.0 and x.numel():
            return lambda: torch.ops.aten.native_dropout.default(x, p, True)[0]
    elif name == "scaled_dot_product_attention":
        if given["dropout_p"] > 0.0 and not _only_math_attention():
            raise UnsupportedRandomOperatorError(
                f"scaled_dot_product_attention with dropout_p={given['dropout_p']}: a GPU's fused attention draws its "
                "mask in a way that is not modelled; use torch.nn.attention.sdpa_kernel(SDPBackend.MATH) or dropout_p=0"
            )
    elif given["train"] and given["dropout"] > 0.0 and given["num_layers"] > 1:
        raise UnsupportedRandomOperatorError(
            f"{name} with dropout={given['dropout']} between layers: on a GPU cuDNN draws the mask in a way that is "
            "not modelled; use dropout=0, or single layers with torch.nn.Dropout between them"
        )
    return None


def _only_math_attention() -> bool:
    cuda: Any = torch.backends.cuda
    return not (cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled())


_users = 0
_library: Any = None
_make_library: Any = torch.library.Library


@contextlib.contextmanager
def registered(active: Callable[[], bool]) -> Iterator[None]:
    """Let `on_gpu` decide for CPU tensors, within a block.

    Args:
        active: tells whether the calling thread emulates a GPU at the moment.
    """
    global _users, _library
    if _users == 0:
        _library = _make_library("aten", "IMPL")
        for name in ("dropout", "scaled_dot_product_attention", *_RECURRENT):
            packet = getattr(torch.ops.aten, name)
            for overload in packet.overloads():
                func = getattr(packet, overload)
                if func.has_kernel_for_dispatch_key(_COMPOSITE):
                    _library.impl(func, _kernel(func, active), "AutogradCPU")
    _users += 1
    try:
        yield
    finally:
        _users -= 1
        if _users == 0:
            _library._destroy()
            _library = None


def _kernel(func: Any, active: Callable[[], bool]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        instead = on_gpu(func, args, kwargs) if active() else None
        return func._op_dk(_COMPOSITE, *args, **kwargs) if instead is None else instead()

    return kernel
