"""A save that dies, or fails, at any one of its operations on storage: the step before loads, bit for bit.

Operations are counted on a run that succeeds; then the same run is done once for each of them.
"""

import pytest
import torch

import vescale_ckpt as ck
from vescale_ckpt._save.base import forget
from vescale_ckpt.testing import Fail, FaultyStorage, Kill, Killed, MemoryStorage, Tear, at

OPTIONS = [{"compress": "auto"}, {"dedup": "content"}, {"layout": "plain"}, {"compress": None, "dedup": None}]


def states():
    torch.manual_seed(0)
    old = {"w": torch.randn(60, 100), "frozen": torch.randn(40, 50), "t": torch.tensor(1.0), "step": 1}
    return old, {**old, "w": old["w"] + 1, "t": torch.tensor(2.0), "step": 2}


def equal(a, b):
    return a.keys() == b.keys() and all(
        torch.equal(a[key], b[key]) if isinstance(a[key], torch.Tensor) else a[key] == b[key] for key in a
    )


def store_with_one_step(random_write, options):
    storage = MemoryStorage(random_write=random_write)
    ck.save(storage, states()[0], step=1, chunk_bytes=4096, **options)
    return storage


def second_save(storage, options):
    ck.save(storage, states()[1], step=2, chunk_bytes=4096, threads=1, **options)


def operations(random_write, options):
    return len(listed(random_write, options))


def listed(random_write, options):
    whole = FaultyStorage(store_with_one_step(random_write, options))
    second_save(whole, options)
    return whole.operations


def check(storage, *, may_have_two):
    """The store must hold step 1, or the whole step 2, and a collection must leave it sound and small."""
    forget()
    old, new = states()
    assert equal(ck.load_dict(storage, step=1), old)
    steps = ck.Checkpointer(storage).steps()
    assert steps in ([1], [1, 2])
    if steps == [1, 2]:
        assert may_have_two
        assert equal(ck.load_dict(storage, step=2), new)
    ck.gc(storage, grace=0.0)
    assert ck.verify(storage, "all").ok
    second_save(storage, {"overwrite": True})
    assert equal(ck.load_dict(storage), new)


@pytest.mark.parametrize("random_write", [True, False], ids=["files", "objects"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("power_loss", [False, True], ids=["process dies", "power is lost"])
def test_death_at_any_operation(random_write, options, power_loss):
    count = operations(random_write, options)
    assert count >= 8
    for k in range(count):
        storage = store_with_one_step(random_write, options)
        faulty = FaultyStorage(storage, at({k: Kill()}), power_loss=power_loss)
        with pytest.raises(Killed):
            second_save(faulty, options)
        check(storage, may_have_two=True)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("error", [28, 5, 13], ids=["disk full", "input/output error", "no permission"])
def test_failure_of_any_operation(options, error):
    done = listed(True, options)
    (commit,) = [o.number for o in done if o.kind == "put" and o.path.endswith("COMMIT")]
    assert len(done) > commit + 3
    for k in range(len(done)):
        storage = store_with_one_step(True, options)
        failed = False
        try:
            second_save(FaultyStorage(storage, at({k: Fail(error)})), options)
        except ck.CheckpointError:
            failed = True
        # What fails after the commit, such as the removal of the lease, is no failure of the save; and one that failed
        # before it has left nothing.
        assert not (failed and k > commit)
        assert failed or ck.Checkpointer(storage).steps() == [1, 2]
        assert k == commit or not failed or not [p for p in storage.files() if p.startswith("steps/00000002")]
        check(storage, may_have_two=True)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_half_written_bytes_that_the_device_reported_as_written(options):
    found = 0
    for k in range(operations(True, options)):
        storage = store_with_one_step(True, options)
        faulty = FaultyStorage(storage, at({k: Tear()}))
        second_save(faulty, options)
        if faulty.operations[k].kind != "write":
            continue
        found += 1
        if options.get("layout") == "plain" and found == 1:
            assert not ck.verify(storage, 2).ok
            continue  # the header of the safetensors file, which a load does not need
        with pytest.raises(ck.CorruptionError, match="w") as caught:
            ck.load_dict(storage, step=2)
        assert caught.value.tensors
        assert not ck.verify(storage, 2).ok
        assert equal(ck.load_dict(storage, step=1), states()[0])
    assert found or options.get("dedup") == "content"  # whose chunks are put whole or not at all
