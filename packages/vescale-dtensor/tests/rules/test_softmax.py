"""Softmax against one device, over whole and sharded dims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vescale_dtensor import distribute_tensor, implicit_communication
from vescale_testing import cached_mesh
from vescale_testing.oracle import all_codes, check_op, placements

CASES: dict[str, Callable[[Any], Any]] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "method": lambda x: x.softmax(0),
    "functional": lambda x: F.softmax(x, dim=1),
    "functional-dtype": lambda x: F.softmax(x, 1, dtype=torch.float64),
    "log": lambda x: F.log_softmax(x, dim=-1),
    "log-method": lambda x: x.log_softmax(0, torch.float64),
    "log-special": lambda x: torch.special.log_softmax(x, 1),
    "softmin": lambda x: F.softmin(x, dim=0),
    "large": lambda x: (x * 500).softmax(0),
    "masked": lambda x: torch.where(x > 1, -torch.inf, x).softmax(0),
    "module": lambda x: torch.nn.Softmax(dim=1)(x),
}


def data(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_softmax_equals_one_device(case: str, mesh_shape: tuple[int, ...]) -> None:
    mesh = cached_mesh(*mesh_shape)
    for shape in [(8, 5, 3), (3, 1, 6)]:
        codes = all_codes(3, len(mesh_shape), partial=True)
        for code in codes[:: len(mesh_shape) * 2 - 1]:
            check_op(CASES[case], [data(shape)], [code], mesh)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("fn", [torch.softmax, torch.log_softmax])
def test_vocabulary_stays_sharded(fn: Any) -> None:
    mesh = cached_mesh(2, 2)
    with implicit_communication("error"):
        for codes in ["S1 I", "S0 S1", "S1 S1", "I S1"]:
            result = check_op(lambda x: fn(x, 1), [data((6, 7))], [codes], mesh)
            assert result.placements == tuple(placements(codes))


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("fn", [torch.softmax, torch.log_softmax])
def test_second_derivative(fn: Any) -> None:
    mesh = cached_mesh(4)
    x = data((3, 6))

    def penalty(t: Any) -> Any:
        (g,) = torch.autograd.grad((fn(t, 1) ** 3).sum(), t, create_graph=True)
        return (g * g).sum()

    for code in ["S0", "S1", "R", "I"]:
        plain = x.clone().requires_grad_()
        ours = distribute_tensor(x, mesh, placements(code)).requires_grad_()
        (want,) = torch.autograd.grad(penalty(plain), plain)
        (got,) = torch.autograd.grad(penalty(ours), ours)
        torch.testing.assert_close(got.full_tensor(), want, rtol=1e-9, atol=1e-9)


@pytest.mark.ranks(4, pool=True)
def test_half_precision_is_computed_in_single() -> None:
    mesh = cached_mesh(4)
    x = data((3, 40)).bfloat16()
    for code in ["S0", "S1", "I"]:
        check_op(lambda t: t.softmax(1), [x], [code], mesh, rtol=1.6e-2, atol=1e-3)
        check_op(lambda t: F.log_softmax(t, 1, dtype=torch.float32), [x], [code], mesh, rtol=1.6e-2, atol=1e-3)


@pytest.mark.ranks(4, pool=True)
def test_missing_dim_is_left_to_torch() -> None:
    mesh = cached_mesh(4)
    x = data((4, 3))
    with pytest.warns(UserWarning, match="Implicit dimension choice"):
        check_op(F.softmax, [x], ["I"], mesh)
    with pytest.raises(IndexError, match="Dimension out of range"):
        distribute_tensor(x, mesh, placements("S0")).softmax(2)
