"""Import of what torch.distributed.checkpoint saved, and of folders made to do harm."""

import io
import os
import pickle
import zipfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import vescale_ckpt as ck
from vescale_ckpt import FormatError, MismatchError
from vescale_ckpt._interop import dcp_source as source_module
from vescale_ckpt._interop import import_dcp

NAMES = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 float8_e4m3fn float8_e5m2".split()
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


def raw(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def metadata_of(folder):
    return pickle.loads((folder / ".metadata").read_bytes())


def change(folder, edit):
    metadata = metadata_of(folder)
    changed = edit(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata if changed is None else changed))


@pytest.fixture
def folder(tmp_path):
    dcp.save({"m": {"w": torch.arange(6.0).view(3, 2)}, "n": 5}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def test_every_dtype_value_and_nesting(tmp_path):
    tensors = {name: torch.arange(6.0).view(2, 3).to(getattr(torch, name)) for name in NAMES}
    tensors |= {"empty": torch.zeros(0, 2), "scalar": torch.tensor(1.5), "turned": torch.randn(3, 5).t()}
    state = {
        "t": tensors,
        "list": [torch.ones(2), {"x": 1}],
        "values": {"i": 3, "f": float("-inf"), "none": None, "t": (1, "a"), "l": [1, 2], "b": b"x", "s": "text"},
        "pair": (torch.ones(2), 1),
    }
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    report = import_dcp(tmp_path / "dcp", tmp_path / "run", step=2)
    assert (report.tensors, report.values) == (len(tensors) + 2, 9)
    found = ck.load_dict(tmp_path / "run", step=2)
    for name, tensor in tensors.items():
        assert found["t"][name].dtype == tensor.dtype
        assert found["t"][name].shape == tensor.shape
        assert raw(found["t"][name]) == raw(tensor)
    assert found["values"] == state["values"]
    assert found["list"][1] == {"x": 1}
    assert found["pair"][0].tolist() == [1, 1]
    assert ck.verify(tmp_path / "run").ok


def test_keys_without_a_mapping_stay_flat(folder, tmp_path):
    change(folder, lambda metadata: setattr(metadata, "planner_data", None))
    import_dcp(folder, tmp_path / "run", under="x")
    assert ck.load_dict(tmp_path / "run").keys() == {"x"}
    assert ck.load_dict(tmp_path / "run")["x"].keys() == {"m.w", "n"}
    import_dcp(folder, tmp_path / "run", keys="m.w")
    assert ck.load_dict(tmp_path / "run").keys() == {"m.w"}
    with pytest.raises(MismatchError, match="is wanted"):
        import_dcp(folder, tmp_path / "run", keys="nothing")


@pytest.mark.ranks(4)
def test_shards_of_ranks_become_one_tensor(rank, tmp_path, monkeypatch):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    whole = {name: torch.randn(9, 7) for name in "xyz"}
    state = {
        "x": distribute_tensor(whole["x"], mesh, [Shard(0), Shard(1)]),
        "y": distribute_tensor(whole["y"], mesh, [Replicate(), Shard(0)]),
        "z": distribute_tensor(whole["z"], mesh, [Shard(0), Shard(0)]),
        "step": 3,
    }
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    if rank == 0:
        read = []
        original = source_module._read_chunk

        def counted(name, tensor, box, item):
            read.append((name, box.offset))
            return original(name, tensor, box, item)

        monkeypatch.setattr(source_module, "_read_chunk", counted)
        import_dcp(tmp_path / "dcp", tmp_path / "run")
        assert len(read) == len(set(read)) == 4 + 2 + 4  # each chunk is in memory once, alone
        found = ck.load_dict(tmp_path / "run")
        assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
        assert found["step"] == 3
        assert ck.verify(tmp_path / "run").ok
    dist.barrier()


def test_a_metadata_file_that_runs_code_does_not(tmp_path, folder):
    made = tmp_path / "made"
    for hostile in (
        Payload(made),
        Metadata({}, planner_data=Payload(made)),
        [MetadataIndex("a"), Payload(made)],
    ):
        (folder / ".metadata").write_bytes(pickle.dumps(hostile))
        with pytest.raises(FormatError, match=r"mkdir.*could run code"):
            import_dcp(folder, tmp_path / "run")
    assert not made.exists()
    (folder / ".metadata").write_bytes(b"cos\nsystem\n(S'mkdir " + str(made).encode() + b"'\ntR.")
    with pytest.raises(FormatError, match=r"os\.system"):
        import_dcp(folder, tmp_path / "run")
    for name in (b"builtins\neval", b"builtins\ngetattr", b"torch\nload", b"torch.serialization\nload"):
        (folder / ".metadata").write_bytes(b"c" + name + b"\n.")
        with pytest.raises(FormatError, match="no part of the metadata"):
            import_dcp(folder, tmp_path / "run")
    assert not made.exists()
    assert not (tmp_path / "run").exists()


def test_a_metadata_file_cannot_change_classes(tmp_path, folder):
    # BUILD with a pair sets attributes of whatever is on the stack, classes too.
    module = b"ctorch.distributed.checkpoint.metadata\n"
    poison = module + b"Metadata\n(N}S'__reduce__'\nI1\nstb."
    (folder / ".metadata").write_bytes(poison)
    before = Metadata.__reduce__
    with pytest.raises(FormatError):
        import_dcp(folder, tmp_path / "run")
    assert Metadata.__reduce__ is before
    change_back = Metadata({})
    assert pickle.loads(pickle.dumps(change_back)) == change_back


def test_an_object_that_runs_code_does_not(tmp_path):
    made = tmp_path / "made"
    dcp.save({"w": torch.ones(2), "x": Payload(made)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(FormatError, match=r"x: holds more than tensors and plain values.*mkdir"):
        import_dcp(tmp_path / "dcp", tmp_path / "run")
    assert not made.exists()
    import_dcp(tmp_path / "dcp", tmp_path / "run", keys="w")
    assert ck.load_dict(tmp_path / "run")["w"].tolist() == [1, 1]


def test_a_tensor_that_is_something_else_is_refused(tmp_path, folder):
    for other in (torch.ones(2, 3), torch.ones(3, 2).int(), {"a": 1}, Payload(tmp_path / "made")):
        buffer = io.BytesIO()
        torch.save(other, buffer)
        (folder / "other.distcp").write_bytes(buffer.getvalue())

        change(folder, place("other.distcp", len(buffer.getvalue())))
        with pytest.raises(FormatError, match=r"other\.distcp: m\.w: (must hold|holds more)"):
            import_dcp(folder, tmp_path / "run")
    assert not (tmp_path / "made").exists()


def test_packed_entries_are_refused(tmp_path, folder):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10_000_000))
    (folder / "bomb.distcp").write_bytes(buffer.getvalue())

    change(folder, place("bomb.distcp", len(buffer.getvalue())))
    with pytest.raises(FormatError, match="compressed entries"):
        import_dcp(folder, tmp_path / "run")


def tensor_entry(size=(3, 2), chunks=(((0, 0), (3, 2)),), dtype=torch.float32):
    parts = [ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)) for offset, sizes in chunks]
    return TensorStorageMetadata(TensorProperties(dtype), torch.Size(size), parts)


