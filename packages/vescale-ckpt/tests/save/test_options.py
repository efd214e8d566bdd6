"""What a caller may ask for, and what it is told otherwise."""

import pytest
import torch

from vescale_ckpt import StateError, async_save, save
from vescale_ckpt._save.options import SaveOptions


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dedup": "both"}, "dedup: expected one of"),
        ({"layout": "flat"}, "layout: expected one of"),
        ({"differing": "last"}, "differing: expected one of"),
        ({"compress": 3}, "compress: expected"),
        ({"layout": "plain", "compress": "zstd"}, 'layout="plain" keeps safetensors files'),
        ({"layout": "plain", "compress": "auto"}, "compress='auto', dedup='position'. Leave both out"),
        ({"layout": "plain", "dedup": "content"}, 'layout="plain" keeps safetensors files'),
        ({"chunk_bytes": 100}, "chunk_bytes: expected an integer from 4096"),
        ({"chunk_bytes": 5000}, "chunk_bytes: expected a multiple of 4096"),
        ({"threads": 0}, "threads: expected an integer from 1"),
        ({"threads": 2.0}, "threads: expected an integer from 1"),
        ({"timeout": 0}, "timeout: expected seconds above 0"),
    ],
)
def test_options(arguments, message):
    with pytest.raises(ValueError, match=message):
        SaveOptions(**arguments)


@pytest.mark.parametrize("step", [-1, 1.0, True, "7", 10**16])
def test_step(step, tmp_path):
    with pytest.raises(ValueError, match="step: expected an integer"):
        save(tmp_path, {"w": torch.zeros(1)}, step=step)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("metadata", [{"loss": float("nan")}, torch.zeros(1), {1, 2}])
def test_metadata(metadata, tmp_path):
    with pytest.raises(StateError, match="metadata: expected what JSON can hold"):
        save(tmp_path, {"w": torch.zeros(1)}, metadata=metadata)


@pytest.mark.parametrize("save", [save, async_save])
@pytest.mark.parametrize("size", [1, 5000])
def test_unknown_codec(tmp_path, save, size):
    with pytest.raises(ValueError, match=r"compress: .* planes, zstd, but got \'lz4\'"):
        save(tmp_path, {"w": torch.zeros(size)}, compress="lz4", fsync=False)
    assert not list(tmp_path.iterdir())
