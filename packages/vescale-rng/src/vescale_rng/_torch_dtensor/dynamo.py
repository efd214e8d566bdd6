"""Keep torch.compile out of our functions.

Where a graph is broken, Dynamo goes on with the Python functions that run in between, and would look into the handlers
that torch calls there. They are marked as frames to run as they are, without loading Dynamo, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["run_as_it_is"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_eval_frame: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
_NEEDED = ("_FrameAction", "_FrameExecStrategy", "set_code_exec_strategy")


def run_as_it_is(function: _Function) -> _Function:
    """Mark a function, and what it calls, as not to be traced; calls of it cost no more than before.

    In a torch without such marks Dynamo reports an error of its own there: random operators are then for eager mode.
    """
    if all(hasattr(_eval_frame, name) for name in _NEEDED):
        skip = _eval_frame._FrameAction.SKIP
        _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, skip))
    # Where Dynamo is about to inline a call it looks at this instead.
    vars(function)["_torchdynamo_disable"] = True
    return function
