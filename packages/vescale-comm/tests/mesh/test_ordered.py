"""Collectives in steps: the order in which steps begin, and what becomes of errors."""

from __future__ import annotations

import pytest

from vescale_comm._mesh.ordered import Ordered
from vescale_comm.errors import TransportError


class Step:
    """Something to wait for."""

    def __init__(self, done, name, error=None):
        self.done, self.name, self.error = done, name, error

    def wait(self):
        self.done.append(self.name)
        if self.error is not None:
            raise self.error


def begin(log, name, before=None, error=None):
    """Begin a collective of two steps."""

    def steps():
        log.append(f"{name}1 begins")
        yield Step(log, f"{name}1")
        log.append(f"{name}2 begins")
        yield Step(log, f"{name}2", error)
        log.append(f"{name} ends")

    return Ordered(steps(), before)


def all_of(name):
    return [f"{name}1", f"{name}2 begins", f"{name}2", f"{name} ends"]


def test_waiting_for_one_finishes_those_before_it():
    log: list[str] = []
    first = begin(log, "a")
    second = begin(log, "b", first)
    third = begin(log, "c", second)
    assert log == ["a1 begins", "b1 begins", "c1 begins"]
    second.wait()
    assert log[3:] == [*all_of("a"), *all_of("b")]
    assert (first.finished, second.finished, third.finished) == (True, True, False)
    first.wait()
    third.wait()
    assert log[11:] == all_of("c")


def test_an_error_stays():
    log: list[str] = []
    first = begin(log, "a", error=RuntimeError("gone"))
    second = begin(log, "b", first)
    for work in (second, first, second):
        with pytest.raises(RuntimeError, match="gone"):
            work.wait()
    assert log == ["a1 begins", "b1 begins", "a1", "a2 begins", "a2"]
    with pytest.raises(ZeroDivisionError):
        Ordered((1 / 0 for _ in [1]), None)
    interrupted = begin([], "a", error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        interrupted.wait()
    with pytest.raises(TransportError, match="interrupted by KeyboardInterrupt"):
        interrupted.wait()


def test_thousands_under_way():
    log: list[str] = []
    work = None
    for number in range(3000):
        work = begin(log, f"{number}-", work)
    assert work is not None
    work.wait()
    assert log.count("0- ends") == 1
    assert log[-1] == "2999- ends"
