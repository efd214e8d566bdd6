"""Other layouts over the network, on real ranks, against the whole tensor; and in one process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import vescale_ckpt as ck
from vescale_ckpt._reshard.exchange import Exchange
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
    own, stays = torch.full((3,), float(rank)), torch.arange(5.0)
    state = {"w": torch.ones(8), "own": ck.local({"rng": own, "at": rank}), "n": [1, ("a", None)], "b": stays}
    moved = ck.reshard(state, {"w": (mesh, [Shard(0)])})
    assert moved["w"].to_local().tolist() == [1, 1]
    assert moved["n"] == [1, ("a", None)]
    assert moved["b"] is stays
    assert moved["own"].value["rng"] is own
    assert moved["own"].value["at"] == rank


@pytest.mark.ranks(2)
def test_ranks_that_ask_for_different_layouts_are_told(rank, world):
    mesh = cached_mesh(2, names=("x",))
    with pytest.raises(ck.RanksError, match=r"w is .* on rank 0, but .* on rank 1"):
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
    with pytest.raises(ck.MismatchError, match="not have the same tensors"):
        ck.reshard({"w": torch.arange(4.0)}, target)


@pytest.mark.parametrize(
    "target", [(None, None), None, {}, [], (), (None, ("R",)), "S(0)", 5, [1, 2], {"w": None, "a": 1}], ids=repr
)
def test_what_holds_no_tensor_is_neither_layouts_nor_a_target(target):
    said = r"(?s)new_layouts: expected a tuple \(mesh, placements\), .* in which there is no tensor; nothing was moved"
    with pytest.raises(ck.MismatchError, match=said + r".*w: only in the state"):
        ck.reshard({"w": torch.ones(3), "a": 2}, target)


def test_a_tensor_that_goes_nowhere_is_named_whatever_stands_in_its_place():
    state = {"w": torch.ones(3), "deep": {"v": torch.ones(2), "u": [torch.ones(1)]}}
    for deep, lost in (((1, 2), ["deep.v", "deep.u.0"]), ({"v": torch.zeros(2), "u": (4,)}, ["deep.u.0"])):
        target = {"w": torch.zeros(3), "deep": deep}
        with pytest.raises(ck.MismatchError, match="not have the same tensors") as caught:
            ck.reshard(state, target)
        lines = str(caught.value).splitlines()
        assert [name for name in ("w", "deep.v", "deep.u.0") if f"  {name}: only in the state" in lines] == lost
        assert target["w"].sum() == 0


@pytest.mark.ranks(4, pool=True)
def test_several_rounds_carry_all(rank, world, monkeypatch):
    monkeypatch.setattr(Exchange.prepare, "__defaults__", (4096,))
    mesh = cached_mesh(4, names=("x",))
    whole = {"a": torch.arange(9999.0).view(99, 101), "b": torch.arange(700), "c": torch.arange(64000).view(-1, 8)}
    state = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in whole.items()}
    moved = ck.reshard(state, lambda name, tensor: (mesh, [Shard(1) if tensor.ndim > 1 else Replicate()]))
    for name, value in whole.items():
        assert torch.equal(moved[name].to_local(), value.chunk(4, 1)[rank] if value.ndim > 1 else value)


@pytest.mark.ranks(4)
def test_a_group_of_some_ranks_in_another_order(rank, world):
    group = dist.new_group([3, 1])
    mesh = DeviceMesh("cpu", [3, 1])
    if rank in (1, 3):
        whole = torch.arange(6.0)
        moved = ck.reshard({"w": whole.clone()}, (mesh, [Shard(-1)]), process_group=group)
        assert torch.equal(moved["w"].to_local(), whole[:3] if rank == 3 else whole[3:])
        assert torch.equal(ck.reshard(moved, {"w": torch.zeros(6)}, process_group=group)["w"], whole)


@pytest.mark.ranks(2, pool=True)
def test_tied_tensors_stay_tied_and_can_be_untied_in_place(rank, world):
    mesh = cached_mesh(2, names=("x",))
    tied = torch.arange(4.0)
    moved = ck.reshard({"emb": tied, "head": tied, "n": torch.ones(2)}, {"head": (mesh, [Shard(0)])})
    assert moved["emb"] is moved["head"]
    assert moved["emb"].to_local().tolist() == [[0, 1], [2, 3]][rank]
    apart = {"emb": torch.zeros(4), "head": torch.zeros(4), "n": torch.zeros(2)}
    ck.reshard(moved, apart)
    assert apart["emb"].tolist() == apart["head"].tolist() == [0, 1, 2, 3]


@pytest.mark.ranks(2, pool=True)
def test_modules_and_optimizers_are_filled(rank, world):
    mesh = cached_mesh(2, names=("x",))
    models = [torch.nn.Linear(4, 2) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    old, new = ({"model": m, "optimizer": o} for m, o in zip(models, optimizers, strict=True))
    want = {name: value.detach().clone() for name, value in models[0].state_dict().items()}
    moments = optimizers[0].state[models[0].weight]["exp_avg"].clone()
    sharded = ck.reshard(old, lambda name, tensor: (mesh, [Shard(0)]) if tensor.ndim else None)
    with torch.no_grad():
        models[0].weight.zero_()
    assert ck.reshard(sharded, new) is new
    assert all(torch.equal(value, want[name]) for name, value in models[1].state_dict().items())
    assert torch.equal(optimizers[1].state[models[1].weight]["exp_avg"], moments)


@pytest.mark.ranks(2, pool=True)
def test_a_parameter_is_moved_without_its_graph(rank, world):
    mesh = cached_mesh(2, names=("x",))
    moved = ck.reshard({"w": torch.nn.Parameter(torch.ones(4))}, (mesh, [Shard(0)]))
    assert not moved["w"].requires_grad
    into = torch.nn.Parameter(torch.zeros(4))
    ck.reshard(moved, {"w": into})
    assert into.tolist() == [1, 1, 1, 1]


def broken_on_rank_1(rank, state):
    def layouts(name, tensor):
        if rank == 1:
            raise KeyError("no such layer")
        return cached_mesh(2, names=("x",)), [Shard(0)]

    return ck.reshard(state, layouts)


@pytest.mark.ranks(2)
def test_a_failing_rank_ends_all(rank, world):
    with pytest.raises(KeyError if rank else ck.RanksError, match="no such layer"):
        broken_on_rank_1(rank, {"w": torch.ones(8)})


@pytest.mark.ranks(2)
def test_ranks_with_other_keys_or_values_are_named(rank, world):
    mesh = cached_mesh(2, names=("x",))
    with pytest.raises(ck.RanksError, match=r"v is .*not there.* on rank"):
        ck.reshard({"w": torch.ones(8), **({"v": torch.ones(2)} if rank else {})}, (mesh, [Shard(0)]))
    with pytest.raises(ck.RanksError, match=r"rng is .*sha256 .* on rank 0"):
        ck.reshard({"w": torch.ones(8), "rng": torch.full((3,), rank)}, (mesh, [Shard(0)]))
    with pytest.raises(ck.RanksError, match=r"w is float32.* on rank 0, but float64"):
        ck.reshard({"w": torch.ones(8, dtype=torch.float64 if rank else torch.float32)}, (mesh, [Shard(0)]))
    moved = ck.reshard({"w": torch.ones(8)}, (mesh, [Shard(0)]))  # all ranks can go on
    assert moved["w"].to_local().tolist() == [1] * 4


@pytest.mark.ranks(2, pool=True)
def test_layouts_that_do_not_fit_are_refused(rank, world):
    mesh = cached_mesh(2, names=("x",))
    pending = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
    cases = [
        ({"w": pending}, (mesh, [Shard(0)]), "awaits a reduction"),
        ({"w": torch.ones(4)}, (mesh, [Shard(1)]), "cuts a dim"),
        ({"w": torch.ones(())}, (mesh, [Shard(0)]), "cuts a dim"),
        ({"w": torch.ones(4)}, (mesh, [Shard(0), Shard(0)]), "one placement for each"),
        ({"w": torch.ones(4)}, (mesh, ["S(0)"]), "no placement of torch"),
        ({"w": torch.ones(4)}, {"v.*": (mesh, [Shard(0)])}, "fits no tensor"),
        ({"w": torch.ones(4)}, lambda name, tensor: [mesh, [Shard(0)]], "returned"),
    ]
    for state, layouts, text in cases:
        with pytest.raises(ck.LayoutError, match=text):
            ck.reshard(state, layouts)
    with pytest.raises(ck.LayoutError, match="awaits a reduction"):
        ck.reshard({"w": torch.ones(4)}, {"w": pending})


@pytest.mark.ranks(2)
def test_a_mesh_outside_of_the_group_is_refused(rank, world):
    alone = [dist.new_group([n]) for n in range(2)][rank]
    with pytest.raises(ck.LayoutError, match="process_group"):
        ck.reshard({"w": torch.ones(8)}, (cached_mesh(2, names=("x",)), [Shard(0)]), process_group=alone)


def test_one_process_moves_every_dtype_as_it_is():
    state = {str(dtype): [of_bits(dtype, 3, 4), of_bits(dtype), of_bits(dtype, 0, 2)] for dtype in DTYPES}
    into = {name: [torch.zeros_like(value) for value in values] for name, values in state.items()}
    ck.reshard(state, into)
    for name, values in state.items():
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(values, into[name], strict=True))


def test_values_of_the_filled_state_stay():
    into = {"w": torch.zeros(2), "step": 7, "own": ck.local(5), "only here": [1]}
    ck.reshard({"w": torch.ones(2), "step": 3, "own": ck.local(4)}, into)
    assert into["w"].tolist() == [1, 1]
    assert (into["step"], into["own"].value, into["only here"]) == (7, 5, [1])


def test_strided_and_conjugate_memory():
    whole = torch.complex(torch.arange(12.0), torch.ones(12)).view(3, 4)
    into = torch.zeros(4, 3, dtype=torch.complex64).t()
    ck.reshard({"w": whole.conj()}, {"w": into})
    assert torch.equal(into, whole.conj().resolve_conj())
    back = torch.zeros(3, 4, dtype=torch.complex64)
    ck.reshard({"w": into}, {"w": back.conj()})
    assert torch.equal(back, whole)


def test_a_target_that_shares_memory_is_refused_unless_it_is_the_same():
    memory = torch.arange(6.0)
    state = {"a": memory[:3], "b": memory[3:]}
    assert ck.reshard(state, {"a": memory[:3], "b": memory[3:]})["b"].tolist() == [3, 4, 5]
    for swapped in ({"a": memory[3:], "b": torch.zeros(3)}, {"a": memory[1:4], "b": torch.zeros(3)}):
        with pytest.raises(ck.MismatchError, match="shares memory"):
            ck.reshard(state, swapped)
    assert memory.tolist() == [0, 1, 2, 3, 4, 5]


def test_targets_that_cannot_take_the_values_are_refused():
    both = torch.zeros(3)
    with pytest.raises(ck.MismatchError, match="a, b: two tensors in the state, one in new_layouts"):
        ck.reshard({"a": torch.ones(3), "b": torch.ones(3) * 2}, {"a": both, "b": both})
    with pytest.raises(ck.MismatchError, match=r"a: a tensor of which elements share memory, as expand\(\) makes it"):
        ck.reshard({"a": torch.ones(3)}, {"a": torch.zeros(1).expand(3)})
    with pytest.raises(ck.MismatchError, match="a"):
        ck.reshard({"a": torch.ones(3)}, {"a": 1.0})
    with pytest.raises(ck.MismatchError, match="a: only in the state"):
        ck.reshard({"a": torch.ones(3)}, {"a": None})


def test_a_process_group_without_torch_distributed_is_refused():
    with pytest.raises(ck.RanksError, match="not initialized"):
        ck.reshard({"a": torch.ones(3)}, {"a": torch.zeros(3)}, process_group=object())


@pytest.mark.parametrize("conj", ["source", "target", "both"])
def test_conjugated_memory_keeps_its_values(conj):
    source, target = torch.randn(5, 7, dtype=torch.complex64), torch.zeros(5, 7, dtype=torch.complex64)
    source = source.conj() if conj != "target" else source
    target = target.conj() if conj != "source" else target
    assert torch.equal(ck.reshard({"w": source}, {"w": target})["w"], source)
