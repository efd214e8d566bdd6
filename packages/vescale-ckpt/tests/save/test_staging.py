"""The staging pool: reuse, limits, waiting, pages, statistics."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_ckpt._save import staging
from vescale_ckpt._save.staging import PoolStats, StagingPool, default_pool, parse_bytes
from vescale_ckpt.errors import CheckpointError

MIB = 1 << 20


def test_a_buffer_is_bytes_that_begin_at_a_page() -> None:
    pool = StagingPool()
    for nbytes in (0, 1, 4096, 5000, 3 * MIB + 1):
        buffer = pool.take(nbytes)
        assert (buffer.dtype, buffer.shape, buffer.device.type) == (torch.uint8, (nbytes,), "cpu")
        assert buffer.data_ptr() % 4096 == 0
        buffer.fill_(255)
    assert len({b.data_ptr() for b in pool._used.values()}) == 5


def test_buffers_are_used_again() -> None:
    pool = StagingPool()
    first = pool.take(10 * MIB)
    place = first.data_ptr()
    pool.give(first)
    for nbytes in (10 * MIB, 9 * MIB, 5 * MIB):
        again = pool.take(nbytes)
        assert (again.data_ptr(), again.numel()) == (place, nbytes)
        pool.give(again)
    assert pool.stats() == PoolStats(held=10 * MIB, used=0, fresh=1, reused=3)


def test_the_smallest_that_fits_is_taken() -> None:
    pool = StagingPool()
    buffers = [pool.take(n * MIB) for n in (12, 8, 10)]
    for buffer in buffers:
        pool.give(buffer)
    assert pool.take(9 * MIB).data_ptr() == buffers[2].data_ptr()
    assert pool.take(9 * MIB).data_ptr() == buffers[0].data_ptr()


def test_a_buffer_twice_too_large_stays_free_for_others() -> None:
    pool = StagingPool()
    large = pool.take(10 * MIB)
    pool.give(large)
    small = pool.take(4 * MIB)
    assert small.data_ptr() != large.data_ptr()
    assert pool.take(10 * MIB).data_ptr() == large.data_ptr()


def test_a_state_that_grows_leaves_no_trail() -> None:
    pool = StagingPool()
    for nbytes in range(10 * MIB, 40 * MIB, MIB // 4):
        pool.give(pool.take(nbytes))
    stats = pool.stats()
    assert stats.held <= 1.07 * 40 * MIB
    assert stats.fresh < 40 < stats.reused  # it grows in steps


def test_no_more_than_the_limit_is_held() -> None:
    pool = StagingPool(limit="10MiB")
    four, five = pool.take(4 * MIB), pool.take(5 * MIB)
    assert pool.stats().held <= 10 * MIB
    pool.give(four)
    pool.give(five)
    pool.give(pool.take(10 * MIB))
    assert pool.stats() == PoolStats(held=10 * MIB, used=0, fresh=3, reused=0)
    small = pool.take(MIB)  # far too large, but there is no room for another
    assert pool.stats() == PoolStats(held=10 * MIB, used=10 * MIB, fresh=3, reused=1)
    pool.give(small)


def test_what_can_never_fit_is_an_error() -> None:
    with pytest.raises(CheckpointError, match=r"copy 101 bytes.* limited to 100.*staging_bytes"):
        StagingPool(limit=100).take(101)
    assert StagingPool(limit=100).take(100).numel() == 100


def test_over_the_limit_one_waits_until_a_buffer_is_given_back() -> None:
    pool = StagingPool(limit=10 * MIB)
    buffer = pool.take(8 * MIB)
    with pytest.raises(CheckpointError, match=r"for 0.01 s running saves have kept 8388608 of the 10485760"):
        pool.take(3 * MIB, timeout=0.01)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(pool.take, 3 * MIB)
        assert not waiting.done()
        pool.give(buffer)
        assert waiting.result(30).numel() == 3 * MIB


def test_what_was_not_taken_cannot_be_given() -> None:
    pool = StagingPool()
    buffer = pool.take(10)
    pool.give(buffer)
    with pytest.raises(ValueError, match="given back before"):
        pool.give(buffer)
    with pytest.raises(ValueError, match="not from this pool"):
        pool.give(torch.zeros(10, dtype=torch.uint8))
    with pytest.raises(ValueError, match="at least 0, but got -1"):
        pool.take(-1)


def test_release_frees_what_is_not_in_use() -> None:
    pool = StagingPool()
    kept, given = pool.take(8192), pool.take(MIB)
    pool.give(given)
    pool.release()
    assert pool.stats().held == pool.stats().used == 8192
    pool.give(kept)
    assert pool.stats().used == 0


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_warm_touches_all_pages() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    pool = StagingPool()
    cold = pool.take(64 * MIB)
    before = resident()
    pool.give(cold)
    pool.warm(64 * MIB)
    assert resident() - before > 60 * MIB
    assert pool.stats() == PoolStats(held=64 * MIB, used=0, fresh=1, reused=1)


def test_memory_is_pinned_where_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def allocate(nbytes: int, pinned: bool) -> torch.Tensor:
        asked.append(pinned)
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(staging, "_allocate", allocate)
    pool = StagingPool()
    pool.give(pool.take(MIB))
    monkeypatch.setattr(staging, "_pins", lambda: True)
    pool.take(MIB)  # the one from before CUDA came into use does not do
    assert asked == [False, True]
    assert pool.stats().held == MIB


def test_what_is_kept_makes_way_when_the_system_has_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = StagingPool()
    pool.give(pool.take(8 * MIB))
    real, failures = staging._allocate, iter([True])

    def allocate(nbytes: int, pinned: bool) -> torch.Tensor:
        if next(failures, False):
            raise RuntimeError("can't allocate memory")
        return real(nbytes, pinned)

    monkeypatch.setattr(staging, "_allocate", allocate)
    assert pool.take(MIB).numel() == MIB
    assert pool.stats().held == MIB


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60_000), st.booleans()), max_size=30))
def test_buffers_never_overlap_and_the_limit_holds(steps: list[tuple[int, bool]]) -> None:
    pool = StagingPool(limit=150_000)
    out: list[tuple[torch.Tensor, int]] = []
    for number, (nbytes, give) in enumerate(steps):
        if give and out:
            buffer, mark = out.pop(0)
            assert bool((buffer == mark).all())
            pool.give(buffer)
        try:
            buffer = pool.take(nbytes, timeout=0)
        except CheckpointError:
            assert pool.stats().used + nbytes > 150_000
            continue
        out.append((buffer.fill_(number), number))
        assert pool.stats().held <= 150_000
    for buffer, mark in out:
        assert bool((buffer == mark).all())


def test_many_threads_share_a_pool() -> None:
    pool = StagingPool(limit=MIB)
    wrong = []

    def work(number: int) -> None:
        for nbytes in (100_000, 300_000, 50_000):
            buffer = pool.take(nbytes).fill_(number)
            if not bool((buffer == number).all()):
                wrong.append(number)
            pool.give(buffer)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert pool.stats().used == 0
    assert pool.stats().held <= MIB


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_pool_of_its_own() -> None:
    with default_pool()._changed:
        child = os.fork()
        if not child:
            os._exit(7 if default_pool().take(10).numel() == 10 else 8)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("7B", 7),
        (" 1.5 KiB ", 1536),
        ("500MB", 500_000_000),
        ("8GiB", 8 * 2**30),
        ("2TiB", 2 * 2**40),
    ],
)
def test_sizes_are_numbers_or_texts(text: int | str, size: int) -> None:
    assert parse_bytes(text, "limit") == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 XiB", "1e9", "8gibs", -1, 1.5, None, True])
def test_what_is_no_size_is_an_error(text: object) -> None:
    with pytest.raises(ValueError, match=r'limit: expected a number of bytes such as 4096, "500MB"'):
        parse_bytes(text, "limit")
