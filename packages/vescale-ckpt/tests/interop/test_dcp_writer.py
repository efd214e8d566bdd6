"""dcp.save through our writer: the step is an ordinary one, and failures leave none."""

import os
import pickle
from gc import collect

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import vescale_ckpt as ck
from vescale_ckpt import MissingStepError
from vescale_ckpt._storage import open_storage
from vescale_ckpt.dcp import VescaleReader, VescaleWriter
from vescale_ckpt.testing import Fail, FaultyStorage, matching

NAMES = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 float8_e4m3fn float8_e5m2".split()
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def raw(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def save(state, writer, **options):
    dcp.save(state, storage_writer=writer, no_dist=True, **options)


def test_the_state_is_the_one_that_was_given(tmp_path):
    tensors = {name: torch.arange(6.0).view(2, 3).to(getattr(torch, name)) for name in NAMES}
    tensors |= {"empty": torch.zeros(0, 2), "scalar": torch.tensor(1.5), "turned": torch.randn(300, 500).t()}
    state = {
        "t": tensors,
        "list": [torch.ones(2), {"x": 1}],
        "values": {"i": 3, "f": float("-inf"), "none": None, "t": (1, "a"), "l": [1, 2], "b": b"x", "$x": {1}},
    }
    writer = VescaleWriter(tmp_path, step=7, metadata={"loss": 1.5})
    save(state, writer)
    assert writer.info.step == 7
    found = ck.load_dict(tmp_path, step=7)
    for name, tensor in tensors.items():
        assert found["t"][name].dtype == tensor.dtype
        assert found["t"][name].shape == tensor.shape
        assert raw(found["t"][name]) == raw(tensor), name
    assert found["values"] == state["values"]
    assert found["list"][1] == {"x": 1}
    assert ck.verify(tmp_path).ok
    with ck.open(tmp_path) as checkpoint:
        assert checkpoint.metadata == {"loss": 1.5}
        assert "t.float32" in checkpoint.names
    target = {
        "t": {name: torch.zeros_like(tensor) for name, tensor in tensors.items()},
        "list": [torch.zeros(2), {"x": 0}],
    }
    ck.load(tmp_path, target, unexpected="ignore")
    assert raw(target["t"]["turned"]) == raw(tensors["turned"])


def test_names_are_those_of_our_own_save_so_that_steps_share_chunks(tmp_path):
    torch.manual_seed(0)
    state = {"model": {"w": torch.randn(1 << 19), "b": torch.randn(1 << 18)}, "step": 1}
    ck.save(tmp_path, state, step=1)
    state["step"] = 2
    writer = VescaleWriter(tmp_path, step=2)
    save(state, writer)
    assert writer.info.bytes_reused == 3 << 20
    state["model"]["b"] += 1
    writer = VescaleWriter(tmp_path, step=3, compress="auto")
    save(state, writer)
    assert writer.info.bytes_reused == 2 << 20
    assert ck.save(tmp_path, state, step=4).bytes_reused == 3 << 20
    assert ck.diff((tmp_path, 3), (tmp_path, 4), read=True).equal


def test_steps_are_numbered_by_the_writer_by_an_id_or_on_from_the_last(tmp_path):
    save({"a": 1}, VescaleWriter(tmp_path))
    save({"a": 2}, VescaleWriter(tmp_path), checkpoint_id="outputs/checkpoint/step-1000")
    save({"a": 3}, VescaleWriter(tmp_path))
    save({"a": 4}, VescaleWriter(tmp_path, step=5000), checkpoint_id="whatever-7")
    assert {step: ck.load_dict(tmp_path, step=step)["a"] for step in (0, 1000, 1001, 5000)} == {
        0: 1,
        1000: 2,
        1001: 3,
        5000: 4,
    }
    with pytest.raises(ValueError, match="ends in no number"):
        save({"a": 1}, VescaleWriter(tmp_path), checkpoint_id="outputs/best")


def test_one_writer_saves_many_steps_with_cached_plans(tmp_path):
    writer = VescaleWriter(tmp_path)
    state = {"w": torch.zeros(5000), "step": 0}
    for step in range(3):
        state["w"] += 1
        state["step"] = step
        save(state, writer, planner=DefaultSavePlanner(enable_plan_caching=True))
        assert writer.info.step == step
    for step in range(3):
        found = ck.load_dict(tmp_path, step=step)
        assert found["step"] == step
        assert found["w"][0] == step + 1
    with pytest.raises(CheckpointException, match="enable_plan_caching"):
        save(state, VescaleWriter(tmp_path), planner=DefaultSavePlanner(enable_plan_caching=True))


def test_async_save(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        state = {"w": torch.ones(1000)}
        future = dcp.async_save(state, storage_writer=VescaleWriter(tmp_path, step=1))
        state["w"] += 1
        future.result()
    finally:
        dist.destroy_process_group()
    assert ck.load_dict(tmp_path)["w"].tolist() == [1.0] * 1000


def test_a_writer_can_be_sent_to_another_process(tmp_path):
    writer = VescaleWriter(tmp_path, step=3)
    save({"a": 1}, writer)
    other = pickle.loads(pickle.dumps(writer))
    with pytest.raises(CheckpointException, match="overwrite=True"):
        save({"a": 1}, other)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "object"),
        (torch.eye(3).to_sparse(), "sparse"),
        ((torch.ones(2), 1), "with tensors or arrays in it"),
        ({"list": [lambda: 1]}, "function"),
    ],
)
def test_what_cannot_be_saved_leaves_no_step(tmp_path, value, message):
    writer = VescaleWriter(tmp_path, step=1)
    with pytest.raises(CheckpointException, match=message):
        save({"w": torch.ones(3), "x": value}, writer)
    with pytest.raises(MissingStepError):
        ck.open(tmp_path)
    assert list((tmp_path / "steps").iterdir()) == []
    save({"w": torch.ones(3)}, writer)  # the same writer goes on
    assert ck.load_dict(tmp_path)["w"].tolist() == [1, 1, 1]
    assert len(list((tmp_path / "steps").iterdir())) == 1


