"""Pins are files in the folder of a step."""

from __future__ import annotations

import pytest
import torch

import vescale_ckpt as ck
from vescale_ckpt.testing import MemoryStorage


def pinned(store: MemoryStorage) -> list[int]:
    return [info.step for info in ck._ops.steps(store).steps if info.pinned]


def test_pin_and_unpin() -> None:
    store = MemoryStorage()
    for step in (1, 2):
        ck.save(store, {"w": torch.ones(100) * step}, step=step)
    assert ck.pin(store) == 2
    assert ck.pin(store, 1) == 1
    assert ck.pin(store, 1) == 1
    assert pinned(store) == [1, 2]
    assert ck.unpin(store, 2) == 2
    assert ck.unpin(store, 2) == 2
    assert pinned(store) == [1]
    assert ck.load_dict(store, step=1)["w"][0] == 1


def test_a_step_that_is_not_there_or_is_going() -> None:
    store = MemoryStorage()
    with pytest.raises(ck.MissingStepError):
        ck.pin(store)
    folder = ck.save(store, {"w": 1}, step=5).folder
    store.put(f"{folder}/REMOVED", b"")
    with pytest.raises(ck.MissingStepError, match="is being removed"):
        ck.pin(store, 5)
    assert pinned(store) == []
