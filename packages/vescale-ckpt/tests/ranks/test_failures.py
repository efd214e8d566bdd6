"""What goes wrong on one rank reaches all of them, none waits for ever, and the store stays as it was."""

import json
import os
import pathlib
import signal

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import vescale_ckpt as ck
from vescale_ckpt import CheckpointError, MismatchError, RanksError, StateError, StorageError
from vescale_ckpt._storage import open_storage
from vescale_ckpt.testing import Fail, FaultyStorage, Slow, matching
from vescale_testing import RankFailure, run_ranks

SECONDS = 20.0
"""Ranks give up after that; far more than a save needs, and less than the time-out of a test."""


def sharded(value):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(torch.full((8, 3000), float(value)), mesh, [Shard(0)]), "step": value}


def steps(path):
    return ck.Checkpointer(path).steps()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", ["value", "small tensor", "shape", "dtype", "kind"])
def test_what_differs_between_ranks_is_named_on_all(rank, tmp_path, kind):
    odd = rank == 2
    different = {
        "value": 0.5 if odd else 0.25,
        "small tensor": torch.tensor([1.0, 2.0 + odd]),
        "shape": torch.zeros(500 + odd),
        "dtype": torch.zeros(500, dtype=torch.float64 if odd else torch.float32),
        "kind": torch.zeros(500) if odd else 1,
    }[kind]
    state = {"model": {"fine": torch.ones(500), "rng": different}}
    with pytest.raises(RanksError, match=r"model\.rng.*2"):
        ck.save(tmp_path, state, step=1, timeout=SECONDS)
    assert steps(tmp_path) == []
    dist.barrier()
    ck.save(tmp_path, {"model": {"fine": torch.ones(500), "rng": ck.local(different)}}, step=1, timeout=SECONDS)
    assert steps(tmp_path) == [1]


@pytest.mark.ranks(2)
def test_one_element_of_large_replicas_that_differs_is_found_if_asked(rank, tmp_path):
    state = {"w": torch.zeros(10000), "v": torch.zeros(10000)}
    state["v"][777] += rank  # in no sample
    with pytest.raises(RanksError, match=r'v.*differing="first"'):
        ck.save(tmp_path, state, verify_replicas=True, timeout=SECONDS)
    dist.barrier()
    assert steps(tmp_path) == []
    ck.save(tmp_path, state, step=1, timeout=SECONDS)
    state["v"][777] += 5
    ck.save(tmp_path, state, step=2, verify_replicas=True, differing="first", dedup=None, timeout=SECONDS)
    assert ck.load_dict(tmp_path)["v"][777] == 5
    assert steps(tmp_path) == [1, 2]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", ["plain", "strided", "conjugate", "placed"])
def test_large_replicas_of_other_values_are_refused_or_saved_whole(rank, tmp_path, kind):
    values = torch.full((200, 300), rank + 1j if kind == "conjugate" else float(rank))
    if kind == "strided":
        values = values.t().contiguous().t()
    elif kind == "conjugate":
        values = values.conj()
    elif kind == "placed":
        values = distribute_tensor(values, init_device_mesh("cpu", (3,)), [Replicate()], src_data_rank=None)
    state = {"same": torch.ones(70000), "model": {"w": values}}
    with pytest.raises(RanksError, match=r'model\.w is a replicated tensor.*ranks 0 and 1.*differing="first"'):
        ck.save(tmp_path, state, step=1, timeout=SECONDS)
    dist.barrier()
    assert steps(tmp_path) == []
    ck.save(tmp_path, state, step=1, differing="first", timeout=SECONDS)
    assert set(ck.load_dict(tmp_path)["model"]["w"].view(-1).tolist()) == {-1j if kind == "conjugate" else 0.0}
    assert bool((ck.load_dict(tmp_path)["same"] == 1).all())


@pytest.mark.ranks(2)
def test_a_model_with_batch_norm_in_ddp(rank, tmp_path):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    model = torch.nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8, generator=torch.Generator().manual_seed(rank)) + rank).square().sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "loss": float(rank)}
    with pytest.raises(RanksError, match=r'(?s)differing="first"'):
        ck.save(tmp_path, state, step=1, timeout=SECONDS)
    dist.barrier()
    with ck.Checkpointer(tmp_path, differing="first", timeout=SECONDS) as checkpointer:
        checkpointer.save(1, state)
    expected = [layers[1].running_mean.clone(), layers[1].running_var.clone()]
    for one in expected:
        dist.broadcast(one, 0)
    with torch.no_grad():
        layers[1].running_mean.fill_(7)
        layers[1].running_var.fill_(7)
    ck.load(tmp_path, state, timeout=SECONDS)
    assert torch.equal(layers[1].running_mean, expected[0])
    assert torch.equal(layers[1].running_var, expected[1])
    assert state["loss"] == 0.0
    assert {"model.module.1.running_mean"} <= set(ck.open(tmp_path).names)
    # As another way out: the buffers made equal.
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
    ck.save(tmp_path, state, step=2, timeout=SECONDS)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("background", [False, True])
