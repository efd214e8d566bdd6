"""The save that runs in the background is waited for by those that use the same store, and by nobody else."""

import threading

import pytest
import torch

import vescale_ckpt as ck
from vescale_ckpt._save import running
from vescale_ckpt._storage import identity_of
from vescale_ckpt.testing import Fail, FaultyStorage, MemoryStorage, Slow, matching


def held_up(storage):
    """Return a storage of which the first write waits for an event, and that event."""
    gate = threading.Event()
    return FaultyStorage(storage, matching(Slow(gate.wait), kind="write")), gate


@pytest.mark.parametrize("url", [None, "mine://run"])
def test_saves_to_two_stores_in_memory_do_not_wait_for_each_other(url):
    first, gate = held_up(MemoryStorage(url))
    second = MemoryStorage(url)
    handle = ck.async_save(first, {"w": torch.ones(1000)})
    done = threading.Event()

    def others():
        ck.async_save(second, {"w": torch.zeros(1000)}).wait()
        assert ck.load_dict(second)["w"].sum() == 0
        ck.load(second, {"w": torch.ones(1000)})
        done.set()

    thread = threading.Thread(target=others)
    thread.start()
    try:
        assert done.wait(30)
        assert not handle.done()
    finally:
        gate.set()
        thread.join()
    handle.wait(30)
    assert ck.load_dict(first)["w"].sum() == 1000


def test_a_load_waits_for_the_save_of_the_same_store_however_it_is_wrapped():
    inner = MemoryStorage("mine://run")
    storage, gate = held_up(inner)
    handle = ck.async_save(storage, {"w": torch.ones(1000)})
    loaded = []
    thread = threading.Thread(target=lambda: loaded.append(ck.load_dict(FaultyStorage(inner))))
    thread.start()
    gate.set()
    thread.join(30)
    assert loaded[0]["w"].sum() == 1000
    assert handle.done()


def test_one_folder_is_one_store_by_whatever_path(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    monkeypatch.chdir(tmp_path)
    paths = ["run", "./run", str(tmp_path / "run"), tmp_path / "link", (tmp_path / "run").as_uri(), "link/../run/"]
    found = {identity_of(ck._storage.open_storage(path)) for path in paths}
    assert len(found) == 1
    (tmp_path / "elsewhere" / "run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert identity_of(ck._storage.open_storage("run")) not in found


def test_the_error_of_a_save_is_raised_by_the_next_one_to_that_store_alone():
    first = FaultyStorage(MemoryStorage("mine://run"), matching(Fail(28), kind="write"))
    second = MemoryStorage("mine://run")
    failed = ck.async_save(first, {"w": torch.ones(1000)})
    failed._over.wait(30)
    ck.async_save(second, {"w": torch.ones(1000)}).wait(30)
    with pytest.raises(ck.StorageError, match="disk is full"):
        ck.async_save(first, {"w": torch.ones(1000)})


def test_what_is_over_is_not_kept():
    storage = MemoryStorage()
    before = set(threading.enumerate())
    handle = ck.async_save(storage, {"w": torch.ones(1000)})
    for thread in threading.enumerate():
        if thread not in before and thread.name.startswith("vescale-ckpt"):
            thread.join(30)
    assert handle.done()
    assert identity_of(storage) not in running._latest
