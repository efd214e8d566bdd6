"""Making DTensors of whole tensors and of parts, what they show, and the errors on the way."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale_dtensor import DTensor, Partial, Replicate, Shard, Varying, distribute_tensor
from vescale_dtensor.errors import MeshMismatchError
from vescale_testing import cached_mesh, fake_ranks
from vescale_testing.oracle import placements


def _input() -> torch.Tensor:
    return torch.arange(35.0, dtype=torch.float64).reshape(7, 5)


# ------------------------------------------------------------------ distribute_tensor


@pytest.mark.ranks(4, pool=True)
def test_distribute_keeps_parameters_and_copies_memory() -> None:
    p = nn.Parameter(_input())
    d = distribute_tensor(p, cached_mesh(2, 2), [Shard(0), Replicate()])
    assert isinstance(d, nn.Parameter)
    assert isinstance(d, DTensor)
    assert d.requires_grad
    assert d.is_leaf
    assert d.to_local().data_ptr() != p.data_ptr()
    assert distribute_tensor(d, cached_mesh(2, 2)) is d
    assert not distribute_tensor(_input(), cached_mesh(4)).requires_grad


@pytest.mark.ranks(4, pool=True)
def test_distribute_from_one_rank(rank: int) -> None:
    x = _input() if rank == 2 else torch.zeros(7, 5, dtype=torch.float64)
    d = distribute_tensor(x, cached_mesh(4), [Shard(-2)], src_data_rank=2)
    assert torch.equal(d.full_tensor(), _input())
    with pytest.raises(ValueError, match="src_data_rank = 4 is outside mesh axis '0' of size 4"):
        distribute_tensor(x, cached_mesh(4), [Shard(0)], src_data_rank=4)


@pytest.mark.ranks(4, pool=True)
def test_distribute_refuses() -> None:
    mesh = cached_mesh(2, 2)
    x = _input()
    with pytest.raises(
        ValueError, match=r"placements\[1\] = Shard\(dim=2\): tensor dim 2 does not exist in a tensor of 2"
    ):
        distribute_tensor(x, mesh, [Replicate(), Shard(2)])
    with pytest.raises(ValueError, match=r"placements has 1 entries .* for a mesh of 2 axes"):
        distribute_tensor(x, mesh, [Shard(0)])
    with pytest.raises(TypeError, match="one placement per mesh axis"):
        distribute_tensor(x, mesh, Shard(0))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected Shard"):
        distribute_tensor(x, mesh, ["tp", "dp"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="only a pending sum can be kept"):
        distribute_tensor(x, mesh, [Partial("max"), Replicate()])
    with pytest.raises(TypeError, match="device_mesh must be a torch DeviceMesh, got list"):
        distribute_tensor(x, [0, 1], [Shard(0)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the result of an operation that autograd recorded"):
        distribute_tensor(x.requires_grad_() * 2, mesh)
    d = distribute_tensor(_input(), mesh, [Shard(0), Replicate()])
    with pytest.raises(ValueError, match="is a DTensor already"):
        distribute_tensor(d, mesh, [Replicate(), Shard(0)])


# ------------------------------------------------------------------ from_local, to_local


@pytest.mark.ranks(4, pool=True)
def test_from_local_finds_uneven_sizes(rank: int) -> None:
    mesh = cached_mesh(4)
    parts = _input().chunk(4)
    d = DTensor.from_local(parts[rank], mesh, [Shard(0)])
    assert d.shape == (7, 5)
    assert torch.equal(d.full_tensor(), _input())
    d = DTensor.from_local(parts[rank], mesh, [Shard(0)], run_check=False, shape=(7, 5))
    assert torch.equal(d.full_tensor(), _input())
    assert d.to_local().data_ptr() == parts[rank].data_ptr()


@pytest.mark.ranks(4, pool=True)
def test_from_local_and_back_carry_gradients(rank: int) -> None:
    mesh = cached_mesh(4)
    local = torch.full((2, 3), rank + 1.0, requires_grad=True)
    for codes, expected in (("S0", 2.0), ("P", 2.0), ("R", 2.0 if rank == 0 else 0.0)):
        local.grad = None
        (DTensor.from_local(local, mesh, placements(codes)) * 2).sum().backward()
        assert torch.equal(local.grad, torch.full((2, 3), expected)), codes
    x = distribute_tensor(torch.ones(4, 3), mesh, [Replicate()]).requires_grad_()
    (x.to_local(grad_placements=[Partial()]) * (rank + 1)).sum().backward()  # every rank goes its own way
    assert torch.equal(x.grad.full_tensor(), torch.full((4, 3), 10.0))
    with pytest.raises(ValueError, match="does not fit a tensor placed"):
        x.to_local(grad_placements=[Shard(0)])


@pytest.mark.ranks(4, pool=True)
def test_from_local_refuses_what_does_not_fit_together(rank: int) -> None:
    mesh = cached_mesh(4)
    with pytest.raises(ValueError, match=r"local_tensor has shape \[3, 5\], but rank \d at .* parts must be cut as"):
        DTensor.from_local(torch.zeros(3, 5), mesh, [Shard(0)], shape=(7, 5), run_check=False)
    with pytest.raises(ValueError, match="do not describe one tensor"):
        DTensor.from_local(torch.zeros(2, 5, dtype=torch.float32 if rank else torch.float64), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="is a DTensor already"):
        DTensor.from_local(distribute_tensor(_input(), mesh), mesh, [Replicate()])


@pytest.mark.ranks(4, pool=True)
def test_redistribute_arguments() -> None:
    mesh, other = cached_mesh(2, 2), cached_mesh(4)
    d = distribute_tensor(_input(), mesh, [Shard(0), Replicate()])
    assert d.redistribute(mesh, [Shard(0), Shard(1)]).placements == (Shard(0), Shard(1))
    assert d.redistribute(placements=[Replicate(), Shard(-1)]).placements == (Replicate(), Shard(1))
    assert d.redistribute([Shard(0), Varying()]).grad_placements == (Shard(0), Partial())
    with pytest.raises(ValueError, match="needs placements"):
        d.redistribute()
    with pytest.raises(ValueError, match="is not this tensor's mesh"):
        d.redistribute(other, [Replicate()])
    with pytest.raises(MeshMismatchError, match="add got DTensors of different meshes"):
        torch.add(d, distribute_tensor(_input(), other, [Shard(0)]))


# ------------------------------------------------------------------ what a DTensor shows


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("codes", ["S0 S1", "S1 S1", "I R", "S0 P"])
def test_metadata_are_those_of_the_whole(codes: str) -> None:
    x = _input()
    d = distribute_tensor(x, cached_mesh(2, 2), placements(codes))
    for a, b in (
        (d, x),
        (d.t(), x.t()),
        (d.unsqueeze(1), x.unsqueeze(1)),
        (d[None].expand(3, 7, 5), x[None].expand(3, 7, 5)),
    ):
        assert a.shape == b.shape == a.size()
        assert a.size(-1) == b.size(-1)
        assert a.stride() == b.stride()
        assert a.ndim == a.dim() == b.ndim
        assert a.numel() == b.numel() == a.nelement()
        assert len(a) == len(b)
        assert a.nbytes == b.nbytes
        assert (a.dtype, a.device, a.is_floating_point()) == (b.dtype, b.device, True)
    with pytest.raises(TypeError, match="0-d"):
        len(d.sum())
    assert [row.shape for row in d] == [torch.Size([5])] * 7


@pytest.mark.ranks(4, pool=True)
def test_printing(rank: int) -> None:
    d = distribute_tensor(_input(), cached_mesh(2, 2, names=("dp", "tp")), [Shard(0), Partial()])
    text = repr(d)
    assert "DTensor(shape=[7, 5], placements=(S(0),P), mesh(dp=2, tp=2)" in text
    assert str(d) == text
    assert f"{d.sum():.1f}" == "595.0"


def test_from_local_without_ranks() -> None:
    with fake_ranks(8, rank=3):
        mesh = init_device_mesh("cpu", (8,))
        d = DTensor.from_local(torch.zeros(2, 5), mesh, [Shard(0)], run_check=False)
        assert d.shape == (16, 5)
        assert d.local_offset == (6, 0)
        assert d.local_shape == (2, 5)
