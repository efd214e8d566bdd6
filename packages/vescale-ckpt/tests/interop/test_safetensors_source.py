"""Import from safetensors: what the library wrote is read, and what is malformed is refused."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

import vescale_ckpt as ck
from vescale_ckpt import CheckpointError, FormatError, MismatchError
from vescale_ckpt._interop import import_safetensors
from vescale_ckpt._interop import safetensors_source as source_module
from vescale_ckpt._interop import streaming as streaming_module

DTYPES = "bool uint8 int8 int16 uint16 int32 int64 float16 bfloat16 float32 float64 float8_e4m3fn float8_e5m2".split()


def raw(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_every_dtype_that_the_library_writes(tmp_path):
    state = {name: torch.arange(6.0).view(2, 3).to(getattr(torch, name)) for name in DTYPES}
    state |= {"empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5)}
    save_file(state, tmp_path / "a.safetensors", {"format": "pt", "from": "there"})
    report = import_safetensors(tmp_path / "a.safetensors", tmp_path / "run", step=5)
    assert (report.tensors, report.values, report.info.step) == (len(state), 0, 5)
    found = ck.load_dict(tmp_path / "run", step=5)
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].float(), tensor.float()), name
    with ck.open(tmp_path / "run") as checkpoint:
        assert checkpoint.metadata == {"from": "there"}
    assert ck.verify(tmp_path / "run").ok


def test_a_folder_with_an_index_goes_into_a_dict(tmp_path):
    save_file({"a": torch.ones(2), "stray": torch.ones(1)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "model-2.safetensors")
    weights = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    for number, src in enumerate((tmp_path, tmp_path / "model.safetensors.index.json")):
        import_safetensors(src, tmp_path / f"run{number}", under="train.model", rename={"a": "c"})
        found = ck.load_dict(tmp_path / f"run{number}")
        assert found["train"]["model"].keys() == {"c", "b"}
    target = {"train": {"model": {"c": torch.zeros(2), "b": torch.ones(3)}}}
    ck.load(tmp_path / "run0", target)
    assert target["train"]["model"]["c"].tolist() == [1, 1]


def test_a_folder_without_an_index_is_all_of_its_files(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "y.safetensors")
    import_safetensors(tmp_path, tmp_path / "run", keys="b")
    assert ck.load_dict(tmp_path / "run").keys() == {"b"}
    save_file({"a": torch.ones(2)}, tmp_path / "z.safetensors")
    with pytest.raises(FormatError, match=r"z\.safetensors: a is in .*x\.safetensors too"):
        import_safetensors(tmp_path, tmp_path / "run")


def test_steps_are_not_replaced_by_chance(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    import_safetensors(tmp_path / "x.safetensors", tmp_path / "run")
    assert import_safetensors(tmp_path / "x.safetensors", tmp_path / "run").info.step == 1
    with pytest.raises(CheckpointError, match="overwrite=True"):
        import_safetensors(tmp_path / "x.safetensors", tmp_path / "run", step=1)
    import_safetensors(tmp_path / "x.safetensors", tmp_path / "run", step=1, overwrite=True)
    with pytest.raises(MismatchError, match="nothing"):
        import_safetensors(tmp_path / "x.safetensors", tmp_path / "run", keys="nothing")


def test_data_is_read_in_blocks_and_once(tmp_path, monkeypatch):
    torch.manual_seed(0)
    state = {"w": torch.randn(999, 701), "v": torch.randn(70_000).bfloat16()}
    save_file(state, tmp_path / "a.safetensors")
    monkeypatch.setattr(streaming_module, "BLOCK_BYTES", 1 << 20)
    sizes = []
    original = source_module.read_into

    def counted(file, offset, out, path):
        sizes.append(out.numel())
        original(file, offset, out, path)

    monkeypatch.setattr(source_module, "read_into", counted)
    seen = []
    import_safetensors(
        tmp_path / "a.safetensors", tmp_path / "run", progress=lambda done, total: seen.append((done, total))
    )
    total = sum(tensor.nbytes for tensor in state.values())
    assert max(sizes) <= 1 << 20
    assert sum(sizes) == total
    assert len(sizes) == 4
    assert seen[-1] == (total, total)
    found = ck.load_dict(tmp_path / "run")
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_an_import_refers_to_what_a_save_has_written(tmp_path):
    torch.manual_seed(0)
    state = {"w": torch.randn(1 << 20)}
    ck.save(tmp_path / "run", state)
    save_file(state, tmp_path / "a.safetensors")
    assert import_safetensors(tmp_path / "a.safetensors", tmp_path / "run").info.bytes_reused == state["w"].nbytes


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        struct.pack("<Q", 1 << 60) + b"{}",
        raw(b"{not json"),
        raw({"a": {**F32, "shape": [3]}}, bytes(8)),
        raw({"a": {**F32, "data_offsets": [0, 16]}}, bytes(8)),
        raw({"a": {**F32, "shape": [-2]}}, bytes(8)),
        raw({"a": {**F32, "shape": [1 << 62, 1 << 62]}}, bytes(8)),
        raw({"a": {**F32, "dtype": "PICKLE"}}, bytes(8)),
        raw({"a": F32, "b": F32}, bytes(8)),
        raw({"a": F32}, bytes(9)),
        raw({"a": {**F32, "data_offsets": [4, 12]}}, bytes(12)),
        raw({"a": F32, "__metadata__": {"x": 1}}, bytes(8)),
    ],
)
def test_malformed_files_are_refused_before_anything_is_written(tmp_path, content):
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(FormatError, match=r"a\.safetensors"):
        import_safetensors(tmp_path / "a.safetensors", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "index",
    [
        "[]",
        "{",
        '{"weight_map": {}}',
        '{"weight_map": {"a": "../x.safetensors"}}',
        '{"weight_map": {"a": "/etc/passwd"}}',
        '{"weight_map": {"a": ".."}}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "missing.safetensors"}}',
        '{"weight_map": {"b": "x.safetensors"}}',
        "[" * 100_000,
    ],
)
def test_malformed_indexes_are_refused(tmp_path, index):
    folder = tmp_path / "in"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, folder / "x.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(FormatError):
        import_safetensors(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    save_file({"a": torch.ones(4096)}, tmp_path / "x.safetensors")
    opened = source_module.SafetensorsFile(tmp_path / "x.safetensors")
    tensor = opened.tensors["a"]
    with open(tmp_path / "x.safetensors", "rb+") as file:
        file.truncate(tensor.stop - 100)
    fetch = opened.reader(tensor)
    with pytest.raises(FormatError, match="longer when it was opened"):
        fetch(ck._geometry.Piece(ck._geometry.Box((0,), (4096,)), 0, 4096))
    opened.close()


def test_places_that_hold_nothing(tmp_path):
    with pytest.raises(FormatError, match="not there"):
        import_safetensors(tmp_path / "no", tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FormatError, match="no \\*\\.safetensors"):
        import_safetensors(tmp_path / "empty", tmp_path / "run")
    with pytest.raises(ValueError, match="under"):
        import_safetensors(tmp_path / "empty", tmp_path / "run", under="a..b")
    with pytest.raises(ValueError, match="src"):
        import_safetensors("s3://bucket/a", tmp_path / "run")
