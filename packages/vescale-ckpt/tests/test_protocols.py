"""What docs/plugins.md shows of codecs and storages works, and has the members that `protocols` asks for."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import vescale_ckpt as ck
from vescale_ckpt import _plugins, protocols
from vescale_ckpt._codec import registry
from vescale_ckpt._storage.registry import _registry

PAGE = Path(__file__).parents[3] / "docs" / "plugins.md"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The modules of the page, and their plugin as the only one."""
    pytest.importorskip("numpy")
    monkeypatch.setenv(_plugins.OFF, "all")
    found = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        name = block.splitlines()[0].removeprefix("# ").removesuffix(".py").replace("/", ".")
        if "vescale_ckpt" in block:
            found[name] = module = ModuleType(name)
            monkeypatch.setitem(sys.modules, name, module)
            exec(compile(block, str(PAGE), "exec"), vars(module))
    monkeypatch.setitem(sys.modules, "my_package", ModuleType("my_package"))
    _plugins.reset()
    registry.reset()
    _plugins.manager().register(found["my_package.vescale_plugin"], name="mine")
    yield found
    _plugins.reset()
    registry.reset()
    _registry.cache_clear()


def state(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    noise = torch.randint(0, 256, (5000,), generator=generator, dtype=torch.uint8)
    return {"zeros": torch.zeros(3000), "noise": noise, "step": torch.full((900,), float(step))}


def test_the_codec_and_the_storage_of_the_page_keep_checkpoints(example: dict[str, ModuleType]) -> None:
    for step in (1, 2, 3):
        ck.save("shelf://here", state(step), step=step, compress="deflate")
    loaded = ck.load_dict("shelf://here", step=2)
    assert all(torch.equal(loaded[key], value) for key, value in state(2).items())
    with ck.open("shelf://here", 3) as checkpoint:
        assert set(checkpoint.index(0).codecs) == {"deflate"}
        assert len(set(checkpoint.index(0).chunks.codec)) == 2, "noise does not shrink: it is stored raw"
    assert ck.verify("shelf://here", "all")
    assert ck.gc("shelf://here", keep=ck.Keep(last=1), grace=0.0).steps == [1, 2]
    assert ck.verify("shelf://here", "all")


def test_damage_shows_through_the_codec_of_the_page(example: dict[str, ModuleType]) -> None:
    ck.save("shelf://there", {"w": torch.zeros(3000)}, step=1, compress="deflate")
    files = example["my_package.storage"].SHELVES["shelf://there"]
    (path,) = [path for path in files if "/data/" in path]
    data, written = files[path]
    files[path] = data[:5] + bytes([data[5] ^ 255]) + data[6:], written
    with pytest.raises(ck.CorruptionError, match=r"codec 'deflate' .*Deflate\) cannot decode"):
        ck.load_dict("shelf://there")
    assert ck.verify("shelf://there").tensors == ("w",)


def test_without_the_plugin_its_tensors_are_not_called_damaged(
    example: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ck.save(tmp_path, state(1), step=1, compress="deflate")
    assert ck.verify(tmp_path)
    _plugins.reset()
    registry.reset()
    report = ck.verify(tmp_path)
    assert not report
    assert report.tensors == ()
    assert report.problems
    for finding in report.problems:
        assert "cannot be decoded here: the codec 'deflate' is not known" in finding.text
        assert "damaged" not in finding.text


def test_the_examples_have_the_members_of_the_protocols(example: dict[str, ModuleType]) -> None:
    storage = example["my_package.storage"].Shelf("shelf://members")
    storage.put("a", b"bytes")
    assert isinstance(storage, protocols.Storage)
    assert isinstance(storage.create("b"), protocols.Sink)
    assert isinstance(storage.open("a"), protocols.Source)
    assert isinstance(example["my_package.vescale_plugin"].Deflate(), protocols.Codec)
    with pytest.raises(FileExistsError):
        storage.put("a", b"more", exclusive=True)
    with pytest.raises(ck.FormatError, match="5 bytes, but 4"):
        storage.get("a", 4)
