"""The object of a training loop: errors that are told once, arguments that are checked at once, forks."""

import errno
import os
import signal
import threading

import pytest
import torch

import vescale_ckpt as ck
from vescale_ckpt.testing import Fail, FaultyStorage, MemoryStorage, Slow, matching


def failing_once():
    """A storage whose first write fails."""
    left = iter([Fail(errno.EIO)])
    return FaultyStorage(MemoryStorage(), lambda operation: next(left, None) if operation.kind == "write" else None)


def state(value=1.0):
    return {"w": torch.full((1000,), value)}


@pytest.mark.parametrize("ask", ["wait", "exception"])
def test_an_error_that_was_seen_is_not_raised_again(ask):
    with ck.Checkpointer(failing_once()) as checkpointer:
        handle = checkpointer.save(1, state())
        with pytest.raises(ck.StorageError):
            handle.wait()
        if ask == "exception":
            assert isinstance(handle.exception(), ck.StorageError)
        checkpointer.save(2, state())
    assert checkpointer.steps() == [2]


@pytest.mark.parametrize("ask", ["save", "restore", "close", "wait"])
def test_an_error_that_nobody_saw_is_raised_once(ask):
    checkpointer = ck.Checkpointer(failing_once())
    checkpointer.save(1, state())
    calls = {
        "save": lambda: checkpointer.save(2, state()),
        "restore": lambda: checkpointer.restore(state()),
        "close": checkpointer.close,
        "wait": checkpointer.wait,
    }
    with pytest.raises(ck.StorageError):
        calls[ask]()
    with checkpointer:
        checkpointer.save(3, state())
    assert checkpointer.steps() == [3]


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("fails", [False, True])
def test_the_error_of_the_loop_is_the_one_to_see(error, fails):
    storage = failing_once() if fails else MemoryStorage()
    checkpointer = ck.Checkpointer(storage)

    def loop():
        with checkpointer:
            checkpointer.save(1, state())
            raise error

    with pytest.raises(type(error)) as caught:
        loop()
    assert caught.value is error
    assert checkpointer.steps() == ([] if fails else [1])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"keep": "3"}, ValueError, "keep: expected a number of steps, a Keep or None, but got '3'"),
        ({"keep": 1.5}, ValueError, "keep: .*1.5"),
        ({"keep": True}, ValueError, "keep: .*True"),
        ({"keep": 0}, ValueError, "last: .* at least 1"),
        ({"compress": "zip"}, ValueError, "compress: .*'zip'"),
        ({"chunk_bytes": 5}, ValueError, "chunk_bytes: .*5"),
        ({"timeout": 0}, ValueError, "timeout: .*0"),
        ({"thread": 3}, TypeError, "thread is no option of `save`; did you mean threads"),
        ({"metadata": {}}, TypeError, "metadata is no option"),
        ({"staging_bytes": "8Gb"}, ValueError, "8Gb"),
    ],
    ids=str,
)
def test_arguments_are_checked_before_the_first_save(options, error, message):
    with pytest.raises(error, match=message):
        ck.Checkpointer(MemoryStorage(), **options)


@pytest.mark.parametrize("async_", [False, True])
def test_nothing_is_saved_after_the_end(async_):
    checkpointer = ck.Checkpointer(MemoryStorage(), async_=async_)
    with checkpointer:
        checkpointer.save(1, state())
    with pytest.raises(ck.CheckpointError, match=r"save of step 2 after close\(\), when nobody would wait"):
        checkpointer.save(2, state())
    checkpointer.close()
    assert checkpointer.restore(state(0.0)) == 1
    with checkpointer:
        checkpointer.save(2, state())
    assert checkpointer.steps() == [1, 2]


