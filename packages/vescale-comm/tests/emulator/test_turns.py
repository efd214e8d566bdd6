"""Turns of threads: one at a time, always in the same order, and no hang."""

import threading

import pytest

from vescale_comm._emulator.turns import DeadlockError, RankAborted, Turns


def run(size, function, timeout=20.0):
    """Run `function(rank, turns)` in threads that take turns; return the turns."""
    turns = Turns(size, lambda leaving, coming: None)

    def main(rank):
        error = None
        try:
            turns.enter(rank)
            function(rank, turns)
        except BaseException as caught:
            error = caught
        turns.leave(rank, error)

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    turns.run(timeout)
    for thread in threads:
        thread.join(5)
    return turns


def test_ranks_run_one_after_the_other():
    seen, arrived = [], set()

    def function(rank, turns):
        seen.append(("begin", rank))
        arrived.add(rank)
        turns.wait(rank, lambda: len(arrived) == 3, lambda: "the others")
        seen.append(("end", rank))

    assert run(3, function).failure is None
    assert seen == [("begin", 0), ("begin", 1), ("begin", 2), ("end", 2), ("end", 0), ("end", 1)]


def test_a_deadlock_names_what_each_rank_waits_for_and_where():
    turns = run(2, lambda rank, turns: turns.wait(rank, lambda: False, lambda: f"thing {rank}"))
    rank, error = turns.failure
    assert isinstance(error, DeadlockError)
    assert rank == 1
    assert "rank 0: waits for thing 0, at " in str(error)
    assert "rank 1: waits for thing 1, at " in str(error)
    assert __file__ in str(error)


def test_a_rank_that_waits_for_one_that_has_ended():
    def function(rank, turns):
        if rank == 1:
            turns.wait(rank, lambda: False, lambda: "rank 0")

    error = run(2, function).failure[1]
    assert isinstance(error, DeadlockError)
    assert "rank 0: has ended" in str(error)


def test_the_first_error_ends_all_ranks():
    ended = []

    def function(rank, turns):
        if rank == 1:
            raise KeyError("cause")
        try:
            turns.wait(rank, lambda: False, lambda: "nothing")
        except RankAborted:
            ended.append(rank)
            raise

    turns = run(3, function)
    assert ended == [0]
    assert turns.failure[0] == 1
    assert isinstance(turns.failure[1], KeyError)


def test_asking_for_ever_is_found():
    def function(rank, turns):
        while True:
            turns.poll(rank, lambda: "a work that nobody starts")

    error = run(2, function).failure[1]
    assert "again and again" in str(error)
    assert "rank 0: waits for a work that nobody starts" in str(error)


def test_a_wait_that_expires_gives_up_only_where_nothing_else_can_run():
    found, done = [], []

    def function(rank, turns):
        if rank == 0:
            found.append(turns.wait(rank, lambda: bool(done), lambda: "a flag", expires=True))
            found.append(turns.wait(rank, lambda: False, lambda: "nothing", expires=True))
        else:
            done.append(rank)

    assert run(2, function).failure is None
    assert found == [True, False]


def test_a_rank_that_keeps_the_turn_is_reported_with_its_stack():
    release = threading.Event()

    def function(rank, turns):
        if rank == 0:
            release.wait(20)

    with pytest.raises(TimeoutError, match=r"rank 0 has had the turn for 0\.1 s") as caught:
        run(2, function, timeout=0.1)
    release.set()
    assert "release.wait(20)" in str(caught.value)
