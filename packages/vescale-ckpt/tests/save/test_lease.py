"""The lease on the side of the saver: when it is renewed, and whether it ever ran out."""

import pytest
import torch

import vescale_ckpt as ck
from vescale_ckpt._format import Lease
from vescale_ckpt._save import base, begin, lease
from vescale_ckpt.testing import Fail, FaultyStorage, MemoryStorage, Slow, at, matching

FOLDER = "steps/00000001-0a0b0c0d"


class Clocks:
    """Both clocks of the machine; a machine that sleeps stops one of them."""

    def __init__(self):
        self.wall = self.cpu = 1000.0

    def time(self):
        return self.wall

    def monotonic(self):
        return self.cpu

    def go(self, seconds):
        self.wall += seconds
        self.cpu += seconds


@pytest.fixture
def clocks(monkeypatch):
    base.forget()
    clocks = Clocks()
    for module in (begin, lease):
        monkeypatch.setattr(module, "time", clocks)
    return clocks


def keeper(storage, clocks, timeout=100.0):
    lease.put_lease(storage, FOLDER, "0a0b0c0d", (), timeout, begun=clocks.wall)
    return lease.LeaseKeeper(storage, FOLDER, "0a0b0c0d", (), timeout, begun=clocks.wall)


def expires(storage):
    return Lease.from_bytes(storage.get(f"{FOLDER}/LEASE", 1000)).expires


def test_it_is_renewed_when_half_of_its_time_is_over(clocks):
    storage = MemoryStorage()
    kept = keeper(storage, clocks)
    found = []
    for _ in range(6):
        found.append(expires(storage))
        clocks.go(30)
        kept.renew()
    assert found == [1160, 1160, 1220, 1220, 1280, 1280]
    kept.renew(older=30.0)
    assert expires(storage) == 1340
    clocks.go(29)
    kept.renew(older=30.0)
    assert expires(storage) == 1340
    kept.renew(older=0.0)
    assert expires(storage) == 1369
    assert not kept.ran_out


@pytest.mark.parametrize("clock", ["wall", "cpu"])
def test_a_lease_that_ran_out_by_either_clock_did_for_ever(clocks, clock):
    kept = keeper(MemoryStorage(), clocks)
    setattr(clocks, clock, 1160)
    assert not kept.ran_out
    setattr(clocks, clock, 1161)
    assert kept.ran_out
    kept.renew(older=0.0)
    assert kept.ran_out
    clocks.go(10)
    kept.renew(older=0.0)
    assert kept.ran_out


def test_a_renewal_that_takes_too_long_comes_too_late(clocks):
    storage = FaultyStorage(MemoryStorage(), at({1: Slow(lambda: clocks.go(100))}))
    kept = keeper(storage, clocks)
    clocks.go(80)
    kept.renew()
    assert kept.ran_out


def test_the_lease_is_young_when_the_other_ranks_are_waited_for(clocks):
    """They may take as long as the timeout, all of which it has to live."""
    seen = []
    storage = MemoryStorage()

    class Watched(FaultyStorage):
        def put(self, path, data, *, exclusive=False):
            super().put(path, data, exclusive=exclusive)
            if path.endswith("LEASE"):
                seen.append(Lease.from_bytes(data).expires - clocks.wall)

    watched = Watched(storage, matching(Slow(lambda: clocks.go(40)), kind="write"))
    ck.save(watched, {"w": torch.ones(1000)}, timeout=100.0)
    names = [o.path.rpartition("/")[2] for o in watched.operations if o.kind == "put"]
    assert names[-5:] == ["w00000.json", "LEASE", "manifest.json", "LEASE", "COMMIT"][-len(names[-5:]) :]
    assert seen == [160.0, 160.0, 160.0]


@pytest.mark.parametrize(
    ("options", "saved"),
    [({"dedup": None}, True), ({"layout": "plain"}, True), ({}, False), ({"dedup": "content"}, False)],
    ids=str,
)
def test_a_save_that_outlived_its_lease_commits_only_what_is_all_its_own(clocks, options, saved):
    inner = MemoryStorage()
    state = {"w": torch.ones(5000), "v": torch.zeros(1000)}
    ck.save(inner, state, step=1, dedup="content" if options.get("dedup") else "position")
    state["v"] += 1
    storage = FaultyStorage(inner, matching(Slow(lambda: clocks.go(2000)), kind="put", name="w00000.json"))
    if saved:
        ck.save(storage, state, step=2, **options)
        assert ck.load_dict(inner)["v"].sum() == 1000
        return
    with pytest.raises(ck.CheckpointError, match=r"outlived its lease.*above 1800 s"):
        ck.save(storage, state, step=2, **options)
    assert ck.Checkpointer(inner).steps() == [1]
    assert not [path for path in inner.files() if path.startswith("steps/00000002")]
    assert not [o for o in storage.operations if o.path.endswith("COMMIT") and o.kind == "put"]


def test_files_that_went_meanwhile_are_missed(clocks):
    """The folder was taken and made again by what came later: an index alone does not make a save."""
    inner = MemoryStorage()

    def sleep():
        clocks.go(2000)
        for path in [path for path in inner.files() if "/data/" in path]:
            inner.remove(path)

    storage = FaultyStorage(inner, matching(Slow(sleep), kind="put", name="w00000.json"))
    with pytest.raises(ck.CheckpointError, match="outlived its lease"):
        ck.save(storage, {"w": torch.ones(1000)}, dedup=None)
    assert ck.Checkpointer(inner).steps() == []


@pytest.mark.parametrize("slept", [False, True])
@pytest.mark.parametrize("look", [0, 1])
def test_a_look_back_that_fails_matters_only_if_the_lease_ran_out(clocks, caplog, slept, look):
    """While it lives no collection takes the save for dead, so the step is whole; else nobody can tell."""
    inner = MemoryStorage()
    ck.save(whole := FaultyStorage(inner), {"w": torch.ones(1000)}, step=1)
    (commit,) = [o.number for o in whole.operations if o.path.endswith("COMMIT") and o.kind == "put"]
    inner = MemoryStorage()
    faults = {commit: Slow(lambda: clocks.go(2000 if slept else 1000)), commit + 1 + look: Fail(5)}
    storage = FaultyStorage(inner, at(faults))
    if slept:
        with pytest.raises(ck.CheckpointError, match=r"outlived its lease.*It is committed.*verify"):
            ck.save(storage, {"w": torch.ones(1000)}, step=1)
    else:
        ck.save(storage, {"w": torch.ones(1000)}, step=1)
        assert "is committed, though the storage fails" in caplog.text
        assert not [path for path in inner.files() if path.endswith("LEASE")]
    assert [o.kind for o in storage.operations[commit : commit + 2]] == ["put", "list"]
    assert ck.verify(inner).ok


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_whose_parts_are_gone_is_taken_back(clocks, fails):
    inner = MemoryStorage()

    def sleep():
        clocks.go(2000)
        for path in [path for path in inner.files() if "/index/" in path]:
            inner.remove(path)

    plans = [matching(Slow(sleep), kind="put", name="COMMIT")]
    plans += [matching(Fail(5), kind="remove", name="COMMIT")] * fails
    storage = FaultyStorage(inner, lambda o: next((fault for plan in plans if (fault := plan(o)) is not None), None))
    with pytest.raises(ck.CheckpointError, match="outlived its lease") as caught:
        ck.save(storage, {"w": torch.ones(1000)}, step=1)
    assert ("by hand" in str(caught.value)) == fails
    assert [path for path in inner.files() if path.endswith("COMMIT")] == (
        [] if not fails else [storage.operations[-1].path]
    )
