"""Which sampler draws, if not torch's own generators: `emulate_cuda` and `portable` set it for a block.

Process-wide rather than per thread: a checkpointed forward may be recomputed by a thread of autograd.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from .source import Sampler

__all__ = ["active_sampler", "is_default", "use_sampler"]

_active: list[Sampler] = []


def active_sampler() -> Sampler | None:
    """Return the sampler of the innermost block, or None where torch's generators draw."""
    return _active[-1] if _active else None


@contextlib.contextmanager
def use_sampler(sampler: Sampler) -> Iterator[None]:
    """Let a sampler draw within a ``with`` block."""
    _active.append(sampler)
    try:
        yield
    finally:
        del _active[max(i for i, other in enumerate(_active) if other is sampler)]


def is_default(generator: Any) -> bool:
    """Tell whether a generator is what torch draws from where none is given: to give it is to give none.

    >>> is_default(torch.default_generator), is_default(torch.Generator()), is_default(None)
    (True, False, False)
    """
    if not isinstance(generator, torch.Generator):
        return False
    device = generator.device
    if device.type == "cpu":
        defaults: tuple[Any, ...] = (torch.default_generator,)
    else:
        defaults = tuple(getattr(getattr(torch, device.type, None), "default_generators", ()))
    # torch's dispatcher hands on other Python objects for the same generator.
    own: Any = generator
    return any(own._cdata == default._cdata for default in defaults)
