"""Times of drifting clocks come back within the bound."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from vescale_pipe._timeline.align import ClockMap, chains
from vescale_pipe._timeline.rank_file import RankSpans
from vescale_pipe._timeline.span import ClockReading

SECOND = 10**9


class Clock:
    """A clock with a constant offset and drift, exactly."""

    def __init__(self, offset: int, drift_ppm: int) -> None:
        self.offset = offset
        self.rate = 1 + Fraction(drift_ppm, 10**6)

    def shows(self, true: int) -> int:
        return int(true * self.rate) + self.offset


clocks = st.builds(Clock, st.integers(0, 10**15), st.integers(-200, 200))


def read(own: Clock, other: Clock, true: int, error: int, bound: int) -> ClockReading:
    return ClockReading(own.shows(true), 0, other.shows(true) - own.shows(true) + error, bound)


@given(
    clocks,
    clocks,
    st.lists(st.tuples(st.integers(0, 1000), st.integers(-3000, 3000)), min_size=1, max_size=6),
    st.lists(st.integers(0, 1000), min_size=1, max_size=5),
)
def test_between_readings_the_error_is_within_the_bound(
    own: Clock, other: Clock, readings: list[tuple[int, int]], asked: list[int]
) -> None:
    some = [read(own, other, place * SECOND, error, 3000) for place, error in readings]
    to_other = ClockMap(some)
    places = [place for place, _ in readings]
    for place in asked:
        if min(places) <= place <= max(places):
            true = place * SECOND
            time = own.shows(true)
            # Two roundings of a clock, one of the map.
            assert abs(to_other(time) - other.shows(true)) <= to_other.bound(time) + 3
            assert to_other.bound(time) == 3000


@given(clocks, clocks, st.integers(-100, 200), st.integers(-3000, 3000), st.integers(-3000, 3000))
def test_beyond_the_readings_the_bound_grows(own: Clock, other: Clock, place: int, first: int, last: int) -> None:
    to_other = ClockMap([read(own, other, 0, first, 3000), read(own, other, 100 * SECOND, last, 3000)])
    true = place * SECOND
    time = own.shows(true)
    assert abs(to_other(time) - other.shows(true)) <= to_other.bound(time) + 5


@given(clocks, clocks, st.lists(st.tuples(st.integers(0, 10**7), st.integers(-3000, 3000)), min_size=2, max_size=9))
def test_the_order_of_times_stays(own: Clock, other: Clock, readings: list[tuple[int, int]]) -> None:
    # Readings within 10 ms, each wrong by up to 3 us: a line through all of them would go backwards.
    to_other = ClockMap([read(own, other, true, error, 3000) for true, error in readings])
    times = [own.shows(true) for true in range(0, 10**7, 10**5)]
    values = [to_other(time) for time in times]
    assert values == sorted(values)


@given(clocks, clocks, clocks, st.integers(0, 600))
def test_clocks_are_chained(first: Clock, second: Clock, third: Clock, place: int) -> None:
    end = 600 * SECOND

    def rank(number: int, own: Clock, parent: int, other: Clock | None) -> RankSpans:
        one = RankSpans(number, origin=own.shows(0))
        if other is not None:
            for true in (0, end):
                now = own.shows(true)
                one.readings.append(ClockReading(now - one.origin, parent, other.shows(true) - now, 10))
        return one

    files = {0: rank(0, first, 0, None), 2: rank(2, second, 0, first), 3: rank(3, third, 2, second)}
    to_common = chains(files)
    true = place * SECOND
    for number, own in ((0, first), (2, second), (3, third)):
        time = own.shows(true) - files[number].origin
        assert abs(to_common[number](time) - first.shows(true)) <= to_common[number].bound(time) + 5
        assert to_common[number].known
    assert [to_common[number].bound(0) for number in (0, 2, 3)] == [0, 10, 20]


def test_without_readings_the_time_of_day_counts() -> None:
    files = {
        0: RankSpans(0, origin=1000, wall=5_000_000),
        1: RankSpans(1, origin=77, wall=5_000_300),
        2: RankSpans(2, origin=0, wall=0, readings=[ClockReading(0, 9, 5, 1)]),
    }
    to_common = chains(files)
    assert to_common[1](10) - to_common[0](0) == 310
    # Rank 2 knows the clock of a rank whose file is not there.
    assert to_common[2](0) - to_common[0](0) == -5_000_000
    assert [to_common[rank].known for rank in range(3)] == [True, False, False]