def test_a_rank_whose_state_cannot_be_saved_ends_the_save_on_all(rank, tmp_path, background):
    save = ck.async_save if background else ck.save
    state = {"w": torch.ones(500), "model": {"hook": (lambda: None) if rank == 3 else None}}
    with pytest.raises(StateError if rank == 3 else RanksError, match=r"model\.hook"):
        save(tmp_path, state, step=1, timeout=SECONDS)
    state["model"]["hook"] = None
    ck.save(tmp_path, state, step=1, timeout=SECONDS)
    assert steps(tmp_path) == [1]


@pytest.mark.ranks(4)
def test_ranks_that_save_other_steps_are_told(rank, tmp_path):
    with pytest.raises(RanksError, match=r"save of step 6.* where rank 0 is at .*save of step 5"):
        ck.save(tmp_path, {"w": torch.ones(9)}, step=5 + (rank == 1), timeout=SECONDS)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("place", [{"kind": "write"}, {"kind": "close"}, {"name": "w00002.json"}])
def test_a_rank_that_cannot_write_ends_the_save_on_all(rank, tmp_path, background, place):
    ck.save(tmp_path, sharded(1), step=1, timeout=SECONDS)
    storage = open_storage(tmp_path)
    if rank == 2:
        storage = FaultyStorage(storage, matching(Fail(28), **place))

    def save_step_2():
        saved = (ck.async_save if background else ck.save)(storage, sharded(2), step=2, timeout=SECONDS)
        return saved.wait() if background else saved

    with pytest.raises(StorageError if rank == 2 else RanksError, match="disk is full"):
        save_step_2()
    dist.barrier()
    assert steps(tmp_path) == [1]
    assert ck.load_dict(tmp_path)["step"] == 1
    dist.barrier()
    ck.save(storage, sharded(3), step=2, timeout=SECONDS)
    assert steps(tmp_path) == [1, 2]
    assert bool((ck.load_dict(tmp_path)["w"] == 3).all())


class MeetsAfterRemoval(FaultyStorage):
    """A storage that waits for the other ranks when it has removed a folder."""

    def remove_folder(self, folder):
        super().remove_folder(folder)
        dist.barrier()


@pytest.mark.ranks(4)
def test_a_rank_whose_files_went_after_another_failed_tells_what_that_one_said(rank, tmp_path):
    # When all are about to write rank 2 fails; the first rank removes the folder, and then rank 1 writes to it.
    met = []

    def plan(operation):
        if operation.kind != "write" or met:
            return None
        met.append(operation)
        dist.barrier()
        if rank == 1:
            dist.barrier()
        return Fail(28) if rank == 2 else None

    storage = (MeetsAfterRemoval if rank == 0 else FaultyStorage)(open_storage(tmp_path), plan)
    with pytest.raises(StorageError if rank == 2 else RanksError, match="disk is full"):
        ck.save(storage, sharded(1), step=1, timeout=SECONDS)
    if rank >= 2:
        dist.barrier()
    dist.barrier()
    assert steps(tmp_path) == []


@pytest.mark.ranks(3)
@pytest.mark.parametrize("what", ["save", "load"])
def test_an_error_of_the_save_before_that_only_one_rank_has_not_seen(rank, tmp_path, what):
    ck.save(tmp_path, sharded(1), step=1, timeout=SECONDS)
    storage = open_storage(tmp_path)
    if rank == 1:
        storage = FaultyStorage(storage, matching(Fail(28), kind="write"))
    handle = ck.async_save(storage, sharded(2), step=2, timeout=SECONDS)
    if rank != 0:
        with pytest.raises((StorageError, RanksError), match="disk is full"):
            handle.wait()

    def next_call():
        if what == "save":
            ck.save(tmp_path, sharded(3), step=3, timeout=SECONDS)
        else:
            ck.load(tmp_path, sharded(0), timeout=SECONDS)

    with pytest.raises(RanksError, match="disk is full"):  # rank 0 passes on what it has not looked at
        next_call()
    ck.save(tmp_path, sharded(3), step=3, timeout=SECONDS)
    assert steps(tmp_path) == [1, 3]


