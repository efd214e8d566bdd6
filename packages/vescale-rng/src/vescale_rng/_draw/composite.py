"""Operators that are made of others (`dropout`, attention), which modes and subclasses see whole in inference mode.

They are run by torch's own kernel, which calls what it calls out of inference mode. `OpOverload.decompose` prefers
decompositions for tracing, and those may draw otherwise: that of dropout runs `native_dropout`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["is_composite", "run_composite"]

_KEY = torch._C.DispatchKey.CompositeImplicitAutograd


@functools.cache
def is_composite(op: Any) -> bool:
    """Tell whether an operator is made of others."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), _KEY))


def run_composite(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run what an operator is made of; those operators are dispatched."""
    return op._op_dk(_KEY, *args, **kwargs)
