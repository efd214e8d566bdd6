"""Objects of all ranks, where numpy is not installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vescale_comm import emulator
from vescale_comm._objects import gather_objects


def _no_numpy(*_: Any) -> None:
    raise RuntimeError("Numpy is not available")


@pytest.mark.ranks(2, pool=True)
def test_objects_of_ranks(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "numpy", _no_numpy)  # what torch says after `pip install torch`
    found = gather_objects([rank, torch.full((rank * 500,), float(rank))])
    assert [number for number, _ in found] == [0, 1]
    assert [held.tolist() for _, held in found] == [[], [1.0] * 500]


def test_objects_of_emulated_ranks() -> None:
    assert emulator.emulate(lambda rank: gather_objects("r" * rank), 3) == [["", "r", "rr"]] * 3
