"""The example that trains a Mixtral with experts on several ranks beside its single-device twin."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[3] / "examples" / "mixtral"

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="the examples are in the repository only")


def script() -> Any:
    pytest.importorskip("transformers")
    sys.modules.pop("train", None)  # another example has one too
    sys.path.insert(0, str(FOLDER))
    try:
        import train as module  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("train", None)
    return module


@pytest.mark.ranks(2, timeout=200)
def test_losses_of_one_device_and_experts_that_move(rank: int) -> None:
    """Five experts on two ranks; after two steps some change ranks."""
    module = script()
    options = argparse.Namespace(
        mesh={"ep": 2}, steps=3, experts=5, move_every=2, seed=0, batch_size=4, learning_rate=1e-3
    )
    moves: list[int] = []
    step = module.ExpertsAllocator.step

    def counted(self: Any) -> Any:
        found = step(self)
        moves.extend(m.moved for m in found.values())
        return found

    module.ExpertsAllocator.step = counted
    try:
        assert module.train(options)
    finally:
        module.ExpertsAllocator.step = step
    assert sum(moves) > 0, "no expert moved: the case tests half of the script"


@pytest.mark.parametrize("mesh", ["dp=2", "ep=0", "tp=2,ep=2", "ep=2,ep=2", "ep"])
def test_wrong_mesh_is_explained(mesh: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="dp=2,ep=2"):
        script().parse_mesh(mesh)
