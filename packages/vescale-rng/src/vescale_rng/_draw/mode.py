"""Which sampler draws, if not torch's own generators: `emulate_cuda` and `portable` set it for a block.

Process-wide rather than per thread: a checkpointed forward may be recomputed by a thread of autograd.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from .source import Sampler

__all__ = ["active_sampler", "use_sampler"]

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
