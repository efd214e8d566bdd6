"""Factories that fill a DTensor: `torch.eye(3, 4, out=x)`, as `nn.init.eye_` calls it.

They read nothing that could differ between ranks, so each rank makes the whole and keeps its part.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import _random
from .._dispatch.call import function_name
from .._dispatch.engine import label_one, out_variant, tensors_in
from .._dispatch.fallback import gather_fallback
from .._dispatch.table import register
from .._spec import replicated
from .._tensor import DTensor

DRAWS = frozenset("rand randn randint randperm".split())
LINES = frozenset("arange range linspace logspace".split())
"""Those that keep the shape of an `out` with as many elements."""


def fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A factory that was given a DTensor, most likely as `out`."""
    rest = dict(kwargs)
    out = rest.pop("out", None)
    if not isinstance(out, DTensor) or tensors_in(args, rest):
        return gather_fallback(func, args, kwargs)
    name, mesh = function_name(func), out._spec.mesh
    if name in DRAWS and mesh not in _random._agreed:
        _random.check_agreement(mesh, rest.get("generator") or _random.default_generator(out.device))
    of = torch.zeros if name == "empty" else func  # what memory held would differ between ranks

    @functools.wraps(of)
    def whole() -> DTensor:
        made = of(*args, **{"dtype": out.dtype, "device": out.device, **rest})
        if name in LINES and made.numel() == out.numel():
            made = made.view(out.shape)
        return label_one(made, replicated(mesh, made.shape))

    return out_variant(fill, whole, (), {"out": out})


register("zeros ones full empty eye arange range linspace logspace rand randn randint randperm", fill)
