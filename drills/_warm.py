"""Imported by the server that savers are forked from: what only the first save and load of a process cost is done here.

It leaves no thread behind, so forks are safe.
"""

from __future__ import annotations

import _saver  # noqa: F401 - so that a fork has it
import torch
from _values import state_of

import vescale_ckpt as ck
from vescale_ckpt.testing import MemoryStorage

torch.set_num_threads(1)
store = MemoryStorage()
for options in ({}, {"compress": "auto"}, {"dedup": "content"}, {"layout": "plain"}):
    ck.save(store, state_of(0, 0, lambda _, whole: whole, ck.local, 0), **options)  # type: ignore[arg-type]
    ck.load(store, state_of(0, 1, lambda _, whole: whole, ck.local, 0))
del store
