"""What a save may refer to is what that store holds, whatever its place held or is called."""

import importlib
import shutil
import types

import pytest
import torch
import torch.distributed.checkpoint as dcp

import vescale_ckpt as ck
from vescale_ckpt._save import base, begin
from vescale_ckpt.dcp import VescaleWriter
from vescale_ckpt.testing import FaultyStorage, MemoryStorage


@pytest.fixture(autouse=True)
def nothing_kept():
    base.forget()


def test_stores_of_one_name_do_not_push_each_other_out():
    """Without what was kept, the second save of a store reads its first one's index."""
    stores = [FaultyStorage(MemoryStorage("mine://run")) for _ in range(2)]
    state = {"w": torch.randn(5000)}
    for _ in range(3):
        for storage in stores:
            ck.save(storage, state)
    for storage in stores:
        assert not [o for o in storage.operations if o.kind == "get" and "/index/" in o.path]
        assert len([path for path in storage.inner.files() if path.endswith(".pack")]) == 1


def test_a_folder_that_was_emptied_and_filled_by_others_is_another_store(tmp_path, monkeypatch):
    """Even if a step has the name of one that was there; bytes of the old one are in memory, and nowhere else."""
    fixed = types.SimpleNamespace(token_hex=lambda count: "ab" * count)
    monkeypatch.setattr(begin, "secrets", fixed)  # of saves, not of stores
    w = torch.randn(5000)
    place, other = tmp_path / "run", tmp_path / "other"
    first = ck.save(place, {"w": w}, step=1, fsync=False)
    assert ck.save(other, {"w": w + 1}, step=1, fsync=False).folder == first.folder
    shutil.rmtree(place)
    other.rename(place)
    monkeypatch.undo()
    info = ck.save(place, {"w": w}, step=2, fsync=False)
    assert info.bytes_reused == 0
    assert torch.equal(ck.load_dict(place)["w"], w)
    assert torch.equal(ck.load_dict(place, step=1)["w"], w + 1)


def test_a_store_that_was_moved_is_the_same_store(tmp_path, monkeypatch):
    state = {"w": torch.randn(5000)}
    ck.save(tmp_path / "a", state, fsync=False)
    (tmp_path / "a").rename(tmp_path / "b")
    monkeypatch.setattr(importlib.import_module("vescale_ckpt._save.save"), "load_base", None)  # it is not read again
    monkeypatch.chdir(tmp_path)
    assert ck.save("b", state, fsync=False).bytes_reused == 20000


def test_only_so_much_is_kept():
    for _ in range(base.MOST_KEPT + 5):
        ck.save(MemoryStorage(), {"w": torch.randn(100)})
    assert len(base._kept) == base.MOST_KEPT


@pytest.mark.parametrize("kind", ["dcp", "stream"])
def test_other_ways_to_save_keep_it_by_store_too(kind, tmp_path, recwarn):
    """Two stores of one name, saved in turn: none reads the index of its step before again."""
    stores = [FaultyStorage(MemoryStorage("mine://run")) for _ in range(2)]
    state = {"w": torch.randn(5000)}
    torch.save(state, tmp_path / "state.pt")
    for step in range(3):
        for storage in stores:
            if kind == "dcp":
                dcp.save(state, storage_writer=VescaleWriter(storage, step=step), no_dist=True)
            else:
                ck.import_torch(tmp_path / "state.pt", storage, step=step)
    for storage in stores:
        assert not [o for o in storage.operations if o.kind == "get" and "/index/" in o.path]
        assert len([path for path in storage.inner.files() if path.endswith(".pack")]) == 1
