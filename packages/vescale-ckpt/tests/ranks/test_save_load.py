"""Saves and loads on real ranks: who writes what, layouts and worlds that change, and failures that reach everybody."""

import math
import pathlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import vescale_ckpt as ck


def numbered(*shape, dtype=torch.float32):
    return torch.arange(math.prod(shape)).view(shape).to(dtype)


def same_bits(a, b):
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def sizes_of_packs(folder):
    """Bytes of the data files, by writer."""
    sizes = {}
    for file in pathlib.Path(folder).glob("steps/*/data/w*"):
        writer = int(file.name[1:6])
        sizes[writer] = sizes.get(writer, 0) + file.stat().st_size
    return sizes


# ---- who writes what


@pytest.mark.ranks(4)
def test_replicas_are_written_once_and_evenly(rank, tmp_path):
    torch.manual_seed(0)
    state = {f"w{n}": torch.randn(600 + 100 * n, 501) for n in range(6)}
    info = ck.save(tmp_path, state, step=1)
    whole = sum(tensor.nbytes for tensor in state.values())
    dist.barrier()
    sizes = sizes_of_packs(tmp_path)
    assert sorted(sizes) == [0, 1, 2, 3]
    assert sum(sizes.values()) == info.bytes_total == whole
    assert max(sizes.values()) <= 1.05 * whole / 4
    assert info.step == 1
    if rank == 0:
        loaded = ck.load_dict(tmp_path)
        assert all(same_bits(loaded[name], tensor) for name, tensor in state.items())
        assert ck.verify(tmp_path).ok


