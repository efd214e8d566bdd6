"""A rank that skips a step would train other parameters than the rest from then on; the next reduction tells."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import vescale_comm as vc
from vescale_comm.emulator import emulate


def train(rank: int, skips: dict[int, int], steps: int, kind: str) -> dict[int, str]:
    """Train, and return the errors by the number of the step whose backward raised them.

    Args:
        skips: rank that skips the step, by number; 2: both do.
    """
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model = vc.replicate(model) if kind == "hooks" else vc.DistributedDataParallel(model)
    if rank == 0:
        model(torch.ones(1, 2))  # what happens before the first reduction is not compared
        with torch.no_grad():
            model.get_parameter("0.bias" if kind == "hooks" else "module.0.bias").add_(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = {}
    for number in range(steps):
        with vc.no_sync(model):
            model(torch.ones(1, 2) * (rank + 1)).sum().backward()
        try:
            model(torch.ones(1, 2) * (rank + 1)).sum().backward()
        except vc.MismatchError as error:
            found[number] = str(error)
            if any(parameter.grad is not None for parameter in model.parameters()):
                found[-1] = "gradients were not dropped"
        if skips.get(number) not in (rank, 2):
            optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("kind", ["hooks", "wrapper"])
@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("who", [0, 1])
def test_a_step_that_one_rank_skips_is_told_by_the_next_reduction(kind: str, step: int, who: int) -> None:
    for errors in emulate(train, 2, args=({step: who}, 5, kind)):
        assert list(errors) == [step + 1]
        assert f"updated on rank {1 - who}, but not on rank {who}," in errors[step + 1]


def test_steps_that_all_ranks_skip_are_no_error() -> None:
    assert emulate(train, 2, args=({0: 2, 2: 2}, 4, "hooks")) == [{}, {}]
