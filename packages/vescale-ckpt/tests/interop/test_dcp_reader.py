"""dcp.load through our reader, of steps that our own save made."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import vescale_ckpt as ck
from vescale_ckpt.dcp import VescaleReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def load(state, reader, **options):
    dcp.load(state, storage_reader=reader, no_dist=True, **options)


def test_states_of_our_save(tmp_path):
    torch.manual_seed(0)
    tied = torch.randn(300, 200)
    saved = {
        "tied": {"a": tied, "b": tied},
        "turned": torch.randn(30, 50).t(),
        "pair": (torch.ones(2), "x"),
        "opt": {"state": {0: {"exp_avg": torch.randn(7)}}, "groups": [{"lr": 0.1, "params": [0, 1]}]},
        "own": ck.local([1, torch.ones(3)]),
        "none": None,
    }
    ck.save(tmp_path, saved, step=5)
    state = {
        "tied": {"a": torch.zeros(300, 200), "b": torch.zeros(300, 200)},
        "turned": torch.zeros(30, 50).t(),
        "pair": None,
        "opt": {"state": {0: {"exp_avg": torch.zeros(7)}}, "groups": [{"lr": 0.0, "params": []}]},
        "own": [0, torch.zeros(3)],
        "none": 1,
    }
    load(state, VescaleReader(tmp_path))
    assert torch.equal(state["tied"]["a"], tied)
    assert torch.equal(state["tied"]["b"], tied)
    assert torch.equal(state["turned"], saved["turned"])
    assert state["pair"][0].tolist() == [1, 1]
    assert state["pair"][1] == "x"
    assert torch.equal(state["opt"]["state"][0]["exp_avg"], saved["opt"]["state"][0]["exp_avg"])
    assert state["none"] is None
    assert state["own"][0] == 1
    assert state["own"][1].tolist() == [1, 1, 1]


def test_only_what_is_asked_for_is_read(tmp_path, monkeypatch):
    ck.save(tmp_path, {"a": torch.ones(100, 10), "b": torch.ones(1000)})
    asked = []
    original = ck.Checkpoint.read_many

    def counted(self, requests, **options):
        requests = list(requests)
        asked.extend((request.number, request.box.shape) for request in requests)
        return original(self, requests, **options)

    monkeypatch.setattr(ck.Checkpoint, "read_many", counted)
    state = {"a": torch.zeros(100, 10)}
    load(state, VescaleReader(tmp_path))
    assert asked == [(0, (100, 10))]
    assert state["a"].sum() == 1000


def test_dtypes_differ_only_if_it_is_wanted(tmp_path):
    ck.save(tmp_path, {"a": torch.tensor([70000.0, 1.0])})
    state = {"a": torch.zeros(2, dtype=torch.bfloat16)}
    with pytest.raises(CheckpointException, match=r"a: torch.float32 in the checkpoint, torch.bfloat16 in the state"):
        load(state, VescaleReader(tmp_path))
    assert state["a"].tolist() == [0, 0]
    load(state, VescaleReader(tmp_path, cast=True))
    assert torch.equal(state["a"], torch.tensor([70000.0, 1.0]).bfloat16())


def test_missing_keys_wrong_shapes_and_missing_steps(tmp_path):
    ck.save(tmp_path, {"a": torch.ones(2)}, step=3)
    ck.save(tmp_path, {"a": torch.zeros(2)}, step=4)
    with pytest.raises(CheckpointException, match="Missing key"):
        load({"b": torch.ones(2)}, VescaleReader(tmp_path))
    with pytest.raises(CheckpointException, match=r"(?i)size"):
        load({"a": torch.ones(3)}, VescaleReader(tmp_path))
    with pytest.raises(CheckpointException, match="9"):
        load({"a": torch.ones(2)}, VescaleReader(tmp_path, step=9))
    state = {"a": torch.zeros(2), "b": torch.ones(1)}
    load(state, VescaleReader(tmp_path), checkpoint_id="x/step-3", planner=DefaultLoadPlanner(allow_partial_load=True))
    assert state["a"].tolist() == [1, 1]
    assert state["b"].tolist() == [1]


def test_damage_is_found(tmp_path):
    ck.save(tmp_path, {"a": torch.arange(5000.0)})
    (pack,) = tmp_path.glob("steps/*/data/*")
    data = bytearray(pack.read_bytes())
    data[777] ^= 4
    pack.write_bytes(data)
    with pytest.raises(CheckpointException, match=r"CorruptionError.*a"):
        load({"a": torch.zeros(5000)}, VescaleReader(tmp_path))


@pytest.mark.ranks(2)
def test_ranks_read_their_boxes_and_their_own_values(rank, tmp_path):
    torch.manual_seed(0)
    whole = torch.randn(401, 300)
    mesh = init_device_mesh("cpu", (2,))
    saved = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "own": {"seed": ck.local(rank + 10)}}
    ck.save(tmp_path, saved, step=1)
    state = {"w": distribute_tensor(torch.zeros(401, 300), mesh, [Shard(1)]), "own": {"seed": 0}}
    dcp.load(state, storage_reader=VescaleReader(tmp_path))
    assert torch.equal(state["w"].full_tensor(), whole)
    assert state["own"]["seed"] == rank + 10
    dist.barrier()
    ck.save(tmp_path, saved, step=2)
    reader = VescaleReader(tmp_path, step=1 + rank)
    with pytest.raises(CheckpointException, match="rank 0 has opened steps/00000001"):
        dcp.load(state, storage_reader=reader)
