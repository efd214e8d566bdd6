"""Export as a folder of torch.distributed.checkpoint: torch's own load is the oracle."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import vescale_ckpt as ck
from vescale_ckpt import CheckpointError, StateError
from vescale_ckpt._interop import dcp as dcp_module
from vescale_ckpt._interop import export_dcp

NAMES = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 float8_e4m3fn float8_e5m2".split()
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def raw(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def test_torch_loads_every_dtype_and_value(tmp_path):
    tensors = {name: torch.arange(6.0).view(2, 3).to(getattr(torch, name)) for name in NAMES}
    tensors |= {"empty": torch.zeros(0, 2), "scalar": torch.tensor(1.5), "turned": torch.randn(3, 5).t()}
    state = {"t": tensors, "list": [torch.ones(2), {"x": 1}], "step": 3, "inf": float("inf"), "tuple": (1, 2)}
    ck.save(tmp_path / "run", state)
    report = export_dcp(tmp_path / "run", tmp_path / "dcp")
    target = {
        "t": {name: torch.zeros_like(tensor) for name, tensor in tensors.items()},
        "list": [torch.zeros(2), {"x": 0}],
        "step": 0,
        "inf": 0.0,
        "tuple": None,
    }
    dcp.load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name, tensor in tensors.items():
        assert raw(target["t"][name]) == raw(tensor), name
    assert target["list"][0].tolist() == [1, 1]
    assert (target["list"][1], target["step"], target["inf"], target["tuple"]) == ({"x": 1}, 3, float("inf"), (1, 2))
    assert report.tensors == len(tensors) + 1
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_large_tensors_are_written_in_chunks(tmp_path, monkeypatch):
    torch.manual_seed(0)
    state = {"w": torch.randn(100, 70), "row": torch.randn(1, 9000), "s": torch.randn(50)}
    ck.save(tmp_path / "run", state)
    monkeypatch.setattr(dcp_module, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(dcp_module, "FILE_BYTES", 20_000)
    asked = []
    original = ck.Checkpoint.read_many

    def counted(self, requests, **options):
        requests = list(requests)
        asked.append(sum(request.out.nbytes for request in requests))
        return original(self, requests, **options)

    monkeypatch.setattr(ck.Checkpoint, "read_many", counted)
    seen = []
    report = export_dcp(tmp_path / "run", tmp_path / "dcp", progress=lambda done, total: seen.append((done, total)))
    assert max(asked) <= 4096
    assert seen[-1] == (report.bytes, report.bytes)
    assert report.bytes == sum(tensor.nbytes for tensor in state.values())
    assert len(report.files) > 3
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(target[name], tensor) for name, tensor in state.items())


def test_only_dicts(tmp_path):
    ck.save(tmp_path / "run", [torch.ones(2)])
    with pytest.raises(StateError, match="saves dicts, but this is a list"):
        export_dcp(tmp_path / "run", tmp_path / "dcp")
    ck.save(tmp_path / "run", {"a": {"b": 1}, "a.b": 2})
    with pytest.raises(StateError, match=r"duplicated flatten key a\.b"):
        export_dcp(tmp_path / "run", tmp_path / "dcp")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_folder_is_replaced_only_if_asked_for(tmp_path):
    ck.save(tmp_path / "run", {"a": torch.ones(2), "b": torch.ones(2)})
    export_dcp(tmp_path / "run", tmp_path / "dcp")
    with pytest.raises(CheckpointError, match="already"):
        export_dcp(tmp_path / "run", tmp_path / "dcp")
    export_dcp(tmp_path / "run", tmp_path / "dcp", keys="b", dtype="bfloat16", overwrite=True)
    target = {"b": torch.zeros(2, dtype=torch.bfloat16)}
    dcp.load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert target["b"].tolist() == [1, 1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dcp", "run"]


@pytest.mark.ranks(2)
def test_ranks_load_their_shards(rank, tmp_path):
    torch.manual_seed(0)
    whole = torch.randn(7, 6)
    mesh = init_device_mesh("cpu", (2,))
    ck.save(tmp_path / "run", {"w": distribute_tensor(whole, mesh, [Shard(1)])})
    if rank == 0:
        export_dcp(tmp_path / "run", tmp_path / "dcp")
    dist.barrier()
    target = {"w": distribute_tensor(torch.zeros(7, 6), mesh, [Shard(0)])}
    dcp.load(target, checkpoint_id=tmp_path / "dcp")
    assert torch.equal(target["w"].full_tensor(), whole)
