"""A ring keeps the newest spans and counts the others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_pipe._timeline.ring import Ring


def put(ring: Ring, start: int, end: int) -> int:
    number = next(ring.numbers)
    ring.ends[number & ring.mask] = 0
    ring.spans[number & ring.mask] = (number, "test", str(start), 0, 0, None, start)
    ring.ends[number & ring.mask] = end
    return number


def put_whole(ring: Ring, start: int, end: int) -> None:
    number = next(ring.numbers)
    ring.spans[number & ring.mask] = (number, "test", str(start), 0, 0, None, start, end)


def starts(ring: Ring) -> list[int]:
    return [token[6] for token, _ in ring.drain()]


def test_the_oldest_are_dropped_and_counted() -> None:
    ring = Ring(4)
    for start in range(10):
        put(ring, start, start + 1)
    assert starts(ring) == [6, 7, 8, 9]
    assert ring.dropped == 6
    assert starts(ring) == []
    assert ring.dropped == 6


def test_spans_that_are_told_of_when_they_are_over_share_the_slots() -> None:
    ring = Ring(2)
    put(ring, 1, 100)
    put_whole(ring, 2, 7)  # its slot has no end of its own
    put_whole(ring, 3, 9)  # in the slot of the first
    assert [(token[6], end) for token, end in ring.drain()] == [(2, 7), (3, 9)]
    assert ring.dropped == 1
    put(ring, 4, 0)
    put(ring, 5, 0)
    assert ring.drain() == []
    assert [token[6] for token in ring.unfinished()] == [4, 5]


def test_a_span_that_is_open_comes_when_it_has_ended() -> None:
    ring = Ring(8)
    number = put(ring, 5, 0)
    put(ring, 6, 7)
    assert starts(ring) == [6]
    assert [token[6] for token in ring.unfinished()] == [5]
    ring.ends[number & ring.mask] = 9
    assert starts(ring) == [5]
    assert ring.unfinished() == []


def test_a_span_that_is_open_when_the_ring_comes_round_is_counted_once() -> None:
    ring = Ring(4)
    put(ring, 0, 0)
    assert starts(ring) == []
    for start in range(1, 20):
        put(ring, start, start + 1)
        ring.drain()
    assert ring.dropped == 1
    assert ring.unfinished() == []


@pytest.mark.parametrize("capacity", [0, -1])
def test_it_holds_something(capacity: int) -> None:
    with pytest.raises(ValueError, match="capacity"):
        Ring(capacity)


@given(st.integers(1, 6), st.lists(st.integers(0, 20), max_size=12))
def test_what_goes_in_comes_out_or_is_counted(bits: int, batches: list[int]) -> None:
    ring = Ring(1 << bits)
    came: list[int] = []
    total = 0
    for count in batches:
        for _ in range(count):
            put(ring, total, total + 1)
            total += 1
        came += starts(ring)
    assert len(came) + ring.dropped == total
    assert came == sorted(set(came))
    if batches:
        # The newest are never lost.
        newest = min(batches[-1], 1 << bits)
        assert came[len(came) - newest :] == list(range(total - newest, total))
