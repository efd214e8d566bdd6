"""What vescale_rng gives to its siblings: `vescale_random` for vescale_dtensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from ._provider import Provider

_for_dtensor = pluggy.HookimplMarker("vescale_dtensor")


@_for_dtensor
def vescale_random() -> Provider:
    """Hand out the object that draws random numbers for sharded tensors as one device would."""
    from ._provider import Provider

    return Provider()
