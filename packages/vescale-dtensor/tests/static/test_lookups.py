"""Tables of positions: when they are cast in place of their rows, with the bits of the dynamic path."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_dtensor import Shard, explain, parallelize_module, static
from vescale_dtensor._comm import ranked
from vescale_testing import cached_mesh

Look = Callable[["Net", Tensor], Tensor]
WIDTH, LENGTH = 8, 6


class Net(nn.Module):
    """Features and the positions' rows, which `look` takes from a table."""

    def __init__(self, look: Look, rows: int = LENGTH) -> None:
        super().__init__()
        self.look = look
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(rows, WIDTH))

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        rows = self.look(self, y)
        loss = self.head(torch.tanh(y + rows)).square().mean()
        return (loss, rows) if self.look is returned else loss


def arranged(net: Net, y: Tensor) -> Tensor:
    return F.embedding(torch.arange(y.shape[1]), net.table)


def shuffled(net: Net, y: Tensor) -> Tensor:
    return F.embedding(torch.arange(y.shape[1]).flip(0).view(1, -1), net.table, padding_idx=2)


def repeated(net: Net, y: Tensor) -> Tensor:
    return F.embedding(torch.arange(y.shape[1]) // 2, net.table)


def tied(net: Net, y: Tensor) -> Tensor:
    return F.embedding(torch.arange(y.shape[1]), net.table) + (y @ net.table.T)[..., :1]


def twice(net: Net, y: Tensor) -> Tensor:
    rows = F.embedding(torch.arange(y.shape[1]), net.table)
    return rows * y + rows.sum()


def returned(net: Net, y: Tensor) -> Tensor:
    return F.embedding(torch.arange(y.shape[1]), net.table)


def of_the_input(net: Net, y: Tensor) -> Tensor:
    return F.embedding((y.sum((0, 2)) * 0).long() + torch.arange(y.shape[1]), net.table)


def nets(look: Look, shape: tuple[int, int], rows: int = LENGTH, cut: bool = False) -> list[nn.Module]:
    mesh = cached_mesh(*shape, names=("dp", "tp"))
    torch.manual_seed(0)
    net = Net(look, rows)
    plan: dict[str, Any] = {"forward": {"input": {"dp": Shard(0)}}}
    if cut:
        plan["parameter"] = {"table": {"tp": Shard(1)}}
    return [parallelize_module(copy.deepcopy(net), mesh, plan) for _ in range(2)]


def batch(number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, LENGTH, WIDTH, generator=generator) * torch.logspace(-3, 3, 4)[:, None, None]


def loss_of(net: nn.Module, number: int) -> Tensor:
    made = net(batch(number))
    loss: Tensor = made[0] if isinstance(made, tuple) else made
    return loss


def check(dynamic: nn.Module, fixed: nn.Module) -> int:
    """Compare some steps; returns how many messages the backward of the static one sends."""
    for number in range(4):
        for net in (dynamic, fixed):
            loss_of(net, number).backward()
            if number == 3:  # gradients add up, and calls share a backward
                (loss_of(net, 4) + loss_of(net, 5)).backward()
        for (name, one), other in zip(dynamic.named_parameters(), fixed.parameters(), strict=True):
            wanted, found = one.grad.full_tensor(), other.grad.full_tensor()
            assert torch.equal(wanted, found), name
            one.grad = other.grad = None
    with explain() as seen:
        loss_of(fixed, 0).backward()
    return sum(record.phase == "backward" for record in seen.records)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("look", [arranged, shuffled], ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape", [(4, 1), (2, 2)], ids=str)
def test_the_gradient_of_a_table_travels_with_the_others(look: Look, shape: tuple[int, int]) -> None:
    dynamic, fixed = nets(look, shape)
    static(fixed)
    assert check(dynamic, fixed) == 1
    assert "of 5 parameters" in fixed.static_code()


@pytest.mark.ranks(4, pool=True)
def test_a_table_may_be_cut_over_other_axes() -> None:
    dynamic, fixed = nets(arranged, (2, 2), cut=True)
    static(fixed)
    check(dynamic, fixed)
    assert "of 5 parameters" in fixed.static_code()


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("look", [repeated, tied, twice, returned, of_the_input], ids=lambda f: f.__name__)
def test_rows_stay_where_their_sum_is_another(look: Look) -> None:
    dynamic, fixed = nets(look, (4, 1))
    static(fixed)
    check(dynamic, fixed)
    assert "def program" in fixed.static_code()
    assert "of 5 parameters" not in fixed.static_code()


@pytest.mark.ranks(4, pool=True)
def test_rows_stay_where_the_table_is_much_larger() -> None:
    dynamic, fixed = nets(arranged, (4, 1), rows=5 * LENGTH)
    static(fixed)
    assert check(dynamic, fixed) == 2
    assert "of 4 parameters" in fixed.static_code()


@pytest.mark.ranks(4, pool=True)
def test_rows_stay_where_an_all_reduce_adds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on more than two ranks without gloo, or with many rows, unless nobody minds the order."""
    monkeypatch.setattr(ranked, "WHOLE_BYTES", 0)
    dynamic, fixed = nets(arranged, (4, 1))
    static(fixed)
    check(dynamic, fixed)
    assert "of 4 parameters" in fixed.static_code()
    _, loose = nets(arranged, (4, 1))
    static(loose, exact=False)
    for _ in range(3):
        loss_of(loose, 0).backward()
    assert "of 5 parameters" in loose.static_code()


@pytest.mark.ranks(2, pool=True)
def test_a_frozen_table_stays() -> None:
    dynamic, fixed = nets(arranged, (2, 1))
    for net in (dynamic, fixed):
        net.table.requires_grad_(False)  # type: ignore[union-attr, operator]
    static(fixed)
    for number in range(4):
        for net in (dynamic, fixed):
            net.zero_grad()
            loss_of(net, number).backward()
        for one, other in zip(dynamic.parameters(), fixed.parameters(), strict=True):
            assert one.grad is other.grad is None or torch.equal(one.grad.full_tensor(), other.grad.full_tensor())
    assert "of 4 parameters" in fixed.static_code()