@pytest.mark.ranks(4)
def test_replicas_in_both_directions_of_a_mesh_are_written_once(rank, tmp_path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = numbered(1024, 512)
    state = {"w": distribute_tensor(whole, mesh, [Replicate(), Shard(0)])}
    ck.save(tmp_path, state, step=1)
    dist.barrier()
    sizes = sizes_of_packs(tmp_path)
    assert sum(sizes.values()) == whole.nbytes
    assert set(sizes.values()) == {whole.nbytes // 4}
    if rank == 3:
        assert same_bits(ck.load_dict(tmp_path)["w"], whole)


# ---- layouts


SHARDINGS = [
    ((4,), [Shard(0)]),
    ((4,), [Shard(1)]),
    ((4,), [Replicate()]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 2), [Shard(0), Shard(0)]),
    ((2, 2), [Shard(1), Replicate()]),
]
SHAPES = {f"w{n}": shape for n, shape in enumerate([(16, 12), (7, 5), (2, 3), (1, 9), (0, 3), (5,), (3, 4, 2)])}


@pytest.mark.ranks(4)
def test_any_sharding_comes_back_in_any_other(rank, tmp_path):
    meshes = {shape: init_device_mesh("cpu", shape) for shape in [(4,), (2, 2)]}

    def spread(make):
        return {
            f"{number}": {
                name: distribute_tensor(make(shape), meshes[sizes], placements)
                for name, shape in SHAPES.items()
                if all(not isinstance(p, Shard) or p.dim < len(shape) for p in placements)
            }
            for number, (sizes, placements) in enumerate(SHARDINGS)
        }

    ck.save(tmp_path, spread(lambda shape: numbered(*shape)), step=1)
    target = spread(torch.zeros)
    ck.load(tmp_path, target)
    for group in target.values():
        for name, tensor in group.items():
            assert torch.equal(tensor.full_tensor(), numbered(*SHAPES[name])), (name, tensor.placements)
    # Each sharding into the next one; a 1-D tensor has no dim 1, so only names that both have are loaded.
    target = spread(torch.zeros)
    count = len(SHARDINGS)
    for number in range(count):
        there = str((number + 1) % count)
        names = target[str(number)].keys() & target[there].keys()
        ck.load(
            tmp_path,
            {"x": {name: target[there][name] for name in sorted(names)}},
            rename=lambda name, number=number: name.replace("x", str(number), 1),
            unexpected="ignore",
        )
        for name in names:
            assert torch.equal(target[there][name].full_tensor(), numbered(*SHAPES[name])), (number, there, name)


@pytest.mark.ranks(4)
def test_rows_of_a_mesh_that_know_only_themselves_hold_the_same(rank, tmp_path):
    # Tensor parallel in each row of data parallel ranks: each row has a 1-D mesh of its own.
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = numbered(6, 1000)
    state = {"w": distribute_tensor(whole, mesh["tp"], [Shard(0)]), "b": torch.ones(5), "step": 3}
    ck.save(tmp_path, state, step=1)
    dist.barrier()
    assert sum(sizes_of_packs(tmp_path).values()) == whole.nbytes
    target = {"w": distribute_tensor(torch.zeros(6, 1000), mesh["dp"], [Shard(1)]), "b": torch.zeros(5), "step": 0}
    ck.load(tmp_path, target)
    assert torch.equal(target["w"].full_tensor(), whole)
    assert target["step"] == 3


@pytest.mark.ranks(4)
def test_subgroups_save_and_load_by_themselves(rank, tmp_path):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = rank // 2
    state = {"w": torch.full((1000,), float(mine)), "own": ck.local(rank)}
    ck.save(tmp_path / str(mine), state, step=mine, process_group=groups[mine])
    target = {"w": torch.zeros(1000), "own": ck.local(-1)}
    assert ck.load(tmp_path / str(mine), target, process_group=groups[mine]).step == mine
    assert target["w"][0] == mine
    assert target["own"].value == rank
    dist.barrier()
    if rank == 0:
        assert ck.open(tmp_path / "1").manifest.world == 2


@pytest.mark.ranks(3)
def test_stages_with_keys_of_their_own_become_one_state(rank, world, tmp_path):
    state = {"layers": {str(rank): torch.full((1000,), float(rank)), "tied": torch.ones(300)}, "step": 7}
    if rank == 1:
        state["layers"].pop("tied")
    ck.save(tmp_path, state, step=1)
    loaded = ck.load_dict(tmp_path)
    assert sorted(loaded["layers"]) == ["0", "1", "2", "tied"]
    assert [int(loaded["layers"][str(stage)][0]) for stage in range(world)] == [0, 1, 2]
    assert loaded["step"] == 7


# ---- FSDP2


def model_and_optimizer(mesh):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(10, 33), torch.nn.GELU(), torch.nn.Linear(33, 3))
    if mesh is not None:
        for module in (model[0], model[2], model):
            fully_shard(module, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        torch.manual_seed(100 + step)
        model(torch.randn(8, 10)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def wholes(model, optimizer):
    """All tensors of a model and its optimizer, whole."""
    tensors = dict(model.state_dict())
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"{number}.{key}": value for key, value in state.items()}
    return {key: t.full_tensor() if isinstance(t, DTensor) else t.clone() for key, t in tensors.items()}


def check_equal(a, b):
    assert a.keys() == b.keys()
    for key in a:
        assert same_bits(a[key], b[key]), key


@pytest.mark.ranks(4, timeout=60)
def test_fully_sharded_training_goes_on_elsewhere(rank, tmp_path):
    four = init_device_mesh("cpu", (4,))
    model, optimizer = model_and_optimizer(four)
    train(model, optimizer, 3)
    ck.save(tmp_path, {"model": model, "optimizer": optimizer}, step=3)
    saved = wholes(model, optimizer)

    again, its_optimizer = model_and_optimizer(four)
    ck.load(tmp_path, {"model": again, "optimizer": its_optimizer})
    check_equal(wholes(again, its_optimizer), saved)
    train(model, optimizer, 2, first=3)
    train(again, its_optimizer, 2, first=3)
    check_equal(wholes(again, its_optimizer), wholes(model, optimizer))

    rows = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    two, its_optimizer = model_and_optimizer(rows["shard"])
    ck.load(tmp_path, {"model": two, "optimizer": its_optimizer}, process_group=rows["shard"].get_group())
    check_equal(wholes(two, its_optimizer), saved)
    train(two, its_optimizer, 1, first=3)  # the moments have the layout of the parameters, or this fails

    groups = [dist.new_group([member]) for member in range(4)]
    one, its_optimizer = model_and_optimizer(None)
    ck.load(tmp_path, {"model": one, "optimizer": its_optimizer}, process_group=groups[rank])
    check_equal(wholes(one, its_optimizer), saved)


# ---- values of ranks


@pytest.mark.ranks(4)
def test_values_of_ranks_in_another_number_of_ranks(rank, tmp_path):
    torch.manual_seed(rank)
    own = {"rng": torch.get_rng_state(), "position": 10 * rank}
    ck.save(tmp_path, {"loader": ck.local(own), "epoch": 2}, step=1)
    same = {"loader": ck.local({"rng": torch.zeros_like(own["rng"]), "position": 0}), "epoch": 0}
    ck.load(tmp_path, same)
    assert torch.equal(same["loader"].value["rng"], own["rng"])
    assert same["loader"].value["position"] == 10 * rank

    rows = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "half"))
    half = {"process_group": rows["half"].get_group()}
    target = {"loader": ck.local({"rng": torch.zeros_like(own["rng"]), "position": -1}), "epoch": 0}
    with pytest.raises(ck.MismatchError, match=r"loader: values of 4 ranks that saved, but 2 ranks load"):
        ck.load(tmp_path, target, **half)
    assert target["epoch"] == 0
    ck.load(tmp_path, target, local="keep", **half)
    assert (target["epoch"], target["loader"].value["position"]) == (2, -1)

    def every_second(name, values, rank, world):
        assert name == "loader"
        assert (len(values), world) == (4, 2)
        return values[2 * rank]

    ck.load(tmp_path, target, local=every_second, **half)
    old = 2 * (rank % 2)
    assert target["loader"].value["position"] == 10 * old
    torch.manual_seed(old)
    assert torch.equal(target["loader"].value["rng"], torch.get_rng_state())
