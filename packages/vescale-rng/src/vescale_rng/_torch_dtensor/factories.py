"""`torch.distributed.tensor.rand` and `randn`, on every kind of mesh.

They never reach the dispatcher: each calls a helper of its module, which lays the tensor out and fills it. The helper
is wrapped; torch lays the tensor out, and only the filling is ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .dynamo import run_as_it_is
from .ready import draw

__all__ = ["wrap_helper"]

_KERNELS: dict[Any, str] = {torch.rand: "rand", torch.randn: "randn"}


def wrap_helper(helper: Callable[..., Any]) -> Callable[..., Any]:
    """Return `_dtensor_init_helper` with the random factories drawn as one device would."""

    @run_as_it_is
    @functools.wraps(helper)
    def wrapped(init_op: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = _KERNELS.get(init_op)
        if kernel is None:
            return helper(init_op, *args, **kwargs)
        tensor = helper(torch.empty, *args, **kwargs)
        draw(kernel, tensor, (), {})
        return tensor

    return wrapped
