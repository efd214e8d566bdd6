"""Workers: order, bounds, the first error, priority, and one core per thread."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest
import torch

from vescale_ckpt._threads import NICE, Workers

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="priorities and threads as Linux has them")


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("low_priority", [False, True])
def test_map_keeps_the_order(threads: int, low_priority: bool) -> None:
    with Workers(threads, low_priority=low_priority) as workers:
        assert workers.map(lambda x: x * x, range(100)) == [x * x for x in range(100)]
        assert workers.map(str, iter([3, 4])) == ["3", "4"]
        assert workers.map(str, []) == []


def test_threads_run_at_once_but_not_more_than_allowed() -> None:
    meeting = threading.Barrier(3)
    names = set()

    def meet(_: int) -> None:
        meeting.wait(30)  # passes only if three run at once
        names.add(threading.current_thread().name)

    with Workers(3, name="meeting") as workers:
        workers.map(meet, range(6))
    assert names == {"meeting 0", "meeting 1", "meeting 2"}


def test_items_are_taken_when_they_are_needed() -> None:
    taken, begun = [], []

    def items():
        for number in range(20):
            taken.append(number)
            yield number

    def begin(number: int) -> None:
        begun.append(number)
        assert len(taken) <= len(begun) + 2

    with Workers(2) as workers:
        workers.map(begin, items())
    assert sorted(begun) == list(range(20))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_first_error_stops_the_rest_and_is_raised(error: type[BaseException], threads: int) -> None:
    begun = []

    def work(number: int) -> None:
        begun.append(number)
        if number == 3:
            raise error("number three")

    with Workers(threads, low_priority=True) as workers:
        with pytest.raises(error, match="number three"):
            workers.map(work, iter(range(1000)))
        assert len(begun) < 1000
        assert workers.map(str, [1]) == ["1"]  # the threads live on


def test_an_error_of_the_iterator_is_raised() -> None:
    def items():
        yield 1
        raise OSError("no more items")

    with Workers(2) as workers, pytest.raises(OSError, match="no more items"):
        workers.map(str, items())


def test_running_calls_have_ended_when_map_raises() -> None:
    failed, ended = threading.Event(), []

    def work(number: int) -> None:
        if number == 0:
            failed.set()
            raise ValueError("first")
        failed.wait(30)
        ended.append(number)

    with Workers(2) as workers, pytest.raises(ValueError, match="first"):
        workers.map(work, [1, 0])
    assert ended == [1]


def test_map_inside_of_a_job_does_not_wait_for_itself() -> None:
    with Workers(1, low_priority=True) as workers:
        assert workers.submit(workers.map, str, [1, 2]).result(30) == ["1", "2"]


def test_submit_passes_results_and_errors() -> None:
    with Workers(1) as workers:
        assert workers.submit(divmod, 7, 2).result(30) == (3, 1)
        assert isinstance(workers.submit(divmod, 7, 0).exception(30), ZeroDivisionError)


def test_close_cancels_what_has_not_begun() -> None:
    begun, go = threading.Event(), threading.Event()

    def first() -> str:
        begun.set()
        go.wait(30)
        return "done"

    workers = Workers(1, low_priority=True)
    running, waiting = workers.submit(first), workers.submit(str)
    begun.wait(30)
    cancelled = threading.Event()
    waiting.add_done_callback(lambda _: cancelled.set())
    closing = threading.Thread(target=workers.close)
    closing.start()
    assert cancelled.wait(30)
    assert waiting.cancelled()
    go.set()
    closing.join(30)
    assert running.result(30) == "done"
    workers.close()
    with pytest.raises(RuntimeError, match="was closed"):
        workers.submit(str)


def test_a_pool_that_nobody_holds_ends_its_threads() -> None:
    workers = Workers(2, name="forgotten")
    gone = weakref.ref(workers)
    assert workers.map(str, [1, 2, 3]) == ["1", "2", "3"]
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("forgotten")]
    assert threads
    del workers
    gc.collect()
    assert gone() is None
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.parametrize("threads", [0, -1, True, 1.5])
def test_number_of_threads_is_checked(threads: object) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Workers(threads)


@LINUX
def test_only_the_workers_get_a_low_priority() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = niceness()
    with Workers(1, low_priority=True) as low, Workers(1) as normal:
        assert low.submit(niceness).result(30) == min(19, before + NICE)
        assert normal.submit(niceness).result(30) == before
    assert niceness() == before


@LINUX
def test_torch_starts_no_team_in_a_worker() -> None:
    script = """
import os, threading, torch
from vescale_ckpt._threads import Workers

torch.set_num_threads(4)

def count():
    before = set(os.listdir("/proc/self/task"))  # by id: one that was joined may stand there a little longer
    (torch.ones(4_000_000) * 2).sum()
    return torch.get_num_threads(), len(set(os.listdir("/proc/self/task")) - before)

def plain(found):
    found.append(torch.get_num_threads())

with Workers(1, low_priority=True) as workers:
    assert workers.submit(count).result() == (1, 0)
found = []
thread = threading.Thread(target=plain, args=(found,))
thread.start(); thread.join()
assert found == [4] and torch.get_num_threads() == 4  # nobody else is changed
found = count()
assert found == (4, 3), found
"""
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@LINUX
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told() -> None:
    workers = Workers(2)
    assert workers.map(str, [1, 2]) == ["1", "2"]
    child = os.fork()
    if not child:
        try:
            workers.map(str, [1, 2])
        except RuntimeError as error:
            os._exit(7 if "was forked" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    workers.close()


def test_workers_work_while_the_interpreter_ends() -> None:
    script = """
import threading
from vescale_ckpt._threads import Workers

def late():
    threading.main_thread().join()
    with Workers(2, low_priority=True) as workers:
        print(sum(workers.map(int, ["1", "2", "3"])))

threading.Thread(target=late).start()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "6"), done.stderr


def test_without_more_threads_the_caller_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    workers = Workers(3)
    assert workers.map(torch.tensor, [1, 2]) == [1, 2]
    workers.close()
