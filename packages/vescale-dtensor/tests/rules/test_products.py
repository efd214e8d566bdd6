"""Products under other names than `matmul` against one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vescale_dtensor import implicit_communication
from vescale_testing import cached_mesh
from vescale_testing.oracle import check_op, random_codes


def _values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


CASES: dict[str, tuple[Callable[..., Any], list[torch.Tensor], list[str], str]] = {
    # function, operands, placements under which nothing is gathered, type of the result
    "tensordot": (torch.tensordot, [_values(5, 4, 6), _values(4, 6, 3)], ["S0", "I"], "S"),
    "tensordot-lists": (
        lambda a, b: torch.tensordot(a, b, dims=([2, 0], [1, 0])),
        [_values(5, 4, 6), _values(5, 6, 3)],
        ["S2", "S1"],
        "P",
    ),
    "tensordot-none": (lambda a, b: torch.tensordot(a, b, 0), [_values(5, 2), _values(3)], ["S0", "I"], "S"),
    "inner": (torch.inner, [_values(5, 4), _values(3, 4)], ["S1", "S1"], "P"),
    "vdot": (torch.vdot, [_values(6), _values(6)], ["S0", "S0"], "P"),
    "vecdot": (torch.linalg.vecdot, [_values(5, 4), _values(5, 4)], ["S0", "S0"], "S"),
    "vecdot-dim": (lambda a, b: torch.linalg.vecdot(a, b, dim=0), [_values(5, 4), _values(5, 4)], ["S0", "S0"], "P"),
    "multi_dot": (
        lambda *x: torch.linalg.multi_dot(x),
        [_values(5, 4), _values(4, 3), _values(3, 6)],
        ["S0", "I", "I"],
        "S",
    ),
    "multi_dot-vectors": (
        lambda *x: torch.linalg.multi_dot(x),
        [_values(4), _values(4, 3), _values(3)],
        ["S0", "S0", "I"],
        "P",
    ),
    "kron": (torch.kron, [_values(4, 3), _values(2, 5)], ["S0", "I"], "S"),
    "kron-right": (torch.kron, [_values(1, 3), _values(5, 2)], ["I", "S0"], "S"),
    "kron-dims": (torch.kron, [_values(4), _values(2, 5)], ["S0", "I"], "S"),
    "bilinear": (
        F.bilinear,
        [_values(5, 4), _values(5, 3), _values(6, 4, 3), _values(6)],
        ["S0", "S0", "I", "I"],
        "S",
    ),
    "bilinear-columns": (
        F.bilinear,
        [_values(5, 4), _values(5, 3), _values(8, 4, 3), _values(8)],
        ["I", "I", "S0", "S0"],
        "S",
    ),
}


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("name", CASES)
def test_product(name: str) -> None:
    fn, args, codes, kind = CASES[name]
    with implicit_communication("error"):
        (placement,) = check_op(fn, args, codes, cached_mesh(4)).placements
        assert placement.is_partial() if kind == "P" else placement.is_shard()
    with implicit_communication("allow"):
        for drawn in random_codes(args, 2, seed=len(name), count=6):
            check_op(fn, args, drawn, cached_mesh(2, 2))


@pytest.mark.ranks(4, pool=True)
def test_uneven_blocks_of_kron_are_moved() -> None:
    with implicit_communication("allow"):
        check_op(torch.kron, [_values(5, 3), _values(2, 2)], ["S0", "I"], cached_mesh(4))
