"""Where in the user's code something happens."""

from __future__ import annotations

import sys
from pathlib import Path as FilePath

import torch
import torch.utils.checkpoint

__all__ = ["place", "within_checkpoint"]

_OURS = str(FilePath(__file__).parent)
_TORCH = str(FilePath(torch.__file__).parent)
_CHECKPOINT = torch.utils.checkpoint.__file__


def within_checkpoint() -> bool:
    """Return whether a function of torch.utils.checkpoint is being called."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _CHECKPOINT:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def place() -> str:
    """Return where in the user's code we are."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((_OURS, _TORCH)) and not path.startswith("<"):
            return f"{FilePath(path).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "the model itself"