def test_a_failing_commit_leaves_no_step(tmp_path, monkeypatch):
    writer = VescaleWriter(tmp_path, step=1)
    monkeypatch.setattr("vescale_ckpt._interop.dcp_writer.commit", lambda *_: 1 / 0)
    with pytest.raises(CheckpointException, match="ZeroDivisionError"):
        save({"w": torch.ones(3)}, writer)
    with pytest.raises(MissingStepError):
        ck.open(tmp_path)
    assert list((tmp_path / "steps").iterdir()) == []


def begun(writer):
    """Bring a save as far as the plan of all, as `dcp.save` does; return the plans for the ranks."""
    planner = DefaultSavePlanner()
    writer.reset()
    planner.set_up_planner({"w": torch.ones(5000)}, is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, _ = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    return planner, writer.prepare_global_plan(plans)


def test_a_save_that_never_ends_is_cleared_up_with_its_writer(tmp_path):
    writer = VescaleWriter(tmp_path, step=1)
    begun(writer)
    assert [path.name for path in (tmp_path / "steps").glob("*/*")] == ["LEASE"]
    del writer
    collect()
    assert list((tmp_path / "steps").iterdir()) == []


def test_a_save_that_may_be_committed_is_left_alone(tmp_path):
    writer = VescaleWriter(FaultyStorage(open_storage(tmp_path), matching(Fail(5), kind="put", name="COMMIT")), step=1)
    with pytest.raises(CheckpointException, match="input/output error"):
        save({"w": torch.ones(3)}, writer)
    del writer
    collect()
    assert len(list((tmp_path / "steps").iterdir())) == 1


def test_a_forked_child_removes_nothing_of_its_parent(tmp_path, monkeypatch):
    writer = VescaleWriter(tmp_path, step=1)
    begun(writer)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        del writer
        collect()
    assert [path.name for path in (tmp_path / "steps").glob("*/*")] == ["LEASE"]


def states(mesh, whole):
    return {
        "two": distribute_tensor(whole["two"], mesh, [Shard(0), Shard(1)]),
        "rows": distribute_tensor(whole["rows"], mesh, [Replicate(), Shard(0)]),
        "twice": distribute_tensor(whole["twice"], mesh, [Shard(0), Shard(0)]),
        "plain": whole["plain"].clone(),
        "nest": {"list": [whole["plain"].clone() + 1, 5]},
        "step": 3,
    }


def zeros_like(value):
    if isinstance(value, DTensor):
        return distribute_tensor(torch.zeros(value.shape), value.device_mesh, value.placements)
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: zeros_like(child) for key, child in value.items()}
    return [zeros_like(child) for child in value] if isinstance(value, list) else 0


