"""Operands that were cast before are cast no more: what the quick way with kept casts must not miss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vescale_dtensor import DTensor, Replicate, Shard, distribute_tensor, explain
from vescale_testing import cached_mesh

RANKS = pytest.mark.ranks(4, pool=True)


def operands() -> tuple[list[Tensor], list[Any]]:
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(s, generator=generator, dtype=torch.float64) for s in ((8, 4), (4, 4), (4,))]
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    placements = [[Shard(0), Replicate()], [Replicate()] * 2, [Replicate()] * 2]
    ours = [distribute_tensor(t, mesh, p).requires_grad_() for t, p in zip(plain, placements, strict=True)]
    return [t.requires_grad_() for t in plain], ours


def compare(plain: list[Tensor], ours: list[Any]) -> None:
    for a, b in zip(plain, ours, strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(b.grad.full_tensor(), a.grad, rtol=1e-12, atol=1e-12)
            a.grad = b.grad = None


@RANKS
def test_kept_casts_are_shared_until_their_gradients_came() -> None:
    plain, (x, w, b) = operands()
    for _ in range(2):
        y = F.linear(x, w, b)
        kept = {id(c) for t in (w, b) for c, _ in t.__dict__["_casts"].values()}
        z = F.linear(y, w, b)
        assert kept == {id(c) for t in (w, b) for c, _ in t.__dict__["_casts"].values()}
        z.square().sum().backward()
        assert not any("_casts" in t.__dict__ for t in (w, b))
        F.linear(F.linear(*plain), *plain[1:]).square().sum().backward()
        compare(plain, [x, w, b])


@RANKS
def test_operands_that_changed_are_cast_anew() -> None:
    plain, ours = operands()
    results = []
    for x, w, b in (plain, ours):
        v = b * 1
        y = F.linear(x, w, v)
        v.mul_(2)  # another value, with another gradient
        y = F.linear(y, w, v)
        w.requires_grad_(False)
        y = F.linear(y, w, b)  # the cast that is kept would want a gradient
        w.requires_grad_(True)
        with torch.no_grad():
            assert not F.linear(x, w, b).requires_grad
        y.square().sum().backward()
        results.append(y)
    torch.testing.assert_close(results[1].full_tensor(), results[0], rtol=1e-12, atol=1e-12)
    compare(plain, ours)


@RANKS
def test_a_frozen_operand_gets_no_gradient_though_its_cast_is_kept() -> None:
    _, (x, w, b) = operands()
    F.linear(x, w, b)  # no backward: the casts stay
    x, w = x.detach(), w.requires_grad_(False)
    F.linear(x, w, b).sum().backward()
    assert w.grad is None
    assert b.grad is not None


@RANKS
def test_plain_numbers_take_part() -> None:
    plain, ours = operands()
    for x, w, _ in (plain, ours):
        for _ in range(2):
            (x * torch.tensor(2.0, dtype=torch.float64) @ w + w.sum()).square().sum().backward()
    compare(plain, ours)


@RANKS
def test_double_backward_and_hooks() -> None:
    plain, ours = operands()
    for x, w, b in (plain, ours):
        seen: list[Any] = []
        w.register_hook(lambda g, seen=seen: seen.append(g))
        y = F.linear(torch.tanh(F.linear(x, w, b)), w, b)
        grads = torch.autograd.grad(y.square().sum(), [w, b], create_graph=True)
        sum(g.square().sum() for g in grads).backward()
        assert all(isinstance(g, DTensor) == isinstance(w, DTensor) for g in seen)
        assert len(seen) == 2
    compare(plain, ours)


@RANKS
def test_modes_and_explain_see_what_they_saw() -> None:
    _, (x, w, b) = operands()

    class Names(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(func.__name__)
            return func(*args, **kwargs or {})

    F.linear(x, w, b)
    with Names() as mode:
        y = F.linear(x, w, b)
    assert mode.names == ["linear"]
    with explain() as seen:
        F.linear(y, w, b).square().sum().backward()
    assert {r.phase for r in seen.records} >= {"backward"}