def place(name, size=10):
    def edit(metadata):
        metadata.storage_data[MetadataIndex("m.w", [0, 0])] = _StorageInfo(name, 0, size)

    return edit


def length(offset, size):
    def edit(metadata):
        metadata.storage_data[MetadataIndex("m.w", [0, 0])] = _StorageInfo("__0_0.distcp", offset, size)

    return edit


def entry(value):
    def edit(metadata):
        metadata.state_dict_metadata["m.w"] = value
        if isinstance(value, TensorStorageMetadata) and isinstance(value.chunks, list):
            old = metadata.storage_data[MetadataIndex("m.w", [0, 0])]
            for chunk in value.chunks:
                metadata.storage_data.setdefault(MetadataIndex("m.w", chunk.offsets), old)

    return edit


def path(value):
    def edit(metadata):
        metadata.planner_data["m.w"] = value

    return edit


def forget(metadata):
    metadata.storage_data.clear()


@pytest.mark.parametrize(
    "edit",
    [
        place("../secret"),
        place("/etc/passwd"),
        place("a/../../b"),
        place("missing.distcp"),
        place(""),
        place(5),
        length(-1, 10),
        length(0, 1 << 40),
        length(1 << 70, 1),
        length(0, 0),
        length(3, 1000),
        entry(tensor_entry(chunks=(((0, 0), (2, 2)),))),
        entry(tensor_entry(chunks=(((0, 0), (3, 2)), ((1, 0), (1, 2))))),
        entry(tensor_entry(chunks=(((0, 0), (4, 2)),))),
        entry(tensor_entry(chunks=(((0,), (6,)),))),
        entry(tensor_entry(size=(1 << 62, 1 << 62))),
        entry(tensor_entry(dtype=torch.float64)),
        entry(tensor_entry(dtype=torch.qint8)),
        entry(BytesStorageMetadata()),
        entry(5),
        path(()),
        path("m.w"),
        path(("n", "below")),
        path((0,)),
        path(("m", -1)),
        path(("m", 10**9)),
        path((None,)),
        path(tuple("a" * 1000)),
        forget,
        lambda metadata: {"not": "metadata"},
        lambda metadata: setattr(metadata, "storage_data", None),
        lambda metadata: setattr(metadata, "state_dict_metadata", [1]),
    ],
)
def test_metadata_that_makes_no_sense_is_refused(tmp_path, folder, edit):
    (tmp_path / "secret").write_bytes(b"secret")
    change(folder, edit)
    with pytest.raises(FormatError):
        import_dcp(folder, tmp_path / "run")
    assert not list(tmp_path.glob("run/steps/*/COMMIT"))


def test_a_link_out_of_the_folder_is_not_followed(tmp_path, folder):
    os.rename(folder / "__0_0.distcp", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", folder / "__0_0.distcp")
    with pytest.raises(FormatError, match="lies outside"):
        import_dcp(folder, tmp_path / "run")


def test_damaged_and_missing_metadata(tmp_path, folder):
    data = (folder / ".metadata").read_bytes()
    for cut in range(0, len(data), 37):
        (folder / ".metadata").write_bytes(data[:cut])
        with pytest.raises(FormatError):
            import_dcp(folder, tmp_path / "run")
    os.remove(folder / ".metadata")
    with pytest.raises(FormatError, match=r"no \.metadata in it"):
        import_dcp(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_changed_bytes_of_the_metadata_never_run_anything(tmp_path, folder):
    data = (folder / ".metadata").read_bytes()
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        at = int(torch.randint(len(data), (1,), generator=generator))
        changed = bytearray(data)
        changed[at] ^= 1 << int(torch.randint(8, (1,), generator=generator))
        (folder / ".metadata").write_bytes(changed)
        try:
            source_module.read_dcp_metadata(folder)
        except FormatError:
            continue
