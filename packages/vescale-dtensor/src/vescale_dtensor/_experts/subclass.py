"""Subclasses that stand for a module's class: another forward, and the name, copies and pickles that it has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["Travelling", "give_forward"]

MakeForward = Callable[[type[nn.Module]], Callable[..., Any]]
"""Makes the forward of a subclass from the class."""


class Travelling(nn.Module):
    """Mixin of the subclasses."""

    _vescale_forward: MakeForward

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _revive, (type(self).__mro__[2], type(self)._vescale_forward), self.__dict__.copy()


@functools.cache
def _subclass(base: type[nn.Module], make_forward: MakeForward) -> type[nn.Module]:
    body = {
        "forward": functools.wraps(base.forward)(make_forward(base)),
        "_vescale_forward": staticmethod(make_forward),
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "__qualname__": base.__name__,
    }
    return type(base.__name__, (Travelling, base), body)


def _revive(base: type[nn.Module], make_forward: MakeForward) -> nn.Module:
    cls = _subclass(base, make_forward)  # type: ignore[arg-type]
    return cls.__new__(cls)


def give_forward(module: nn.Module, make_forward: MakeForward) -> None:
    """Give a module another forward, in place; its class is one of the same name from now on.

    Args:
        module: the module.
        make_forward: a function of an importable module, so that pickles of the module find it.
    """
    module.__class__ = _subclass(type(module), make_forward)  # type: ignore[arg-type]
