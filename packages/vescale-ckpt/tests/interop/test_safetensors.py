"""Export to safetensors: the library itself opens what was written, and Hugging Face's layout is kept."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import vescale_ckpt as ck
from vescale_ckpt import CheckpointError, MismatchError, MissingStepError, StateError
from vescale_ckpt._interop import common as common_module
from vescale_ckpt._interop import export_safetensors

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def sample(dtype):
    return torch.arange(0, 24, dtype=torch.float32).view(2, 3, 4).to(dtype)


def same(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and bytes(a.contiguous().view(torch.uint8).view(-1).tolist())
        == bytes(b.contiguous().view(torch.uint8).view(-1).tolist())
    )


def test_every_dtype_opens_with_the_library(tmp_path):
    state = {str(dtype): sample(dtype) for dtype in DTYPES}
    state |= {"empty": torch.zeros(0, 3), "turned": sample(torch.float32).transpose(0, 2)}
    scalar = torch.tensor(7)
    ck.save(tmp_path / "run", {**state, "scalar": scalar})
    report = export_safetensors(tmp_path / "run", tmp_path / "a.safetensors")
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == {*state, "scalar"}
    assert all(same(found[name], tensor) for name, tensor in state.items())
    assert found["scalar"].shape == ()
    assert found["scalar"].item() == 7
    assert report.tensors == len(found)
    assert report.bytes == sum(tensor.nbytes for tensor in found.values())
    assert report.files == (str(tmp_path / "a.safetensors"),)


def test_complex_numbers_that_the_library_knows(tmp_path):
    ck.save(tmp_path / "run", {"c": torch.tensor([1 + 2j, 4 - 3j])})
    export_safetensors(tmp_path / "run", tmp_path / "a.safetensors")
    header = (tmp_path / "a.safetensors").read_bytes()[8:]
    assert b'"C64"' in header
    assert header[-16:] == torch.tensor([1.0, 2.0, 4.0, -3.0]).numpy().tobytes()


def test_a_dtype_that_the_format_lacks_is_an_error_that_names_it(tmp_path):
    ck.save(tmp_path / "run", {"c": torch.zeros(2, dtype=torch.complex128), "w": torch.ones(2)})
    with pytest.raises(StateError, match="c: complex128 has no name in safetensors"):
        export_safetensors(tmp_path / "run", tmp_path / "a.safetensors")
    assert not list(tmp_path.glob("*.safetensors"))
    assert not list(tmp_path.glob(".*"))
    export_safetensors(tmp_path / "run", tmp_path / "a.safetensors", keys="w")
    assert load_file(tmp_path / "a.safetensors").keys() == {"w"}


def test_shards_and_index_are_those_of_hugging_face(tmp_path):
    layers = {f"layers.{n}.weight": torch.full((256,), float(n)) for n in range(5)}  # 1 KiB each
    ck.save(tmp_path / "run", {"model": layers, "step": 3})
    report = export_safetensors(tmp_path / "run", tmp_path / "hf", format="hf", max_shard_bytes=2048)
    names = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert sorted(p.name for p in (tmp_path / "hf").iterdir()) == [*names, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 5 * 1024}
    assert index["weight_map"] == {f"layers.{n}.weight": names[n // 2] for n in range(5)}
    for name in names:
        with safe_open(tmp_path / "hf" / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for key in file.keys():  # noqa: SIM118 - not a dict
                assert index["weight_map"][key] == name
                assert torch.equal(file.get_tensor(key), layers[key])
    assert report.skipped == ()


def test_a_tensor_larger_than_a_shard_has_its_own(tmp_path):
    ck.save(tmp_path / "run", {"a": torch.zeros(10), "b": torch.zeros(1000), "c": torch.zeros(10)})
    export_safetensors(tmp_path / "run", tmp_path / "out", max_shard_bytes="100B")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert list(index["weight_map"].values()) == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


def test_tied_tensors_stand_once_under_their_first_name_for_hugging_face(tmp_path):
    embed = torch.randn(4, 3)
    state = {"model": {"embed.weight": embed, "a.head.weight": embed}}
    ck.save(tmp_path / "run", state)
    report = export_safetensors(tmp_path / "run", tmp_path / "hf", format="hf")
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == {"embed.weight"}
    assert report.tied == {"a.head.weight": "embed.weight"}
    export_safetensors(tmp_path / "run", tmp_path / "all.safetensors", prefix="model.")
    found = load_file(tmp_path / "all.safetensors")
    assert torch.equal(found["a.head.weight"], embed)
    assert torch.equal(found["embed.weight"], embed)


def test_the_prefix_is_cut_only_where_the_state_has_a_dict_model(tmp_path):
    ck.save(tmp_path / "flat", {"model.embed": torch.ones(1), "lm_head": torch.ones(1)})
    export_safetensors(tmp_path / "flat", tmp_path / "hf", format="hf")
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == {"model.embed", "lm_head"}


def test_names_and_dtypes_can_be_changed(tmp_path):
    ck.save(
        tmp_path / "run", {"net.w": torch.tensor([1.0, 1.0009765625]), "net.n": torch.arange(2), "x": torch.ones(1)}
    )
    export_safetensors(
        tmp_path / "run",
        tmp_path / "a.safetensors",
        prefix="net.",
        rename={"w": "weight"},
        dtype="bfloat16",
        metadata={"made by": "me"},
    )
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == {"weight", "n"}
    assert found["weight"].dtype == torch.bfloat16
    assert found["n"].dtype == torch.int64
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "made by": "me"}
    with pytest.raises(
        MismatchError, match=r"net\.n and net\.w would both become x|net\.w and net\.n would both become x"
    ):
        export_safetensors(tmp_path / "run", tmp_path / "b.safetensors", prefix="net.", rename=lambda _: "x")


def test_what_is_there_is_kept_unless_overwritten(tmp_path):
    ck.save(tmp_path / "run", {"a": torch.zeros(300), "b": torch.zeros(300)})
    out = tmp_path / "hf"
    export_safetensors(tmp_path / "run", out, max_shard_bytes=1200)
    with pytest.raises(CheckpointError, match="is there already"):
        export_safetensors(tmp_path / "run", out)
    (out / "config.json").write_text("{}")
    export_safetensors(tmp_path / "run", out, overwrite=True)
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]


def test_values_can_be_refused(tmp_path):
    ck.save(tmp_path / "run", {"w": torch.zeros(3), "lr": 0.1})
    with pytest.raises(StateError, match="lr"):
        export_safetensors(tmp_path / "run", tmp_path / "a.safetensors", values="error")
    with pytest.raises(MismatchError, match="none of the chosen leaves"):
        export_safetensors(tmp_path / "run", tmp_path / "a.safetensors", keys="lr")
    with pytest.raises(MismatchError, match="is wanted"):
        export_safetensors(tmp_path / "run", tmp_path / "a.safetensors", keys="nothing")
    with pytest.raises(MissingStepError):
        export_safetensors(tmp_path / "run", tmp_path / "a.safetensors", step=9)


@pytest.mark.parametrize(
    "wrong",
    [{"format": "gguf"}, {"dtype": "int8"}, {"max_shard_bytes": 0}, {"metadata": {"a": 1}}, {"values": "maybe"}],
)
def test_wrong_options(tmp_path, wrong):
    ck.save(tmp_path / "run", {"w": torch.zeros(3)})
    with pytest.raises(ValueError, match=next(iter(wrong))):
        export_safetensors(tmp_path / "run", tmp_path / "a.safetensors", **wrong)


def test_memory_is_bounded_by_blocks(tmp_path, monkeypatch):
    torch.manual_seed(0)
    state = {"w": torch.randn(1000, 700), "v": torch.randn(300, 900).t()}
    ck.save(tmp_path / "run", state, chunk_bytes=4096)
    monkeypatch.setattr(common_module, "BLOCK_BYTES", 64 << 10)
    asked = []
    original = ck.Checkpoint.read_many

    def counted(self, requests, **options):
        requests = list(requests)
        asked.append(sum(request.out.nbytes for request in requests))
        return original(self, requests, **options)

    monkeypatch.setattr(ck.Checkpoint, "read_many", counted)
    seen = []
    export_safetensors(
        tmp_path / "run", tmp_path / "a.safetensors", progress=lambda done, total: seen.append((done, total))
    )
    assert max(asked) <= 64 << 10
    total = sum(tensor.nbytes for tensor in state.values())
    assert sum(asked) == total
    assert seen[-1] == (total, total)
    assert len(seen) > 40
    found = load_file(tmp_path / "a.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_values_beside_the_prefix_are_not_told(tmp_path):
    ck.save(tmp_path / "run", {"model": {"w": torch.ones(2), "n": 3}, "optimizer": {"lr": 0.1, "m": torch.ones(2)}})
    report = ck.export_safetensors(tmp_path / "run", tmp_path / "out", format="hf")
    assert (report.tensors, report.skipped) == (1, ("model.n",))
