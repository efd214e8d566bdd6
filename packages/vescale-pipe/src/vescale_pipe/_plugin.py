"""What vescale_pipe gives to its siblings: the recorder of its timelines.

The function imports on call: this module is loaded at the first hook call of any host.
"""

from __future__ import annotations

from typing import Any

import pluggy

for_dtensor = pluggy.HookimplMarker("vescale_dtensor")
for_comm = pluggy.HookimplMarker("vescale_comm")
for_ckpt = pluggy.HookimplMarker("vescale_ckpt")


@for_dtensor
@for_comm
@for_ckpt
def vescale_timeline() -> Any:
    """Return the recorder of this process.

    Not None even while nothing is recorded: hosts ask once and keep the answer, and it costs them one test then.
    """
    from ._timeline.recorder import recorder

    return recorder
