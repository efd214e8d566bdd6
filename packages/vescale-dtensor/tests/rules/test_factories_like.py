"""`zeros_like`, `new_zeros` and their kind: shapes, dtypes, and placements of what they make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vescale_dtensor import Replicate, Shard, Varying, distribute_tensor
from vescale_dtensor.errors import UnsupportedOperationError
from vescale_testing import cached_mesh
from vescale_testing.oracle import all_codes, check_op, compare, placements

CASES: dict[str, Callable[[Any], Any]] = {
    "zeros_like": lambda x: torch.zeros_like(x),
    "zeros_like-dtype": lambda x: torch.zeros_like(x, dtype=torch.int32),
    "ones_like": lambda x: torch.ones_like(x),
    "ones_like-bool": lambda x: torch.ones_like(x, dtype=torch.bool),
    "full_like": lambda x: torch.full_like(x, 3),
    "full_like-other": lambda x: torch.full_like(x, 2.5),
    "empty_like": lambda x: torch.empty_like(x).fill_(1),
    "new_zeros": lambda x: x.new_zeros(3, 2),
    "new_ones": lambda x: x.new_ones((5,), dtype=torch.int64),
    "new_full": lambda x: x.new_full((2, 2), 7),
    "new_empty": lambda x: x.new_empty((4,)).fill_(2),
    "new_tensor": lambda x: x.new_tensor([1, 2, 3]),
    "new": lambda x: x.new(torch.Size((2, 3))).fill_(2),
    "new-sizes": lambda x: x.new(2, 3).fill_(2),
}


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("case", CASES)
def test_equals_one_device(case: str) -> None:
    x = torch.randn(5, 4, dtype=torch.float64)
    for code in all_codes(2, 2, partial=True):
        check_op(CASES[case], [x], [code], cached_mesh(2, 2))


@pytest.mark.ranks(4, pool=True)
def test_placements() -> None:
    x = torch.randn(4, 4, dtype=torch.float64)
    for code, wanted in (("S0 R", "S0 I"), ("P S1", "I S1"), ("R P", "I I")):
        y = torch.ones_like(distribute_tensor(x, cached_mesh(2, 2), placements(code)))
        assert [type(p) for p in y.placements] == [type(p) for p in placements(wanted)]
        assert not any(isinstance(p, Varying) for p in y.placements)
        compare(y, torch.ones_like(x))
        assert list(distribute_tensor(x, cached_mesh(2, 2), placements(code)).new_zeros(2).placements) == [
            Replicate(),
            Replicate(),
        ]


@pytest.mark.ranks(4, pool=True)
def test_requires_grad_and_data() -> None:
    x = distribute_tensor(torch.randn(4, 4), cached_mesh(4), [Shard(0)])
    assert torch.zeros_like(x, requires_grad=True).is_leaf
    with pytest.raises(UnsupportedOperationError, match="clone"):
        x.new_tensor(x)
