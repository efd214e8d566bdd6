"""Storages for tests of what survives a crash: one in memory, and one that fails or dies where it is told to.

Run a program once around a FaultyStorage to count its operations, then once for each of them with a `Kill` there,
and look at what the inner storage holds: `FaultyStorage` has an example.
"""

from __future__ import annotations

from ._storage.faults import Fail, Fault, Kill, Killed, Operation, Plan, Slow, Tear, at, matching
from ._storage.faulty import FaultyStorage
from ._storage.memory import MemoryStorage

__all__ = [
    "Fail",
    "Fault",
    "FaultyStorage",
    "Kill",
    "Killed",
    "MemoryStorage",
    "Operation",
    "Plan",
    "Slow",
    "Tear",
    "at",
    "matching",
]
