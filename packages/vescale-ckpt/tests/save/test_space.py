"""A save that cannot fit is refused before it writes; one that may fit never is."""

import errno
import importlib
import threading

import pytest
import torch
from torch.distributed import HashStore

import vescale_ckpt as ck
from vescale_ckpt._coordination import coordinator
from vescale_ckpt.testing import FaultyStorage, MemoryStorage
from vescale_testing import run_threads

EXACT = [{}, {"dedup": None}, {"layout": "plain"}]
NOT_KNOWN = [{"compress": "auto"}, {"compress": "zstd"}, {"dedup": "content"}]
STATE = {"w": torch.zeros(5000), "t": torch.zeros(3)}
NEEDED = 20012


class Says(FaultyStorage):
    """A storage that says that so much is free, whatever is true."""

    def __init__(self, free):
        super().__init__(MemoryStorage())
        self.free = free

    def free_bytes(self):
        if isinstance(self.free, Exception):
            raise self.free
        return self.free

    def files(self):
        return self.inner.files()


def refused(storage, state, **options):
    with pytest.raises(ck.StorageError, match="not enough space") as caught:
        ck.save(storage, state, **options)
    assert caught.value.errno == errno.ENOSPC
    return str(caught.value)


@pytest.mark.parametrize("options", EXACT, ids=str)
def test_what_cannot_fit_is_refused_and_nothing_is_left(options):
    storage = MemoryStorage(capacity=NEEDED - 1)
    faulty = FaultyStorage(storage)
    text = refused(faulty, STATE, step=7, **options)
    assert f"step 7: {NEEDED} bytes" in text
    assert f"{NEEDED - 1} bytes are free" in text
    assert storage.files() == {}
    assert not [o for o in faulty.operations if o.kind not in ("get", "list")]


@pytest.mark.parametrize("options", EXACT, ids=str)
def test_what_just_fits_is_saved(options):
    """The files around the bytes need room too, but how much is not known before."""
    storage = Says(NEEDED)
    ck.save(storage, STATE, **options)
    assert ck.verify(storage).ok


@pytest.mark.parametrize("options", NOT_KNOWN, ids=str)
def test_what_may_become_smaller_is_tried(options):
    """Zeros are; and chunks of zeros are all the same."""
    storage = MemoryStorage(capacity=NEEDED - 1)
    ck.save(storage, {"w": torch.zeros(5120)}, chunk_bytes=4096, **options)
    assert ck.verify(storage).ok


def test_a_save_that_refers_to_the_step_before_is_tried():
    storage = MemoryStorage(capacity=NEEDED + 6000)
    ck.save(storage, STATE, step=1)
    assert ck.save(storage, STATE, step=2).bytes_reused > 0
    refused(storage, STATE, step=3, dedup=None)
    refused(storage, {**STATE, "w": STATE["w"] + 1}, step=3, layout="plain")
    assert ck.Checkpointer(storage).steps() == [1, 2]


@pytest.mark.parametrize("free", [None, 0, -1, OSError(errno.ENOSYS, "no such call")], ids=str)
def test_a_storage_that_does_not_know_what_is_free_is_tried(free):
    storage = Says(free)
    ck.save(storage, STATE)
    assert ck.verify(storage).ok


def test_tied_tensors_count_once_and_empty_ones_not_at_all():
    w = torch.ones(1000)
    storage = Says(4000)
    ck.save(storage, {"a": w, "b": w, "e": torch.zeros(0, 7)})
    refused(storage, {"a": w, "b": w.clone()}, dedup=None)


@pytest.mark.parametrize("save", [ck.async_save, ck.Checkpointer], ids=["async_save", "Checkpointer"])
def test_it_is_the_call_that_fails_and_not_the_background(save):
    storage = MemoryStorage(capacity=100)
    with pytest.raises(ck.StorageError, match="not enough space"):
        save(storage, STATE) if save is ck.async_save else save(storage).save(1, STATE)


def test_imports_are_checked_too(tmp_path):
    torch.save(STATE, tmp_path / "state.pt")
    storage = MemoryStorage(capacity=NEEDED - 1)
    with pytest.raises(ck.StorageError, match=f"{NEEDED} bytes"):
        ck.import_torch(tmp_path / "state.pt", storage, step=1)
    assert storage.files() == {}


# ---- many ranks, as threads


@pytest.fixture
def ranks(monkeypatch):
    """Return what runs a save on some ranks at once, each with its own state, and returns their errors."""
    module, local = importlib.import_module("vescale_ckpt._save.save"), threading.local()

    def run(states, storage, **options):
        store, world = HashStore(), len(states)
        monkeypatch.setattr(
            module,
            "coordinator",
            lambda group, timeout: coordinator(store=store, rank=local.rank, world=world, timeout=60),
        )

        def one(rank):
            local.rank = rank
            try:
                ck.save(storage, states[rank], **options)
            except ck.CheckpointError as error:
                return error
            return None

        return run_threads(world, one)

    return run


def own(rank, count):
    return {"shared": torch.zeros(100), "own": ck.local(torch.zeros(count))}


def test_the_sum_of_all_ranks_counts_and_replicas_once(ranks):
    storage = Says(400 + 3 * 8000)
    assert ranks([own(rank, 2000) for rank in range(3)], storage, step=1) == [None] * 3
    errors = ranks([own(rank, 2000 + rank) for rank in range(3)], storage, step=2, dedup=None)
    assert isinstance(errors[0], ck.StorageError)
    assert errors[0].errno == errno.ENOSPC
    assert f"{400 + 3 * 8000 + 12} bytes" in str(errors[0])
    assert all("rank 0 failed" in str(error) and "not enough space" in str(error) for error in errors[1:])
    assert ck.Checkpointer(storage).steps() == [1]
    assert not [path for path in storage.files() if path.startswith("steps/00000002")]


def test_keys_that_only_some_ranks_hold_count_too(ranks):
    storage = Says(400 + 3 * 8000 - 1)
    states = [{f"stage{rank}": torch.zeros(2000), "shared": torch.zeros(100)} for rank in range(3)]
    errors = ranks(states, storage, step=1)
    assert f"{400 + 3 * 8000} bytes" in str(errors[0])
    assert errors[0].errno == errno.ENOSPC
    assert all("not enough space" in str(error) for error in errors)
    assert not [path for path in storage.files() if path.startswith("steps/")]
    storage.free += 1
    assert ranks(states, storage, step=1) == [None] * 3
    assert ck.verify(storage).ok


def test_a_save_that_fails_while_the_ranks_agree_leaves_no_folder(ranks):
    storage = MemoryStorage()
    errors = ranks([{"w": torch.full((9000,), float(rank))} for rank in range(2)], storage, verify_replicas=True)
    assert all(isinstance(error, ck.RanksError) for error in errors)
    assert list(storage.files()) == ["vckpt.json"]
