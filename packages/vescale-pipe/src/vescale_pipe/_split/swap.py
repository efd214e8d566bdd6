"""Weights on meta while a model is recorded, and everything as it was afterwards."""

from __future__ import annotations

import contextlib
import random
import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Weights", "cuda_in_use", "python_random", "python_random_kept", "random_state", "same_state"]


def cuda_in_use() -> bool:
    """Return whether something has used a GPU in this process."""
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def random_state() -> list[Any]:
    """Return a mark that differs after something was drawn from the default generators."""
    marks: list[Any] = [torch.default_generator.get_state()]
    if cuda_in_use():
        marks += [generator.get_state() for generator in torch.cuda.default_generators]
    return marks


def python_random() -> Any:
    """Return the state of Python's random numbers, and of numpy's if it is loaded."""
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is None:
        return random.getstate(), None
    name, keys, *rest = numpy.get_state()
    return random.getstate(), (name, keys.tobytes(), *rest)


@contextlib.contextmanager
def python_random_kept() -> Iterator[None]:
    """Put these states back at the end."""
    state = random.getstate()
    numpy: Any = sys.modules.get("numpy.random")
    other = numpy.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.set_state(other)


def same_state(one: list[Any], other: list[Any]) -> bool:
    """Return whether nothing was drawn between two marks."""
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def _tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers


class Weights:
    """Parameters and buffers of a model, their stand-ins on meta, and the state of its modules.

    Inside `with weights.swapped():` every parameter and buffer is a stand-in and modules may be run freely: whatever
    they change of themselves (attributes, buffers, lists) is undone at the end.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.modules())
        self.saved = [_Saved(module) for module in self.modules]
        self.meta: dict[int, Tensor] = {}
        self.names: dict[int, tuple[str, str]] = {}  # by id of the tensor or of its stand-in
        self.real: dict[int, Tensor] = {}  # by id of the stand-in
        for kind, found in (
            ("parameter", model.named_parameters(remove_duplicate=False)),
            ("buffer", model.named_buffers(remove_duplicate=False)),
        ):
            for name, tensor in found:
                if id(tensor) in self.meta:
                    continue
                twin: Tensor = torch.empty_like(tensor.detach(), device="meta")
                if kind == "parameter":
                    twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
                self.meta[id(tensor)] = twin
                self.real[id(twin)] = tensor
                self.names[id(tensor)] = self.names[id(twin)] = (kind, name)

    @contextlib.contextmanager
    def swapped(self, training: bool) -> Iterator[None]:
        """Put the stand-ins in place and all modules into one mode."""
        for module in self.modules:
            for table in _tables(module):
                for name, tensor in table.items():
                    if tensor is not None:
                        table[name] = self.meta[id(tensor)]
            vars(module)["training"] = training
        try:
            yield
        finally:
            for saved in self.saved:
                saved.restore()

    @contextlib.contextmanager
    def materialized(self, module: nn.Module) -> Iterator[list[Tensor]]:
        """Inside `swapped`: give one module its real parameters and copies of its buffers; zeros for those on meta.

        Yields:
            the copies of its buffers, in the order of `module.buffers()`.
        """
        undo: list[tuple[dict[str, Any], str, Any]] = []
        made: dict[int, Tensor] = {}
        for part in module.modules():
            for table in _tables(part):
                for name, tensor in list(table.items()):
                    real = None if tensor is None else self.real.get(id(tensor))
                    if tensor is None or real is None:
                        continue
                    if id(tensor) not in made:
                        if table is part._parameters and not real.is_meta:
                            made[id(tensor)] = real
                        elif real.is_meta:
                            made[id(tensor)] = torch.zeros_like(real, device="cpu").requires_grad_(real.requires_grad)
                        else:
                            made[id(tensor)] = real.detach().clone()
                    undo.append((table, name, tensor))
                    table[name] = made[id(tensor)]
        try:
            yield [made[id(tensor)] for table, _, tensor in undo if not isinstance(tensor, nn.Parameter)]
        finally:
            for table, name, tensor in undo:
                table[name] = tensor


class _Saved:
    """The attributes of one module, and the contents of those that are lists, dicts or sets."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = dict(vars(module))
        self.buffers = dict(module._buffers)
        self.contents: list[tuple[Any, Any]] = [
            (held, held.copy()) for held in self.attributes.values() if type(held) in (dict, OrderedDict, list, set)
        ]

    def restore(self) -> None:
        now = vars(self.module)
        for name in [name for name in now if name not in self.attributes]:
            del now[name]
        now.update(self.attributes)
        for held, content in self.contents:
            held.clear()
            if isinstance(held, list):
                held.extend(content)
            else:
                held.update(content)
