"""Moves of programs: what the moves of DTensors do, forward, backward, twice backward, and to what is written to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vescale_dtensor import DTensor, Partial, Replicate, Shard, Varying, distribute_tensor, static
from vescale_dtensor._comm.move import move
from vescale_dtensor._comm.plan import plan
from vescale_dtensor._static.moves import shift
from vescale_dtensor.placements import to_axis_types
from vescale_testing import cached_mesh

PLACEMENTS = {"I": Replicate(), "R": Varying(), "P": Partial(), "S0": Shard(0), "S1": Shard(1)}
PAIRS = [(a, b) for a in PLACEMENTS for b in PLACEMENTS if a != b]


def source(name: str) -> DTensor:
    mesh = cached_mesh(2, names=("tp",))
    torch.manual_seed(0)
    x = distribute_tensor(torch.randn(4, 6, dtype=torch.float64), mesh, [Replicate()])
    return x.redistribute(placements=[PLACEMENTS[name]]).detach().requires_grad_()


@pytest.mark.ranks(2, pool=True)
@pytest.mark.parametrize("pair", PAIRS, ids="->".join)
def test_a_move_is_that_of_dtensors(pair: tuple[str, str]) -> None:
    x = source(pair[0])
    types = to_axis_types([PLACEMENTS[pair[1]]], mesh_ndim=1, ndim=2)
    steps = plan(x._spec, types)
    wanted = move(x * 1.0, types).to_local()
    with torch._C.DisableTorchFunctionSubclass():
        local = torch.Tensor.as_subclass(x.detach(), Tensor).requires_grad_()
        found = shift(local * 1.0, steps)
    assert torch.equal(wanted, found)
    weights = torch.arange(found.numel(), dtype=torch.float64).view(found.shape)
    one = torch.autograd.grad((wanted.square() * weights).sum(), x, create_graph=True)[0].to_local()
    other = torch.autograd.grad((found.square() * weights).sum(), local, create_graph=True)[0]
    assert torch.equal(one, other)
    twice = torch.autograd.grad(one.square().sum(), x)[0].to_local()
    assert torch.equal(twice, torch.autograd.grad(other.square().sum(), local)[0])
    with torch.no_grad():
        assert torch.equal(shift(local, steps), move(x, types).to_local())


@pytest.mark.ranks(2, pool=True)
def test_sums_can_be_written_to() -> None:
    def run(x: Tensor, w: Tensor) -> Tensor:
        h = w * 2
        summed = (x * h).sum(0).redistribute(placements=[Replicate()])  # type: ignore[attr-defined]
        summed.relu_()
        return (summed * h).sum()

    mesh = cached_mesh(2, names=("tp",))
    torch.manual_seed(0)
    x, w = torch.randn(4, 6), torch.randn(6, requires_grad=True)
    total = ((x * (w * 2)).sum(0).relu() * (w * 2)).sum()
    (wanted,) = torch.autograd.grad(total, w)
    ours = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(w.detach(), mesh, [Replicate()]).requires_grad_()
    fixed = static(run)
    for _ in range(4):
        found = fixed(*ours)
        torch.testing.assert_close(found.full_tensor(), total)
        torch.testing.assert_close(torch.autograd.grad(found, ours[1])[0].full_tensor(), wanted)
    assert "relu_(" in fixed.static_code()
    assert "shift(" in fixed.static_code()


@pytest.mark.ranks(2, pool=True)
def test_an_input_that_is_only_relabelled_is_not_labelled_itself() -> None:
    mesh = cached_mesh(2, names=("tp",))
    x = distribute_tensor(torch.ones(4), mesh, [Replicate()])
    fixed = static(lambda x: x.redistribute(placements=[Varying()]))
    for _ in range(4):
        y = fixed(x)
        assert y is not x
        assert x.placements == (Replicate(),)
