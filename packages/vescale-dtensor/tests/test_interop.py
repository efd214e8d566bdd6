"""Conversion to and from torch's DTensor: memory shared, gradients those of one device."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute

from vescale_dtensor import DTensor, distribute_tensor
from vescale_dtensor._interop import from_torch, to_torch
from vescale_dtensor.errors import UnsupportedOperationError
from vescale_testing import cached_mesh
from vescale_testing.oracle import all_codes, placements

RANKS = pytest.mark.ranks(4, pool=True)


def data(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@RANKS
@pytest.mark.parametrize("shape", [(8, 6), (5, 3), (1, 4)], ids=str)
@pytest.mark.parametrize("codes", all_codes(2, 2, partial=True))
def test_there_and_back(codes: str, shape: tuple[int, ...]) -> None:
    mesh, x = cached_mesh(2, 2, names=("dp", "tp")), data(shape)
    d = distribute_tensor(x, mesh, placements(codes)).requires_grad_()
    t = to_torch(d)
    assert isinstance(t, TorchDTensor)
    assert t.shape == x.shape
    assert t.stride() == x.stride()
    assert t.to_local().data_ptr() == d.to_local().data_ptr()
    torch.testing.assert_close(t.full_tensor().detach(), x)
    back = from_torch(t)
    assert isinstance(back, DTensor)
    assert back.to_local().data_ptr() == d.to_local().data_ptr()
    torch.testing.assert_close(back.full_tensor().detach(), x)
    weight = data((shape[1], 3))
    (back * 2 @ weight_on(mesh, weight)).pow(2).sum().backward()
    reference = x.clone().requires_grad_()
    (reference * 2 @ weight).pow(2).sum().backward()
    assert d.grad.placements == d.grad_placements
    torch.testing.assert_close(d.grad.full_tensor(), reference.grad, rtol=1e-10, atol=1e-10)


def weight_on(mesh: object, weight: torch.Tensor) -> DTensor:
    return distribute_tensor(weight, mesh, [Replicate(), Replicate()])  # type: ignore[arg-type]


@RANKS
@pytest.mark.parametrize("codes", ["S0 S1", "S0 I", "I I", "R S1"])
def test_gradient_through_a_computation_of_torch(codes: str) -> None:
    mesh, x = cached_mesh(2, 2, names=("dp", "tp")), data((8, 6))
    d = distribute_tensor(x, mesh, placements(codes)).requires_grad_()
    weight = torch_distribute(data((6, 4)), mesh, [Replicate(), Replicate()])
    loss = (to_torch(d).pow(3) @ weight).sum()
    loss.full_tensor().backward()
    reference = x.clone().requires_grad_()
    (reference.pow(3) @ data((6, 4))).sum().backward()
    torch.testing.assert_close(d.grad.full_tensor(), reference.grad, rtol=1e-10, atol=1e-10)


@RANKS
@pytest.mark.parametrize(
    "wanted", [(Shard(0), Shard(1)), (Shard(0), Replicate()), (Replicate(), Replicate()), (Shard(1), Shard(1))], ids=str
)
def test_gradient_of_a_leaf_of_torch(wanted: tuple[Shard, ...]) -> None:
    mesh, x = cached_mesh(2, 2, names=("dp", "tp")), data((8, 6))
    leaf = torch_distribute(x, mesh, wanted).requires_grad_()
    batch = distribute_tensor(data((8, 6)), mesh, [Shard(0), Replicate()])
    (from_torch(leaf).pow(2) * batch).sum().backward()
    reference = x.clone().requires_grad_()
    (reference.pow(2) * data((8, 6))).sum().backward()
    torch.testing.assert_close(leaf.grad.full_tensor(), reference.grad, rtol=1e-10, atol=1e-10)


@RANKS
def test_what_has_no_counterpart() -> None:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    average = TorchDTensor.from_local(torch.zeros(4), mesh, [Partial("avg"), Replicate()])
    with pytest.raises(
        UnsupportedOperationError, match=r"placement Partial\(avg\) on mesh axis 'dp' has no counterpart"
    ):
        from_torch(average)
    with pytest.raises(TypeError, match=r"must be a vescale_dtensor.DTensor, got torch.Tensor"):
        to_torch(torch.zeros(3))  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"must be a torch.distributed.tensor.DTensor, got vescale_dtensor._tensor.DTensor"
    ):
        from_torch(distribute_tensor(torch.zeros(4), mesh, [Shard(0), Replicate()]))  # type: ignore[arg-type]
    strided = __import__("torch.distributed.tensor.placement_types", fromlist=["_StridedShard"])._StridedShard(
        0, split_factor=2
    )
    odd = TorchDTensor.from_local(torch.zeros(1, 4), mesh, [strided, Shard(0)], shape=torch.Size((4, 4)), stride=(4, 1))
    with pytest.raises(UnsupportedOperationError, match=r"_StridedShard.*has no counterpart"):
        from_torch(odd)
