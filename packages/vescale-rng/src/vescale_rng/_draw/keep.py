"""Remember where everything that may draw stands, to go back there: after an error, or to draw again as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .mode import active_sampler
from .who import default_generator, who_draws

__all__ = ["keep"]


def keep(device: torch.device, given: Any = None) -> Callable[[], None]:
    """Return a function that puts the default generator, the active sampler and a given one back to where they are now.

    Args:
        device: whose default generator is meant.
        given: a `torch.Generator` or a sampler of the caller, or None.

    Raises:
        TypeError: if `given` is none of them.

    >>> go_back = keep(torch.device("cpu"))
    >>> first = torch.rand(3)
    >>> go_back()
    >>> torch.equal(torch.rand(3), first)
    True
    """
    who_draws(given)  # refuses what is no generator
    used = [None if device.type == "meta" else default_generator(device), active_sampler(), given]
    kept: list[tuple[Any, Any]] = [
        (one, one.get_state() if isinstance(one, torch.Generator) else one.save()) for one in used if one is not None
    ]

    def go_back() -> None:
        for one, state in kept:
            if isinstance(one, torch.Generator):
                one.set_state(state)
            else:
                one.restore(state)

    return go_back
