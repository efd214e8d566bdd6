"""Who draws: torch's default generator, a generator that was given, or a sampler, given or of the block around."""

from __future__ import annotations

from typing import Any

import torch

from .mode import active_sampler, is_default
from .source import Sampler

__all__ = ["default_generator", "who_draws"]


def who_draws(generator: Any) -> torch.Generator | Sampler | None:
    """Return what a call draws from that was given `generator`; None for torch's default generator.

    To give the default generator is to give none: within `portable` and `emulate_cuda` their samplers draw then.

    Args:
        generator: a `torch.Generator`, a sampler, or None.

    Raises:
        TypeError: for anything else.

    >>> who_draws(None), who_draws(torch.default_generator)
    (None, None)
    """
    if generator is None:
        return active_sampler()
    if isinstance(generator, torch.Generator):
        return active_sampler() if is_default(generator) else generator
    if not (hasattr(generator, "source") and hasattr(generator, "restore")):
        raise TypeError(
            "generator: expected a torch.Generator, or a PortableGenerator or EmulatedGenerator of vescale_rng, got "
            f"{generator!r} ({type(generator).__name__})"
        )
    sampler: Sampler = generator
    return sampler


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that torch itself uses on a device.

    Raises:
        ValueError: if this torch has no generator for it.
    """
    if device.type == "cpu":
        return torch.default_generator
    module = getattr(torch, device.type, None)
    if module is None or not hasattr(module, "default_generators"):
        raise ValueError(f"device = {str(device)!r} has no random generator in this torch; give the generator itself")
    if not module.is_available():
        raise ValueError(f"device = {str(device)!r}: this torch sees no such device")
    module.init()
    index = device.index if device.index is not None else module.current_device()
    return module.default_generators[index]  # type: ignore[no-any-return]
