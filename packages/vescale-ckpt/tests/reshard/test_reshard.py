"""Other layouts over the network, on real ranks, against the whole tensor; and in one process."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import vescale_ckpt as ck
from vescale_testing import cached_mesh

LAYOUTS = [
    [Replicate(), Replicate()],
    [Shard(0), Replicate()],
    [Replicate(), Shard(1)],
    [Shard(0), Shard(1)],
    [Shard(1), Shard(0)],
    [Shard(0), Shard(0)],
]
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex128,
    torch.int64,
    torch.bool,
    torch.complex64,
]


def of_bits(dtype, *shape):
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    return (raw % 2).view(torch.bool).view(shape) if dtype == torch.bool else raw.view(dtype).view(shape)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("old", range(len(LAYOUTS)))
@pytest.mark.parametrize("new", range(len(LAYOUTS)))
def test_every_layout_into_every_other(rank, world, old, new):
    mesh = cached_mesh(2, 2, names=("a", "b"))
    whole = {
        "even": torch.arange(64.0).view(8, 8),
        "odd": torch.arange(35.0).view(7, 5),
        "few": torch.arange(3.0).view(1, 3),
    }
    state = {name: distribute_tensor(value, mesh, LAYOUTS[old]) for name, value in whole.items()}
    moved = ck.reshard(state, (mesh, LAYOUTS[new]))
    for name, value in whole.items():
        want = distribute_tensor(value, mesh, LAYOUTS[new])
        assert torch.equal(moved[name].to_local(), want.to_local())
        assert moved[name].placements == tuple(LAYOUTS[new])


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(rank, world, dtype):
    mesh = cached_mesh(4, names=("x",))
    whole = {"m": of_bits(dtype, 10, 6), "s": of_bits(dtype), "e": of_bits(dtype, 0, 3)}
    moved = ck.reshard(whole, {"m": (mesh, [Shard(0)]), "*": (mesh, [Replicate()])})
    rows = whole["m"].chunk(4)
    mine = rows[rank] if rank < len(rows) else whole["m"][:0]
    assert torch.equal(bits(moved["m"].to_local()), bits(mine))
    assert torch.equal(bits(moved["s"].to_local()), bits(whole["s"]))
    assert moved["e"].to_local().shape == (0, 3)


@pytest.mark.ranks(4)
def test_to_fewer_ranks_and_back(rank, world):
    all_four, two = cached_mesh(4, names=("x",)), DeviceMesh("cpu", [1, 3])
    whole = torch.arange(70.0).view(10, 7)
    few = ck.reshard({"w": distribute_tensor(whole, all_four, [Shard(0)])}, (two, [Shard(1)]))
    if rank in (1, 3):
        assert torch.equal(few["w"].to_local(), whole.chunk(2, 1)[rank // 2])
    back = ck.reshard(few, lambda name, tensor: (all_four, [Shard(0)]))
    assert torch.equal(back["w"].to_local(), distribute_tensor(whole, all_four, [Shard(0)]).to_local())


@pytest.mark.ranks(4, pool=True)
def test_into_another_state_in_place(rank, world):
    mesh = cached_mesh(2, 2, names=("a", "b"))
    whole = torch.arange(48.0).view(6, 8)
    source = {"w": distribute_tensor(whole, mesh, [Shard(0), Shard(1)]), "step": 3, "plain": torch.ones(4)}
    target = {"w": torch.zeros(6, 8), "plain": torch.zeros(4), "step": 0}
    assert ck.reshard(source, target) is target
    assert torch.equal(target["w"], whole)
    assert torch.equal(target["plain"], torch.ones(4))


@pytest.mark.ranks(4, pool=True)
def test_values_and_tensors_without_a_new_layout_stay(rank, world):
    mesh = cached_mesh(4, names=("x",))
    kept = torch.full((3,), float(rank))
    moved = ck.reshard({"w": torch.ones(8), "own": ck.local(kept), "n": [1, "a"]}, {"w": (mesh, [Shard(0)])})
    assert moved["w"].to_local().tolist() == [1, 1]
    assert moved["n"] == [1, "a"]


@pytest.mark.ranks(2)
def test_ranks_that_ask_for_different_layouts_are_told(rank, world):
    mesh = cached_mesh(2, names=("x",))
    with pytest.raises(ck.RanksError, match="other keys, shapes or layouts"):
        ck.reshard({"w": torch.ones(8)}, (mesh, [Shard(0) if rank else Replicate()]))


@pytest.mark.ranks(2)
def test_a_pending_sum_is_no_target(rank, world):
    mesh = cached_mesh(2, names=("x",))
    with pytest.raises(ck.LayoutError, match="pending sum"):
        ck.reshard({"w": torch.ones(8)}, (mesh, [Partial()]))


def test_one_process_fills_another_state():
    source, target = {"w": torch.arange(4.0), "n": 1}, {"w": torch.zeros(4), "n": 1}
    assert ck.reshard(source, target)["w"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "target", [{"v": torch.zeros(4)}, {"w": torch.zeros(5)}, {"w": torch.zeros(4, dtype=torch.int32)}]
)
def test_a_target_with_other_tensors_is_refused(target):
    with pytest.raises(ck.MismatchError, match="not the same tensors"):
        ck.reshard({"w": torch.arange(4.0)}, target)


@pytest.mark.parametrize("conj", ["source", "target", "both"])
def test_conjugated_memory_keeps_its_values(conj):
    source, target = torch.randn(5, 7, dtype=torch.complex64), torch.zeros(5, 7, dtype=torch.complex64)
    source = source.conj() if conj != "target" else source
    target = target.conj() if conj != "source" else target
    assert torch.equal(ck.reshard({"w": source}, {"w": target})["w"], source)
