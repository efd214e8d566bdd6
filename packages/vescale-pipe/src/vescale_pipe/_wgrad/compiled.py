"""Modules that `torch.compile` has taken over: their backward is one piece."""

from __future__ import annotations

import sys

from torch import nn

__all__ = ["compiled_modules"]


def compiled_modules(module: nn.Module) -> list[str]:
    """Return the names of the compiled modules inside a module; "" stands for itself.

    Args:
        module: where to look.
    """
    # Whoever compiled something has loaded it; loading it takes a second.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return []
    kind = dynamo.OptimizedModule
    return [
        name
        for name, one in module.named_modules()
        if isinstance(one, kind) or getattr(one, "_compiled_call_impl", None) is not None
    ]
