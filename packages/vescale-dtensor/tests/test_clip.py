"""Gradient clipping against one device, and its number of collectives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from vescale_dtensor import DTensor, distribute_tensor, implicit_communication
from vescale_dtensor._comm.record import listeners
from vescale_testing import cached_mesh
from vescale_testing.oracle import placements

CODES = ["S0 I", "I S1", "S0 S0", "R R", "S0 R", "I I", "I S0", "I S1"]
SHAPES = [(8, 6), (5, 3), (6,), (3, 1), (7, 5), (4,), (9, 2), (2, 7)]


def _parameters() -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    mesh = cached_mesh(2, 2)
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES]
    plain = [nn.Parameter(v.clone()) for v in values]
    ours = [nn.Parameter(distribute_tensor(v, mesh, placements(c))) for v, c in zip(values, CODES, strict=True)]
    for parameters in (plain, ours):
        sum((p.pow(3).sum() for p in parameters), start=torch.zeros((), dtype=torch.float64)).backward()
    return plain, ours


def _same(ours: Any, plain: Any) -> None:
    for o, p in zip(ours, plain, strict=True):
        torch.testing.assert_close(o.grad.full_tensor(), p.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, math.inf, -math.inf, 0.0, "inf"])
def test_clip_grad_norm(order: Any, foreach: bool | None) -> None:
    with implicit_communication("error"):
        plain, ours = _parameters()
        specs = [p.grad._spec for p in ours]
        want = nn.utils.clip_grad_norm_(plain, 0.1, order, foreach=foreach)
        seen: list[Any] = []
        listeners.append(seen.append)
        try:
            got = nn.utils.clip_grad_norm_(ours, 0.1, order, foreach=foreach)
        finally:
            listeners.clear()
    assert isinstance(got, DTensor)
    torch.testing.assert_close(got.full_tensor(), want, rtol=1e-10, atol=1e-10)
    _same(ours, plain)
    assert [p.grad._spec for p in ours] == specs
    assert len(seen) <= 5, seen  # kinds of layouts, not parameters


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("foreach", [None, True, False])
def test_clip_by_value_total_norm_and_given_norm(foreach: bool | None) -> None:
    with implicit_communication("error"):
        plain, ours = _parameters()
        specs = [p.grad._spec for p in ours]
        nn.utils.clip_grad_value_(plain, 0.2, foreach=foreach)
        nn.utils.clip_grad_value_(ours, 0.2, foreach=foreach)
        _same(ours, plain)
        assert [p.grad._spec for p in ours] == specs
        total = nn.utils.get_total_norm([p.grad for p in ours], foreach=foreach)
        torch.testing.assert_close(total.full_tensor(), nn.utils.get_total_norm([p.grad for p in plain]))
        nn.utils.clip_grads_with_norm_(plain, 0.01, total.full_tensor(), foreach=foreach)
        nn.utils.clip_grads_with_norm_(ours, 0.01, total, foreach=foreach)
        _same(ours, plain)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("foreach", [None, False])
def test_error_if_nonfinite(foreach: bool | None) -> None:
    _, ours = _parameters()
    with torch.no_grad():
        local = ours[0].grad.to_local()
        if cached_mesh(2, 2).get_coordinate()[0] == 1:  # type: ignore[index]
            local[0, 0] = math.nan
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(ours, 0.1, error_if_nonfinite=True, foreach=foreach)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("foreach", [None, False])
def test_accumulation_goes_on_after_clipping(foreach: bool | None) -> None:
    plain, ours = _parameters()
    for parameters in (plain, ours):
        nn.utils.clip_grad_value_(parameters, 0.2, foreach=foreach)
        sum((p.pow(2).sum() for p in parameters), start=torch.zeros((), dtype=torch.float64)).backward()
    _same(ours, plain)
