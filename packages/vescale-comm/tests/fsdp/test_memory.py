"""What is kept between steps and at the worst moment of a step, in bytes of parameters and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_comm._fsdp import fully_shard
from vescale_comm._fsdp.flat import Flat
from vescale_comm._fsdp.gradients import Gradients
from vescale_comm._fsdp.shard import engine_of
from vescale_comm._plan import Rows
from vescale_comm.emulator import emulate
from vescale_testing import fake_ranks

WIDTH, BLOCKS, WORLD = 64, 6, 4


class Peak:
    """Adds up the buffers of a module whenever one of them grows."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.units = engine_of(model).units
        self.parameters = self.gradients = self.together = 0
        for cls, name in ((Flat, "gather"), (Gradients, "take"), (Gradients, "launch")):
            monkeypatch.setattr(cls, name, self._measured(getattr(cls, name)))

    def _measured(self, function: Any) -> Any:
        def measured(*args: Any) -> Any:
            result = function(*args)
            self.look()
            return result

        return measured

    def look(self) -> None:
        whole = sum(flat.whole.untyped_storage().nbytes() for unit in self.units for flat in unit.flats)
        held = sum(
            buffer.nbytes
            for unit in self.units
            for gradients in unit.gradients
            for buffer in (gradients.buffer, gradients._in_flight)
            if buffer is not None
        )
        self.parameters, self.gradients = max(self.parameters, whole), max(self.gradients, held)
        self.together = max(self.together, whole + held)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def test_the_worst_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = WIDTH * WIDTH * 4

    def on_rank(rank: int) -> None:
        model = fully_shard(Chain())
        peak = Peak(model, monkeypatch) if rank == 0 else None
        assert sum(parameter.nbytes for parameter in model.parameters()) == BLOCKS * unit // WORLD
        for _ in range(3):
            model.zero_grad()
            loss = model(torch.ones(2, WIDTH)).sum()
            if peak is not None:
                # The last unit stays for backward, which begins with it.
                assert sum(flat.whole.untyped_storage().nbytes() for u in peak.units for flat in u.flats) == unit
            loss.backward()
            assert sum(parameter.grad.nbytes for parameter in model.parameters()) == BLOCKS * unit // WORLD
            for one in engine_of(model).units:
                assert all(not flat.whole.untyped_storage().nbytes() for flat in one.flats)
                assert all(gradients.buffer is None and gradients._in_flight is None for gradients in one.gradients)
        if peak is not None:
            assert peak.parameters == 2 * unit, "one unit in use and one ahead"
            assert peak.gradients == 2 * unit, "one that comes in and one that is sent"
            assert peak.together <= 4 * unit

    emulate(on_rank, WORLD, "canonical")


def test_without_prefetch_one_unit_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_rank(rank: int) -> None:
        model = fully_shard(Chain(), prefetch=0)
        peak = Peak(model, monkeypatch) if rank == 0 else None
        for _ in range(2):
            model(torch.ones(2, WIDTH)).sum().backward()
        if peak is not None:
            assert peak.parameters == WIDTH * WIDTH * 4

    emulate(on_rank, WORLD, "canonical")


@pytest.mark.parametrize("rank", [0, 700, 1023])
def test_a_thousand_ranks(rank: int) -> None:
    with fake_ranks(1024, rank=rank):
        model = fully_shard(Chain(), granularity=Rows(1))
        for _ in range(2):
            model(torch.ones(2, WIDTH)).sum().backward()
        rows = [(parameter.vescale.start, parameter.vescale.stop) for parameter in model.parameters()]
        # Each matrix has 64 rows, on the first 64 ranks.
        assert rows == [(WIDTH * rank, WIDTH * (rank + 1)) if rank < WIDTH else (0, 0)] * BLOCKS
        assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())


def test_an_evaluation_keeps_nothing() -> None:
    def on_rank(rank: int) -> None:
        for keep in (True, False):
            model = fully_shard(Chain(), reshard_after_forward=not keep)
            with torch.no_grad():
                model(torch.ones(2, WIDTH))
            units = engine_of(model).units
            assert all(not flat.whole.untyped_storage().nbytes() for unit in units for flat in unit.flats)

    emulate(on_rank, 2, "canonical")
