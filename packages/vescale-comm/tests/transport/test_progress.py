"""Threads that post and follow collectives: what they move, what fails in them, how they end."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vescale_comm._transport import PeerTransport
from vescale_comm._transport.progress import Progress
from vescale_comm._transport.running import Last, Message, Running
from vescale_comm.errors import TransportError

LARGE = 200_000
"""Elements of a buffer that threads take."""


class Gate:
    """A message that comes when it is let through."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.open, self.error = threading.Event(), error

    def wait(self) -> None:
        assert self.open.wait(20)
        if self.error is not None:
            raise self.error


def explain(message: Message | None, error: BaseException) -> TransportError:
    return TransportError(f"{message.verb if message else 'a step'}: {error!r}")


def handed_over(progress: Progress, steps: Iterator[Sequence[Message]], follow: bool = True) -> Running:
    run = Running(steps, explain, begin=False)
    progress.take(run, follow)
    return run


def threads_of(prefix: str = "vescale-comm") -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]


def end(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), thread.name


def test_later_messages_are_posted_without_a_wait() -> None:
    first, second = Gate(), Gate()
    posted = threading.Event()

    def steps() -> Iterator[Sequence[Message]]:
        yield [Message(first, "first")]
        posted.set()
        yield Last([Message(second, "second")])

    progress = Progress()
    run = handed_over(progress, steps())
    assert not posted.is_set()
    first.open.set()
    assert posted.wait(20)
    assert not run.finished  # the last messages are for who waits
    second.open.set()
    run.wait()
    assert run.finished
    progress.close()


@pytest.mark.parametrize("error", [RuntimeError("lost"), IndexError("odd"), MemoryError()])
@pytest.mark.parametrize("place", ["at once", "message", "after it"])
def test_what_fails_in_a_thread_is_raised_in_wait_and_stops_no_other(place: str, error: BaseException) -> None:
    def steps() -> Iterator[Sequence[Message]]:
        if place == "at once":
            raise error
        gate = Gate(error if place == "message" else None)
        gate.open.set()
        yield [Message(gate, "sending")]
        raise error

    def fine() -> Iterator[Sequence[Message]]:
        gate = Gate()
        gate.open.set()
        yield [Message(gate, "sending")]

    progress = Progress()
    bad, good = handed_over(progress, steps()), handed_over(progress, fine())
    good.wait()
    for _ in range(2):
        with pytest.raises(TransportError, match=type(error).__name__):
            bad.wait()
    handed_over(progress, fine(), follow=False).wait()
    progress.close()


def interrupt(thread: int) -> None:
    """Interrupt a thread as soon as it waits for a collective."""
    while True:
        frame = sys._current_frames()[thread]
        while frame is not None:
            if frame.f_code is Running.wait.__code__:
                signal.pthread_kill(thread, signal.SIGINT)
                return
            frame = frame.f_back  # type: ignore[assignment]
        time.sleep(0.001)


def test_a_wait_that_is_interrupted_before_all_is_posted_can_be_repeated() -> None:
    gate, last = Gate(), Gate()
    last.open.set()
    done: list[str] = []

    def steps() -> Iterator[Sequence[Message]]:
        yield [Message(gate, "sending")]
        yield Last([Message(last, "receiving")])
        done.append("summed")

    progress = Progress()
    run = handed_over(progress, steps())
    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        helper = threading.Thread(target=interrupt, args=(main,), daemon=True)
        helper.start()
        with pytest.raises(KeyboardInterrupt):
            run.wait()
        helper.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not done
    gate.open.set()
    run.wait()
    assert done == ["summed"]
    progress.close()


def test_threads_end_with_close_or_with_their_owner() -> None:
    others = set(threads_of())

    def empty() -> Iterator[Sequence[Message]]:
        yield []

    def started() -> list[threading.Thread]:
        return [thread for thread in threads_of() if thread not in others]

    progress = Progress()
    assert not started()  # none before they are needed
    for _ in range(2):  # they come again where it goes on after close
        handed_over(progress, empty()).wait()
        mine = started()
        assert len(mine) == 2
        assert all(thread.daemon for thread in mine)
        progress.close()
        end(mine)
    handed_over(progress, empty()).wait()
    mine = started()
    del progress
    end(mine)
    assert not started()


def leave(group: dist.ProcessGroup) -> None:
    """Close the connections of a group to rank 0, which then gets no message, without waiting for a time-out."""
    with contextlib.suppress(RuntimeError):
        group.recv([torch.empty(1)], 0, 7).wait(timedelta(milliseconds=1))


@pytest.mark.ranks(2)
def test_large_buffers_go_by_threads(rank: int, world: int) -> None:
    """Threads end with their transport; tensors of inference mode; a rank that does not come."""
    group = dist.new_group()
    transport = PeerTransport(group)
    small = torch.ones(8)
    transport.all_reduce(small).wait()
    assert not threads_of()
    with torch.inference_mode():
        buffers = [torch.full((LARGE,), float(rank + 1)) for _ in range(3)]
        works: list[Any] = [transport.all_reduce(buffers[0]), transport.reduce_scatter(buffers[1], divisor=2)]
        works.append(transport.broadcast(buffers[2], 1))
        for work in reversed(works):
            work.wait()
    own = slice(rank * LARGE // 2, (rank + 1) * LARGE // 2)
    for got, want in ((buffers[0], 3.0), (buffers[1][own], 1.5), (buffers[2], 2.0)):
        assert torch.equal(got, torch.full_like(got, want))
    mine = threads_of()
    assert {thread.name for thread in mine} == {"vescale-comm posts", "vescale-comm follows"}
    transport.close()
    end(mine)
    for how in ("close", "del"):
        transport = PeerTransport(group)
        transport.all_reduce(torch.ones(LARGE)).wait()
        mine = threads_of()
        assert len(mine) == 2
        if how == "close":
            transport.close()
        del transport  # without a garbage collection
        end(mine)
    dist.barrier()
    if rank == 0:
        transport = PeerTransport(dist.new_group([0], use_local_synchronization=True))
        alone = torch.ones(LARGE)
        transport.all_reduce(alone, divisor=2).wait()
        assert torch.equal(alone, torch.full((LARGE,), 0.5))
        transport.close()
    left = dist.new_group()
    transport = PeerTransport(left)
    if rank == 1:
        leave(left)
    else:
        work = transport.all_reduce(torch.ones(LARGE))
        for _ in range(2):
            with pytest.raises(TransportError, match=r"collective 0, all_reduce of 200000 .*(ing from|ing to) rank 1"):
                work.wait()
    dist.barrier()
