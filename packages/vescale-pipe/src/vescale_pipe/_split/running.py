"""How a recorded call is run: for real, on meta, or on zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from ..errors import SplitError
from .calls import meta_call, meta_result
from .flops import counted
from .swap import Weights
from .tree import Path, leaves, mapped
from .values import Node, Value

__all__ = ["Runner", "tensors_of"]


def tensors_of(tree: Any) -> Any:
    """Return a structure with what stands for each value in its place."""
    return mapped(lambda leaf, path: leaf.tensor if isinstance(leaf, Value) else leaf, tree)


class Runner:
    """Runs calls whose arguments are values."""

    def __init__(self, weights: Weights, *, count_flops: bool) -> None:
        self.weights, self.count_flops = weights, count_flops

    def for_real(self, node: Node, module: nn.Module | None, func: Callable[..., Any]) -> tuple[Any, bool]:
        """Run what depends on the batch only; returns its result and whether buffers of the module changed."""
        args, kwargs = tensors_of(node.args), tensors_of(node.kwargs)
        if module is None:
            return func(*args, **kwargs), False
        with self.weights.materialized(module) as buffers:
            versions = [buffer._version for buffer in buffers]
            out = func(*args, **kwargs)
            changed = [buffer._version for buffer in buffers] != versions
        if changed:
            node.changed_buffers = tuple(f"{node.module}.{name}" for name, _ in module.named_buffers())
        return out, changed

    def on_meta(
        self, node: Node, module: nn.Module | None, func: Callable[..., Any], stand_in: dict[int, Tensor]
    ) -> Any:
        """Run a call on meta; a module that can't is run on zeros."""

        def tensors(tree: Any) -> Any:
            return mapped(lambda leaf, path: stand_in[leaf.number] if isinstance(leaf, Value) else leaf, tree)

        kinds = {leaf.device.type for leaf in leaves((node.args, node.kwargs)) if isinstance(leaf, Value)}
        with counted(node, self.count_flops):
            kind = next((kind for kind in kinds if kind != "meta" and torch.is_autocast_enabled(kind)), None)
            if kind is not None:
                # Casts of weights must not stay in its cache.
                with torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=False):
                    return self._under_autocast(node, module, func, stand_in)
            if module is None:
                function, args, kwargs = meta_call(func, tensors(node.args), tensors(node.kwargs))
                try:
                    return function(*args, **kwargs)
                except SplitError:
                    raise
                except (RuntimeError, NotImplementedError) as error:
                    raise SplitError(f"{node}: can't be recorded without values: {error}") from error
            versions = {name: buffer._version for name, buffer in module.named_buffers()}
            try:
                out = func(*tensors(node.args), **tensors(node.kwargs))
                node.changed_buffers = tuple(
                    f"{node.module}.{name}"
                    for name, buffer in module.named_buffers()
                    if name in versions and buffer._version != versions[name]
                )
                return out
            except SplitError:
                raise
            except Exception:  # noqa: BLE001 -- whatever a module raises that needs values: it is run on zeros
                return self._on_zeros(node, module, func, stand_in)

    def _under_autocast(
        self, node: Node, module: nn.Module | None, func: Callable[..., Any], stand_in: dict[int, Tensor]
    ) -> Any:
        """Run a call on fake tensors: autocast does not know meta, and types would be wrong."""
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                return self._on_zeros(node, module, func, stand_in)
        except Exception:  # noqa: BLE001 -- as above
            return self._on_zeros(node, module, func, stand_in)

    def _on_zeros(
        self, node: Node, module: nn.Module | None, func: Callable[..., Any], stand_in: dict[int, Tensor]
    ) -> Any:
        """Run a call that needs values (routing by nonzero, kernels without a meta version) on zeros."""

        def real(leaf: Any, path: Path) -> Any:
            if not isinstance(leaf, Value):
                return leaf
            device = "cpu" if leaf.device.type == "meta" else leaf.device
            twin = torch.zeros(leaf.tensor.shape, dtype=leaf.tensor.dtype, device=device)
            return twin.requires_grad_(stand_in[leaf.number].requires_grad).view_as(twin)

        args, kwargs = mapped(real, (node.args, node.kwargs))
        with self.weights.materialized(module or nn.Module()) as buffers:
            versions = [buffer._version for buffer in buffers]
            out = func(*args, **kwargs)
            if module is not None and [buffer._version for buffer in buffers] != versions:
                node.changed_buffers = tuple(f"{node.module}.{name}" for name, _ in module.named_buffers())
        # What it changed in place must be seen on the stand-ins, and what it returned of them must be them.
        back: dict[int, Tensor] = {}
        for value, twin in zip(leaves((node.args, node.kwargs)), leaves((args, kwargs)), strict=True):
            if isinstance(value, Value):
                back[id(twin)] = stand_in[value.number]
                if twin._version:
                    with torch.no_grad():
                        stand_in[value.number].detach().zero_()
        with unset_fake_temporarily():
            return mapped(
                lambda leaf, path: back.get(id(leaf), meta_result(leaf)) if isinstance(leaf, Tensor) else leaf, out
            )