def test_unknown_options_of_single_calls_are_named():
    with ck.Checkpointer(MemoryStorage()) as checkpointer:
        checkpointer.save(1, state())
        with pytest.raises(TypeError, match="overwrit is no option of `save`; did you mean overwrite"):
            checkpointer.save(1, state(), overwrit=True)
        for call in (checkpointer.restore, checkpointer.load):
            with pytest.raises(TypeError, match="strickt is no option of `load`; did you mean strict"):
                call(state(), strickt=False)
            with pytest.raises(TypeError, match="zzz is no option of `load`; there are: strict, keys, rename, "):
                call(state(), zzz=1)
            with pytest.raises(TypeError, match="path is no option of `load`"):
                call(state(), path="x")
    assert checkpointer.steps() == [1]


def test_an_option_of_one_save_goes_before_that_of_all():
    with ck.Checkpointer(MemoryStorage(), timeout=5.0) as checkpointer:
        with pytest.raises(ValueError, match=r"timeout: .*-1"):
            checkpointer.save(1, state(), timeout=-1)
        checkpointer.save(1, state(), timeout=7.0)
    assert checkpointer.steps() == [1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_does_not_wait_for_the_save_of_its_parent(tmp_path):
    reached, opened = threading.Event(), threading.Event()

    def hold():
        reached.set()
        assert opened.wait(60)

    storage = FaultyStorage(MemoryStorage(), matching(Slow(hold), kind="write"))
    checkpointer = ck.Checkpointer(storage, staging_bytes="1MiB")
    handle = checkpointer.save(1, state())
    assert reached.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        status = 1
        try:
            with pytest.raises(ck.CheckpointError, match="runs in the process that this one is a fork of"):
                handle.wait()
            checkpointer.save(2, state(2.0))
            checkpointer.close()
            with checkpointer:
                checkpointer.save(3, state(3.0), overwrite=True)
            target = state(0.0)
            assert checkpointer.restore(target) == 3
            assert target["w"].sum() == 3000
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    opened.set()
    checkpointer.close()
    assert checkpointer.steps() == [1]


def test_best_steps_with_metrics_that_are_missing():
    losses = {0: 3.0, 1: None, 2: 1.0, 3: "x", 4: 2.0, 5: None}
    with ck.Checkpointer(MemoryStorage(), keep=ck.Keep(last=1, best=("loss", "min"))) as checkpointer:
        for step, loss in losses.items():
            checkpointer.save(step, state(), metadata=None if loss is None else {"loss": loss})
    assert checkpointer.steps() == [2, 5]
    with checkpointer, pytest.raises(ck.StateError, match="metadata"):
        checkpointer.save(6, state(), metadata={"loss": float("nan")})


@pytest.mark.parametrize("async_", [False, True])
def test_a_step_that_is_saved_after_a_return_to_an_earlier_one_stays(async_):
    with ck.Checkpointer(MemoryStorage(), keep=ck.Keep(last=2, best=("loss", "min")), async_=async_) as checkpointer:
        for step in (10, 20, 30, 40):
            checkpointer.save(step, state(float(step)), metadata={"loss": 100 - step})
        checkpointer.restore(state(), 30)
        checkpointer.save(15, state(15.0))
    assert checkpointer.steps() == [15, 30, 40]
    target = state(0.0)
    assert checkpointer.restore(target, 15) == 15
    assert target["w"].sum() == 15000
    with checkpointer:
        checkpointer.save(16, state(16.0))
    assert checkpointer.steps() == [16, 30, 40]


def test_a_return_to_an_earlier_step_is_told_once(caplog):
    storage = MemoryStorage()
    with ck.Checkpointer(storage, async_=False) as checkpointer:
        checkpointer.save(10, state())
        assert not caplog.records
        checkpointer.save(5, state())
        checkpointer.save(6, state())
    assert [record.getMessage().split(",")[0] for record in caplog.records] == ["step 5 was saved"]
    assert "also has step 10" in caplog.text


def test_a_collection_that_fails_does_not_fail_the_save(monkeypatch, caplog):
    def gc(*args, **options):
        raise ck.CheckpointError("steps come and go")

    monkeypatch.setattr("vescale_ckpt._checkpointer.gc", gc)
    with ck.Checkpointer(MemoryStorage(), keep=1) as checkpointer:
        checkpointer.save(1, state())
        assert checkpointer.wait().step == 1
    assert "could not be removed: steps come and go" in caplog.text
