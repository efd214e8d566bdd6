"""Sums in the order of ranks: their bits are those of a sum in a loop, whatever else is in the message."""

from __future__ import annotations

import functools
import operator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from vescale_dtensor import Replicate, Shard, distribute_tensor, parallelize_module
from vescale_dtensor._comm import ranked
from vescale_dtensor._comm.buffers import Pool
from vescale_dtensor._comm.ranked import RankedSum
from vescale_dtensor._comm.record import listeners
from vescale_dtensor._comm.steps import AllReduce
from vescale_dtensor._mesh import mesh_info
from vescale_testing import cached_mesh

RANKS = pytest.mark.ranks(4, pool=True)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


def part(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(size, generator=generator, dtype=torch.float64) * 10.0**rank).to(dtype)


@RANKS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "in parts"])
@pytest.mark.parametrize("pooled", [True, False])
def test_elements_are_added_in_the_order_of_ranks(
    dtype: torch.dtype, whole: bool, pooled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranked, "WHOLE_BYTES", 1 << 30 if whole else 0)
    group, pool = cached_mesh(4, names=("dp",)).get_group(), Pool() if pooled else None
    for size in (1, 3, 4, 7, 4096, 40001):
        wanted = functools.reduce(operator.add, [part(r, size, dtype) for r in range(4)])
        out = part(dist.get_rank(), size, dtype)
        RankedSum(out, group, 4, pool).wait()
        assert torch.equal(out, wanted)


@RANKS
def test_gradients_have_the_same_bits_alone_and_in_a_bucket() -> None:
    """The first call sends each gradient by itself, the later ones all of them together."""
    mesh = cached_mesh(4, names=("dp",))
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 3))
    net = parallelize_module(net, mesh, {"forward": {"input": {"dp": Shard(0)}}})
    x = distribute_tensor(torch.randn(12, 6) * torch.logspace(-4, 4, 12)[:, None], mesh, [Shard(0)])
    seen: list[list[int]] = []
    results = []
    for _ in range(3):
        found: list[int] = []
        listeners.append(lambda event, found=found: found.append(event.num_bytes))
        net(x).square().sum().backward()
        listeners.pop()
        seen.append(found)
        results.append([p.grad.full_tensor() for p in net.parameters()])
        net.zero_grad()
    assert len(seen[0]) == 4  # one per parameter
    assert len(seen[1]) == len(seen[2]) == 1
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@RANKS
def test_leaves_that_are_no_parameters_too() -> None:
    mesh = cached_mesh(4, names=("dp",))
    x = distribute_tensor(torch.randn(8, 5) * torch.logspace(-6, 6, 8)[:, None], mesh, [Shard(0)])
    w = distribute_tensor(torch.ones(5), mesh, [Replicate()]).requires_grad_()
    (x * w).sum().backward()
    rows = x.full_tensor()
    wanted = functools.reduce(operator.add, [rows[2 * r] + rows[2 * r + 1] for r in range(4)])
    assert torch.equal(w.grad.full_tensor(), wanted)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.int16], ids=str)
@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)], ids=str)
def test_small_sums_on_gloo_are_such_sums(dtype: torch.dtype, axes: tuple[int, ...]) -> None:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    info = mesh_info(mesh)
    reducer = AllReduce(info, axes)
    parts = [part(info.device_mesh.mesh[c].item(), 33, dtype) for c in info.members(axes)]
    wanted = functools.reduce(operator.add, parts)
    assert reducer.is_ranked(100, torch.device("cpu"))
    work, finish = reducer.start(part(dist.get_rank(), 33, dtype))
    if work is not None:
        work.wait()
        assert work.is_completed()
    assert torch.equal(finish(), wanted)


@RANKS
def test_large_sums_and_those_of_other_backends_are_all_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    reducer = AllReduce(mesh_info(cached_mesh(4, names=("dp",))), (0,))
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert reducer.is_ranked(ranked.WHOLE_BYTES // 4, cpu)
    assert not reducer.is_ranked(ranked.WHOLE_BYTES // 4 + 1, cpu)
    assert not reducer.is_ranked(4, gpu)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:mpi,cuda:nccl")
    assert not AllReduce(reducer.mesh, (0,)).is_ranked(4, cpu)
    ones = torch.ones(3 + ranked.WHOLE_BYTES // 16)
    reducer.run_in_place(ones)
    assert ones.eq(4).all()
