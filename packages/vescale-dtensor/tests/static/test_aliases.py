"""Second objects for one value, in programs: kept where the order of sums depends on them, else left out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vescale_dtensor import DTensor, Shard, distribute_tensor, static
from vescale_testing import cached_mesh


def twice(x: DTensor) -> Tensor:
    y = x * 1
    local = y.to_local()
    return (local * 3).sum() + (local * 7).sum()


def thrice(x: DTensor) -> Tensor:
    y = x * 1
    local = y.to_local()
    return (local * 3e-8).sum() + (y * 1).to_local().sum() + (local * -1).sum() + (y * 3e-8).to_local().sum()


def without_gradients(x: DTensor) -> Tensor:
    with torch.no_grad():
        local = x.to_local()
    return (x.to_local() * local).sum()


@pytest.mark.ranks(2, pool=True)
def test_gradients_have_the_bits_of_the_dynamic_path() -> None:
    mesh = cached_mesh(2, names=("tp",))
    start = torch.arange(1.0, 9.0)
    for function, kept in ((twice, 0), (thrice, 1), (without_gradients, 1)):
        fixed = static(function)
        for _ in range(4):
            gradients = []
            for run in (function, fixed):
                x = distribute_tensor(start, mesh, [Shard(0)]).requires_grad_()
                run(x).backward()
                gradients.append(x.grad.to_local())
            assert torch.equal(*gradients)
        code = fixed.static_code()
        assert "def program" in code
        assert code.count("= plain(") >= kept
        assert kept or "= plain(" not in code
