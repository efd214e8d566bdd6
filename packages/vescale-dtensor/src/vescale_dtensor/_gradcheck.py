"""`gradcheck` and `gradgradcheck` of DTensors: done on whole tensors that are distributed inside the function.

They change single elements of their inputs and compare numbers on the host, which on storages would
change one element per rank. Each rank checks the same function of the same whole tensors instead.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ._api import from_local
from ._patching import replace_once
from ._tensor import DTensor
from .placements import I, to_placement


def _whole(x: Any) -> Any:
    """A plain leaf of the values of a DTensor."""
    if not isinstance(x, DTensor):
        return x
    return x.full_tensor().detach().clone().requires_grad_(x.requires_grad)


def _as_given(whole: Any, given: Any) -> Any:
    """A whole tensor laid out as the DTensor `given`; differentiable."""
    if not isinstance(given, DTensor):
        return whole
    mesh = given.device_mesh
    everywhere = [to_placement(I)] * mesh.ndim
    x = from_local(whole, mesh, everywhere, run_check=False, shape=whole.shape, grad_placements=None)
    return x.redistribute(given.placements)


def _gathered(result: Any) -> Any:
    return result.full_tensor() if isinstance(result, DTensor) else result


def _on_whole_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(func: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        given = tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,)
        if not any(isinstance(x, DTensor) for x in given):
            rest = () if grad_outputs is None and not args else (grad_outputs, *args)
            return original(func, inputs, *rest, **kwargs)

        def on_whole(*whole: Any) -> Any:
            return tree_map(_gathered, func(*map(_as_given, whole, given)))

        rest = args if grad_outputs is None and not args else (tree_map(_whole, grad_outputs), *args)
        return original(on_whole, tuple(map(_whole, given)), *rest, **kwargs)

    return wrapper


def install() -> None:
    """Make both functions take DTensors; may be called again."""
    module = sys.modules["torch.autograd.gradcheck"]  # the package has the function under this name
    for name in ("gradcheck", "gradgradcheck"):
        replace_once(module, name, _on_whole_tensors)
        if hasattr(torch.autograd, name):
            setattr(torch.autograd, name, getattr(module, name))
