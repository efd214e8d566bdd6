"""Compressors by name: those of this package, and those of plugins."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .._hooks import register_compressors
from .lowrank import PowerSGD
from .plain import Uncompressed
from .quantised import BlockInt8, HalfBfloat16, HalfFloat16
from .topk import TopK

__all__ = ["Registry", "compressor_named", "compressor_names", "registry"]


class Registry:
    """Factories by name; see `vescale_comm.hookspecs.CompressorRegistry`."""

    def __init__(self) -> None:
        self.factories: dict[str, Callable[..., Any]] = {}

    def register(self, name: str, factory: Callable[..., Any]) -> None:
        """Add a compressor under a name that is not taken yet.

        Args:
            name: what the user writes to choose it.
            factory: called once per bucket with plan, dtype and device, and the user's options by name; returns the
                compressor of that bucket.

        Raises:
            ValueError: the name is taken.
            TypeError: these are no name and no function.
        """
        if not (isinstance(name, str) and name and callable(factory)):
            raise TypeError(f"name, factory: a compressor needs a name and a function; got {name!r} and {factory!r}.")
        if name in self.factories:
            raise ValueError(
                f"name: the compressor {name!r} is registered as {self.factories[name]!r} already, so {factory!r} "
                "needs another name."
            )
        self.factories[name] = factory


@functools.cache
def registry() -> Registry:
    """Return the compressors that there are; plugins are asked once.

    Raises:
        ValueError: a plugin took a name twice.
    """
    found = Registry()
    found.register("none", Uncompressed)
    found.register("bf16", HalfBfloat16)
    found.register("fp16", HalfFloat16)
    found.register("int8", BlockInt8)
    found.register("powersgd", PowerSGD)
    found.register("topk", TopK)
    register_compressors(found)
    return found


def compressor_named(name: str) -> Callable[..., Any]:
    """Return the factory of a compressor.

    Raises:
        ValueError: there is none of this name.

    Example:
        >>> import torch
        >>> from vescale_comm import TensorSpec, plan_group
        >>> plan = plan_group([TensorSpec("w", (4, 4))], world=2)
        >>> compressor_named("int8")(plan, torch.float32, torch.device("cpu"), block=64).wire_bytes
        0
    """
    found = registry().factories.get(name)
    if found is None:
        raise ValueError(f"compressor: there is no {name!r}; there are {', '.join(compressor_names())}.")
    return found


def compressor_names() -> list[str]:
    """Return the names of all compressors.

    Example:
        >>> compressor_names()[:3]
        ['bf16', 'fp16', 'int8']
    """
    return sorted(registry().factories)
