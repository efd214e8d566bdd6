"""Loading on real ranks: replicas are read once, stages of a pipeline, and failures that reach everybody."""

import pathlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import vescale_ckpt as ck
from vescale_ckpt import CorruptionError, MismatchError, RanksError


def summed(number):
    total = torch.tensor(float(number))
    dist.all_reduce(total)
    return int(total)


@pytest.mark.ranks(4)
def test_replicas_are_read_once_and_sent(rank, world, tmp_path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain, small, sharded = torch.randn(3 << 20), torch.arange(7), torch.randn(1200, 500)
    source = {"plain": plain, "small": small, "turned": plain.view(1024, 3072).clone(), "d": sharded}
    if rank == 0:
        ck.save(tmp_path, source, step=1, compress=None, process_group=None if world == 1 else dist.new_group([0]))
    else:
        dist.new_group([0])
    dist.barrier()
    for broadcast in (False, "auto", True):
        target = {
            "plain": torch.zeros(3 << 20),
            "small": torch.zeros(7, dtype=torch.int64),
            "turned": torch.zeros(3072, 1024).t(),
            "d": distribute_tensor(torch.zeros(1200, 500), mesh, [Replicate(), Shard(1)]),
        }
        ck.load(tmp_path, target, broadcast=broadcast)
        for name in ("plain", "small", "turned"):
            assert torch.equal(target[name], source[name]), (broadcast, name)
        assert isinstance(target["d"], DTensor)
        assert torch.equal(target["d"].full_tensor(), sharded)
        report = ck.load(tmp_path, target, broadcast=broadcast, keys=["plain", "turned"])
        read = summed(report.bytes_read)
        if broadcast is False:
            assert read == 4 * 2 * plain.nbytes
        else:  # but for the chunks in which the three cuts lie
            assert 2 * plain.nbytes <= read <= 2 * plain.nbytes + 3 * (1 << 20)


@pytest.mark.ranks(2)
def test_stages_of_a_pipeline_load_their_own_keys(rank, tmp_path):
    mine = {f"layer{rank}": torch.full((500,), rank + 1.0), "step": 3}
    ck.save(tmp_path, mine, step=1)
    target = {f"layer{rank}": torch.zeros(500), "step": 0}
    ck.load(tmp_path, target)
    assert target["step"] == 3
    assert torch.equal(target[f"layer{rank}"], mine[f"layer{rank}"])
    other = {f"layer{1 - rank}": torch.zeros(500), "step": 0}
    ck.load(tmp_path, other)
    assert other[f"layer{1 - rank}"][0] == 2 - rank
    with pytest.raises(MismatchError, match="layer1"):
        ck.load(tmp_path, {"layer0": torch.zeros(500), "step": 0})


@pytest.mark.ranks(3)
def test_ranks_that_hold_different_tensors_do_not_wait_for_each_other(rank, tmp_path):
    ck.save(tmp_path, {f"layer{n}": torch.full((500,), n + 1.0) for n in range(3)}, step=1)
    target = {f"layer{rank}": torch.zeros(500)}
    ck.load(tmp_path, target, broadcast="auto")
    assert target[f"layer{rank}"][0] == rank + 1
    with pytest.raises(MismatchError, match="broadcast"):
        ck.load(tmp_path, target, broadcast=True)


@pytest.mark.ranks(4)
def test_one_rank_that_cannot_read_ends_the_load_on_all(rank, tmp_path):
    mesh = init_device_mesh("cpu", (4,))
    whole = torch.arange(4.0 * 70000).view(4, 70000)
    ck.save(tmp_path, {"w": distribute_tensor(whole, mesh, [Shard(0)])}, step=1, compress=None)
    if rank == 0:
        (pack,) = pathlib.Path(tmp_path).glob("steps/*/data/w00002-*")
        data = bytearray(pack.read_bytes())
        data[1000] ^= 4
        pack.write_bytes(data)
    dist.barrier()
    target = {"w": distribute_tensor(torch.zeros(4, 70000), mesh, [Shard(0)])}
    with pytest.raises(CorruptionError if rank == 2 else RanksError, match="w00002"):
        ck.load(tmp_path, target)


@pytest.mark.ranks(2)
def test_what_does_not_fit_one_rank_is_told_on_all(rank, tmp_path):
    ck.save(tmp_path, {"w": torch.ones(500), "v": torch.ones(500)}, step=1)
    target = {"w": torch.zeros(500), "v": torch.zeros(500 + rank)}
    with pytest.raises(MismatchError, match=r"v: shape \[501\].*rank 1"):
        ck.load(tmp_path, target)
    assert target["w"].sum() == 0


@pytest.mark.ranks(2)
def test_values_of_ranks_when_their_number_changes(rank, world, tmp_path):
    ck.save(tmp_path, {"own": ck.local({"pos": 10 + rank}), "w": 1}, step=1)
    same = {"own": ck.local({"pos": 0}), "w": 0}
    ck.load(tmp_path, same)
    assert same["own"].value["pos"] == 10 + rank
    groups = [dist.new_group([n]) for n in range(world)]
    alone = {"own": ck.local({"pos": 0}), "w": 0}
    with pytest.raises(MismatchError, match="local="):
        ck.load(tmp_path, alone, process_group=groups[rank])
    ck.load(tmp_path, alone, process_group=groups[rank], local="keep")
    assert alone["own"].value["pos"] == 0
    assert alone["w"] == 1
    ck.load(
        tmp_path, alone, process_group=groups[rank], local=lambda name, old, r, w: {"pos": sum(o["pos"] for o in old)}
    )
    assert alone["own"].value["pos"] == 21


@pytest.mark.ranks(3)
def test_all_ranks_are_told_alike_that_there_is_no_step(rank, tmp_path):
    with pytest.raises(ck.MissingStepError, match="no committed checkpoint"):
        ck.load(tmp_path, {"w": torch.zeros(3)}, timeout=20)
    assert ck.Checkpointer(tmp_path, timeout=20).restore({"w": torch.zeros(3)}, missing_ok=True) is None
    ck.save(tmp_path, {"w": torch.ones(3)}, step=4, timeout=20)
    with pytest.raises(ck.MissingStepError, match="no committed checkpoint of step 5; there are: 4"):
        ck.load(tmp_path, {"w": torch.zeros(3)}, step=5, timeout=20)
