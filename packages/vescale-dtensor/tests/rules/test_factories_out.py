"""Factories with `out=`, and other functions that only have a DTensor to write to, against one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from vescale_dtensor import distribute_tensor, implicit_communication
from vescale_dtensor.errors import PlainTensorError
from vescale_testing import cached_mesh
from vescale_testing.oracle import compare, placements

CASES: dict[str, Callable[[Any], Any]] = {
    "zeros": lambda x: torch.zeros(5, 6, out=x),
    "ones-size": lambda x: torch.ones((5, 6), out=x),
    "full": lambda x: torch.full((5, 6), 3, out=x),
    "eye": lambda x: torch.eye(5, 6, out=x),
    "init.eye_": nn.init.eye_,
    "arange": lambda x: torch.arange(30, out=x),
    "arange-resized": lambda x: torch.arange(1.0, 4.0, 0.5, out=x),
    "linspace": lambda x: torch.linspace(0, 1, 30, out=x),
    "rand": lambda x: torch.rand(5, 6, out=x),
    "randn-generator": lambda x: torch.randn(5, 6, out=x, generator=torch.Generator().manual_seed(3)),
    "randint": lambda x: torch.randint(9, (5, 6), out=x),
    "randperm": lambda x: torch.randperm(7, out=x),
}


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("codes", ["S0 I", "S1 S0", "I I", "S0 S0"])
def test_out_equals_one_device(codes: str) -> None:
    mesh = cached_mesh(2, 2)
    for case, fill in CASES.items():
        single = torch.full((5, 6), -1.0, dtype=torch.float64)
        ours = distribute_tensor(single, mesh, placements(codes))
        torch.manual_seed(0)
        fill(single)
        torch.manual_seed(0)
        fill(ours)
        assert ours.shape == single.shape, case
        compare(ours, single, rtol=0, atol=0)


@pytest.mark.ranks(4, pool=True)
def test_out_of_functions_without_a_rule() -> None:
    mesh = cached_mesh(4)
    x = torch.arange(12.0).view(4, 3)
    values, positions = torch.empty(4), torch.empty(4, dtype=torch.long)
    ours = [distribute_tensor(t, mesh, placements("S0")) for t in (x, values, positions)]
    with implicit_communication("allow"):
        torch.kthvalue(x, 2, out=(values, positions))
        torch.kthvalue(ours[0], 2, out=(ours[1], ours[2]))
        compare(ours[1], values)
        compare(ours[2], positions)
        whole = torch.linalg.matrix_power(x[:3], 2)
        torch.linalg.matrix_power(distribute_tensor(x[:3], mesh, placements("S1")), 2, out=ours[0])
    compare(ours[0], whole)
    with pytest.raises(PlainTensorError, match=r"out= got a plain tensor of shape \[4, 3\]"):
        torch.tril(x, out=ours[0])
