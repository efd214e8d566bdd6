"""Formats are told by what is there."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import vescale_ckpt as ck
from vescale_ckpt import FormatError
from vescale_ckpt._interop import detect, export, import_

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("format", ["safetensors", "hf", "torch", "dcp"])
def test_out_and_in_again(tmp_path, format):
    state = {"w": torch.arange(5.0), "v": torch.ones(2, 2).bfloat16()}
    ck.save(tmp_path / "run", state)
    out = tmp_path / ("a.pt" if format == "torch" else "out")
    report = export(tmp_path / "run", out, format)
    assert (report.format, report.tensors) == (format, 2)
    assert detect(out) == {"hf": "safetensors"}.get(format, format)
    import_(out, tmp_path / "back")
    found = ck.load_dict(tmp_path / "back")
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_files_are_told_by_their_content(tmp_path):
    state = {"w": torch.ones(2)}
    torch.save(state, tmp_path / "a.bin")
    save_file(state, tmp_path / "b.bin")
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    assert [detect(tmp_path / name) for name in ("a.bin", "b.bin", "c")] == ["torch", "safetensors", "dcp"]
    assert load_file(tmp_path / "b.bin").keys() == {"w"}
    (tmp_path / "text").write_text("hello, this is no file of tensors")
    (tmp_path / "empty").mkdir()
    for name in ("text", "empty", "missing"):
        with pytest.raises(FormatError, match=name):
            detect(tmp_path / name)


def test_unknown_formats(tmp_path):
    for call in (export, import_):
        with pytest.raises(ValueError, match="gguf"):
            call(tmp_path, tmp_path / "out", "gguf")