@pytest.mark.ranks(3)
def test_a_rank_that_cannot_open_the_store_ends_both_on_all(rank, tmp_path):
    path = tmp_path / "store"
    if rank == 1:
        (tmp_path / "file").write_text("a file, no folder")
        path = tmp_path / "file"
    for call in (ck.save, ck.load):
        with pytest.raises((CheckpointError, OSError) if rank == 1 else RanksError):
            call(path, {"w": torch.ones(3)}, timeout=SECONDS)


@pytest.mark.ranks(4)
def test_a_first_rank_that_cannot_commit_ends_the_save_on_all(rank, tmp_path):
    storage = open_storage(tmp_path)
    if rank == 0:
        storage = FaultyStorage(storage, matching(Fail(5), name="manifest.json"))
    with pytest.raises(StorageError if rank == 0 else RanksError, match=r"manifest\.json"):
        ck.save(storage, sharded(1), step=1, timeout=SECONDS)
    dist.barrier()
    assert steps(tmp_path) == []
    assert list(pathlib.Path(tmp_path).glob("steps/*")) == []


@pytest.mark.ranks(4)
def test_training_goes_on_while_ranks_save(rank, tmp_path):
    mesh = init_device_mesh("cpu", (4,))
    w = distribute_tensor(torch.zeros(64, 5000), mesh, [Shard(0)])
    bias, handles = torch.zeros(5), []
    for step in range(4):
        handles.append(
            ck.async_save(tmp_path, {"w": w, "b": bias, "own": ck.local(torch.tensor(rank * step))}, step=step)
        )
        w.to_local().add_(1)  # in place, right after the call
        bias.add_(1)
        dist.all_reduce(torch.ones(1000))
    assert [handle.wait(SECONDS).step for handle in handles] == [0, 1, 2, 3]
    for step in range(4):
        target = {"w": distribute_tensor(torch.zeros(64, 5000), mesh, [Shard(1)]), "b": torch.zeros(5)}
        target["own"] = ck.local(torch.tensor(-1))
        ck.load(tmp_path, target, step=step)
        assert bool((target["w"].to_local() == step).all())
        assert target["b"].tolist() == [step] * 5
        assert int(target["own"].value) == rank * step


@pytest.mark.ranks(4)
def test_a_wrong_shape_on_one_rank_ends_the_load_on_all(rank, tmp_path):
    ck.save(tmp_path, {"w": torch.ones(500), "v": torch.ones(500)}, step=1)
    target = {"w": torch.zeros(500), "v": torch.zeros(501 if rank == 3 else 500)}
    with pytest.raises(MismatchError, match=r"v: shape \[501\].*rank 3"):
        ck.load(tmp_path, target, timeout=SECONDS)
    assert target["w"].sum() == target["v"].sum() == 0
    with pytest.raises(StateError if rank == 1 else RanksError, match="w"):
        ck.load(tmp_path, {"w": torch.zeros(500, device="meta" if rank == 1 else "cpu")}, timeout=SECONDS)
    target = {"w": torch.zeros(500), "v": torch.zeros(500)}
    ck.load(tmp_path, target, timeout=SECONDS)
    assert target["v"].sum() == 500


def save_and_lose_a_rank(rank, path, killed, place):
    """Save step 1, then step 2, in which one rank is killed; the others leave a note of what they were told."""
    ck.save(path, sharded(1), step=1, timeout=SECONDS)
    storage = open_storage(path)
    if rank == killed:
        storage = FaultyStorage(storage, matching(Slow(lambda: os.kill(os.getpid(), signal.SIGKILL)), **place))
    try:
        ck.save(storage, sharded(2), step=2, timeout=1.0)
    except RanksError as error:
        (pathlib.Path(path) / f"told-{rank}").write_text(json.dumps(str(error)))
    else:
        raise AssertionError("the save is said to have worked")


@pytest.mark.parametrize("place", [{"kind": "write"}, {"name": "w00002.json"}], ids=["data", "index"])
def test_a_rank_that_is_killed_ends_the_save_on_all(tmp_path, place):
    with pytest.raises(RankFailure, match="SIGKILL"):
        run_ranks(save_and_lose_a_rank, 4, kwargs={"path": str(tmp_path), "killed": 2, "place": place})
    for rank in (0, 1, 3):
        told = json.loads((tmp_path / f"told-{rank}").read_text())
        assert "rank 2" in told, (rank, told)
        assert "died" in told
    assert steps(tmp_path) == [1]
    assert bool((ck.load_dict(tmp_path)["w"] == 1).all())
    ck.save(tmp_path, {"w": torch.zeros(3)}, step=2)
    assert steps(tmp_path) == [1, 2]
