"""torch.save files: torch.load with weights_only=True is the oracle, and pickles that run code are refused."""

import os
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch

import vescale_ckpt as ck
from vescale_ckpt import CheckpointError, FormatError, MismatchError, StateError
from vescale_ckpt._interop import common as common_module
from vescale_ckpt._interop import export_torch, import_torch
from vescale_ckpt._interop import streaming as streaming_module


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


def state_of_everything():
    tied = torch.randn(3, 4)
    names = "bool uint8 int8 int16 uint16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128"
    tensors = {name: torch.arange(4.0).view(2, 2).to(getattr(torch, name)) for name in names.split()}
    tensors |= {"fp8": torch.ones(5).to(torch.float8_e4m3fn), "empty": torch.zeros(0, 2), "scalar": torch.tensor(3)}
    return {
        "tensors": tensors,
        "tied": [tied, tied],
        "turned": torch.randn(6, 5).t(),
        "ordered": OrderedDict(a=1, b=torch.ones(2)),
        "values": [1, 2.5, None, True, "text", b"bytes", float("inf"), (1, (2, 3)), 1 + 2j],
        5: {"size": torch.Size([2, 3]), "dtype": torch.bfloat16, "set": {1, 2}},
    }


def check_equal(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.contiguous().view(-1).view(torch.uint8).tolist() == b.contiguous().view(-1).view(torch.uint8).tolist()
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            check_equal(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            check_equal(x, y)
    else:
        assert a == b


def test_export_is_read_by_torch_with_weights_only(tmp_path):
    state = state_of_everything()
    ck.save(tmp_path / "run", state)
    report = export_torch(tmp_path / "run", tmp_path / "a.pt")
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    check_equal(state, found)
    assert found["tied"][0] is found["tied"][1]
    assert report.tensors == len(state["tensors"]) + 3
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_import_of_what_torch_saved(tmp_path):
    state = state_of_everything()
    torch.save(state, tmp_path / "a.pt")
    report = import_torch(tmp_path / "a.pt", tmp_path / "run", step=3, metadata={"from": "a"})
    found = ck.load_dict(tmp_path / "run", step=3)
    check_equal(state, found)
    assert found["tied"][0] is found["tied"][1]
    assert report.tensors == len(state["tensors"]) + 3
    assert ck.verify(tmp_path / "run").ok


def test_a_module_and_its_optimizer_resume(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "opt": optimizer.state_dict()}, tmp_path / "a.pt")
    import_torch(tmp_path / "a.pt", tmp_path / "run")
    other = torch.nn.Linear(4, 3)
    resumed = torch.optim.AdamW(other.parameters())
    ck.load(tmp_path / "run", {"model": other, "opt": resumed})
    assert torch.equal(other.weight, model.weight)
    check_equal(optimizer.state_dict()["state"][0], resumed.state_dict()["state"][0])


def test_keys_choose_on_both_ways(tmp_path):
    state = {"model": {"w": torch.ones(2), "v": torch.ones(3)}, "opt": [torch.ones(1), torch.ones(2)], "step": 1}
    torch.save(state, tmp_path / "a.pt")
    import_torch(tmp_path / "a.pt", tmp_path / "run", keys=["model.w", "opt.1"], under="x")
    found = ck.load_dict(tmp_path / "run")["x"]
    assert found.keys() == {"model", "opt"}
    assert found["opt"][0] is None
    export_torch(tmp_path / "run", tmp_path / "b.pt", keys="x.model", dtype=torch.float16)
    check_equal(torch.load(tmp_path / "b.pt", weights_only=True), {"x": {"model": {"w": torch.ones(2).half()}}})
    for keys in ("nothing", ["a", "b"]):
        with pytest.raises(MismatchError, match="is wanted"):
            import_torch(tmp_path / "a.pt", tmp_path / "run", keys=keys)
        with pytest.raises(MismatchError, match="is wanted"):
            export_torch(tmp_path / "run", tmp_path / "c.pt", keys=keys)


def test_numpy_becomes_plain(tmp_path):
    state = {"a": np.arange(3), "s": np.float32(0.5), "local": ck.local({"t": torch.ones(2), "n": 1})}
    ck.save(tmp_path / "run", state)
    report = export_torch(tmp_path / "run", tmp_path / "a.pt")
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    check_equal(found, {"a": torch.arange(3), "s": 0.5, "local": {"t": torch.ones(2), "n": 1}})
    assert report.skipped == ()


def test_a_state_without_tensors_and_one_that_is_a_tensor(tmp_path):
    for number, state in enumerate(({"a": 1, "b": []}, torch.arange(3), {})):
        ck.save(tmp_path / "run", state, step=number)
        export_torch(tmp_path / "run", tmp_path / f"{number}.pt", step=number)
        check_equal(torch.load(tmp_path / f"{number}.pt", weights_only=True), state)
        import_torch(tmp_path / f"{number}.pt", tmp_path / "back", step=number)
        check_equal(ck.load_dict(tmp_path / "back", step=number), state)


def test_code_in_a_pickle_does_not_run(tmp_path):
    torch.save({"w": torch.ones(2), "x": Payload(tmp_path / "made")}, tmp_path / "a.pt")
    with pytest.raises(FormatError, match=r"more than tensors and plain values.*mkdir"):
        import_torch(tmp_path / "a.pt", tmp_path / "run")
    assert not (tmp_path / "made").exists()
    assert not (tmp_path / "run").exists()


def test_old_and_foreign_files_are_refused(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(FormatError, match=r"before torch 1\.6"):
        import_torch(tmp_path / "old.pt", tmp_path / "run")
    with pytest.raises(FormatError, match="not there"):
        import_torch(tmp_path / "no.pt", tmp_path / "run")
    with zipfile.ZipFile(tmp_path / "zip.pt", "w") as archive:
        archive.writestr("a/b", b"c")
    torch.save({"w": torch.ones(2000)}, tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[:4000])
    (tmp_path / "text.pt").write_bytes(b"hello")
    for name in ("zip.pt", "cut.pt", "text.pt"):
        with pytest.raises(FormatError, match=name):
            import_torch(tmp_path / name, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_tensors_that_no_checkpoint_holds(tmp_path):
    torch.save({"sparse": torch.eye(3).to_sparse()}, tmp_path / "a.pt")
    with pytest.raises(StateError, match="sparse"):
        import_torch(tmp_path / "a.pt", tmp_path / "run")


def test_values_that_torch_would_not_read_are_refused(tmp_path):
    ck.save(tmp_path / "run", {"f": frozenset([1])})
    with pytest.raises(StateError, match=r"f: torch.load\(weights_only=True\) would not read a frozenset"):
        export_torch(tmp_path / "run", tmp_path / "f.pt")
    assert not (tmp_path / "f.pt").exists()


def test_the_file_is_kept_unless_overwritten(tmp_path):
    ck.save(tmp_path / "run", {"a": torch.ones(3)})
    (tmp_path / "a.pt").write_bytes(b"mine")
    with pytest.raises(CheckpointError, match="already"):
        export_torch(tmp_path / "run", tmp_path / "a.pt")
    assert (tmp_path / "a.pt").read_bytes() == b"mine"
    export_torch(tmp_path / "run", tmp_path / "a.pt", overwrite=True)
    assert torch.load(tmp_path / "a.pt", weights_only=True)["a"].tolist() == [1, 1, 1]


def test_export_reads_in_blocks(tmp_path, monkeypatch):
    torch.manual_seed(0)
    state = {"w": torch.randn(600, 500)}
    ck.save(tmp_path / "run", state)
    monkeypatch.setattr(common_module, "BLOCK_BYTES", 100_000)
    asked = []
    original = ck.Checkpoint.read_many

    def counted(self, requests, **options):
        requests = list(requests)
        asked.append(sum(request.out.nbytes for request in requests))
        return original(self, requests, **options)

    monkeypatch.setattr(ck.Checkpoint, "read_many", counted)
    seen = []
    export_torch(tmp_path / "run", tmp_path / "a.pt", progress=lambda done, total: seen.append((done, total)))
    assert max(asked) <= 100_000
    assert seen[-1] == (state["w"].nbytes, state["w"].nbytes)
    assert len(seen) == 12
    assert torch.equal(torch.load(tmp_path / "a.pt", weights_only=True)["w"], state["w"])


def test_import_reads_mapped_memory_in_blocks(tmp_path, monkeypatch):
    torch.manual_seed(0)
    state = {"w": torch.randn(600, 500), "t": torch.randn(500, 600).t()}
    torch.save(state, tmp_path / "a.pt")
    monkeypatch.setattr(streaming_module, "BLOCK_BYTES", 1)  # one chunk of 1 MiB at a time
    seen = []
    import_torch(tmp_path / "a.pt", tmp_path / "run", progress=lambda done, total: seen.append(done))
    assert sorted(seen)[-1] == 2 * state["w"].nbytes
    assert len(seen) == 4
    found = ck.load_dict(tmp_path / "run")
    assert torch.equal(found["w"], state["w"])
    assert torch.equal(found["t"], state["t"])
