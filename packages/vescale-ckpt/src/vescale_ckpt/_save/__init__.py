"""Saving: plan, stage, write, commit. save.py has the public functions; finish.py what happens in the background."""

from .handle import Progress, SaveHandle, SaveInfo
from .running import wait_for
from .save import async_save, save
from .staging import StagingPool, parse_bytes

__all__ = [
    "Progress",
    "SaveHandle",
    "SaveInfo",
    "StagingPool",
    "async_save",
    "parse_bytes",
    "save",
    "wait_for",
]