def check(state, whole):
    for name in ("two", "rows", "twice"):
        assert torch.equal(state[name].full_tensor(), whole[name]), name
    assert torch.equal(state["plain"], whole["plain"])
    assert torch.equal(state["nest"]["list"][0], whole["plain"] + 1)
    assert (state["step"], state["nest"]["list"][1]) == (3, 5)


@pytest.mark.ranks(4)
def test_four_ranks_save_and_two_load(rank, tmp_path):
    torch.manual_seed(0)
    whole = {
        "two": torch.randn(9, 7),
        "rows": torch.randn(600, 500),
        "twice": torch.randn(10, 3),
        "plain": torch.randn(5),
    }
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    state = states(mesh, whole)
    for step in (1, 2):
        writer = VescaleWriter(tmp_path, step=step)
        dcp.save(state, storage_writer=writer)
        if rank == 0:
            assert writer.info.step == step
            assert writer.info.bytes_reused == (0 if step == 1 else whole["rows"].nbytes)
        dist.barrier()
    if rank == 0:
        assert ck.verify(tmp_path, "all").ok
        found = ck.load_dict(tmp_path)
        assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    # Our load on all ranks, theirs on two of them, with other layouts.
    target = zeros_like(state)
    ck.load(tmp_path, target)
    check(target, whole)
    group = dist.new_group([0, 1])
    dist.barrier()
    if rank < 2:
        half = DeviceMesh.from_group(group, "cpu")
        other = {
            "two": distribute_tensor(torch.zeros(9, 7), half, [Shard(1)]),
            "rows": distribute_tensor(torch.zeros(600, 500), half, [Shard(1)]),
            "twice": distribute_tensor(torch.zeros(10, 3), half, [Replicate()]),
            "plain": torch.zeros(5),
            "nest": {"list": [torch.zeros(5), 0]},
            "step": 0,
        }
        dcp.load(other, storage_reader=VescaleReader(tmp_path), process_group=group)
        check(other, whole)
    dist.barrier()


@pytest.mark.ranks(2)
def test_a_rank_that_fails_fails_all_and_leaves_no_step(rank, tmp_path):
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": distribute_tensor(torch.ones(8), mesh, [Shard(0)]), f"own{rank}": object() if rank == 1 else 1}
    writer = VescaleWriter(tmp_path, step=1)
    with pytest.raises(CheckpointException, match="own1"):
        dcp.save(state, storage_writer=writer)
    with pytest.raises(MissingStepError):
        ck.open(tmp_path)
    dist.barrier()
    if rank == 0:  # which has written its part, and was not told by the writer's protocol that another one failed
        assert len(list((tmp_path / "steps").iterdir())) == 1
    again = VescaleWriter(tmp_path, step=2)
    with pytest.raises(CheckpointException, match="own1"):
        dcp.save(state, storage_writer=again)
    dist.barrier()
    if rank == 0:
        assert len(list((tmp_path / "steps").iterdir())) == 2
        del again
        collect()
        assert [path.name[:8] for path in (tmp_path / "steps").iterdir()] == ["00000001"]
        writer.reset()
        assert list((tmp_path / "steps").iterdir()) == []
    dist.barrier()
    state[f"own{rank}"] = rank
    dcp.save(state, storage_writer=writer)
    dist.barrier()
    found = ck.load_dict(tmp_path)
    assert (found["own0"], found["own1"], found["w"].tolist()) == (0, 1, [1.0] * 8)
