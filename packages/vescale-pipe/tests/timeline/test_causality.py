"""No message arrives before it left, whatever the clocks show; what is within the bounds stays within them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_pipe._timeline.causality import Delays, Transfer, constant_shifts, delays, shifts

RANKS = 4


@st.composite
def transfers(draw: st.DrawFn, drift: int = 0) -> tuple[list[Transfer], list[Transfer], list[int], int]:
    """Draw messages that could have been: as they were, as clocks show them, the errors of these, and their bound."""
    bound = draw(st.integers(1, 1000))
    errors = [0, *(draw(st.integers(-bound, bound)) for _ in range(RANKS - 1))]
    rates = [0, *(draw(st.integers(-drift, drift)) for _ in range(RANKS - 1))]

    def shown(rank: int, time: int) -> int:
        return time + errors[rank] + time * rates[rank] // 1000

    true, seen = [], []
    for _ in range(draw(st.integers(0, 25))):
        src, dst = draw(st.integers(0, RANKS - 1)), draw(st.integers(0, RANKS - 1))
        sent = draw(st.integers(0, 10_000))
        received = sent + draw(st.integers(1, 300))
        true.append(Transfer(src, sent, dst, received))
        seen.append(Transfer(src, shown(src, sent), dst, shown(dst, received)))
    return true, seen, errors, bound


@given(transfers())
def test_constant_errors_are_mended_within_their_bounds(
    case: tuple[list[Transfer], list[Transfer], list[int], int],
) -> None:
    _, seen, errors, bound = case
    found = constant_shifts(range(RANKS), seen, dict.fromkeys(range(RANKS), bound))
    assert found is not None
    assert found[0] == 0
    for one in seen:
        if one.src != one.dst:
            assert one.sent + found[one.src] <= one.received + found[one.dst]
    for rank in range(RANKS):
        assert abs(found[rank]) <= bound
        assert abs(found[rank] + errors[rank]) <= 2 * bound


def test_messages_both_ways_tell_more_than_pings() -> None:
    # Rank 1's clock is 100 behind; a ping said no more than +-1000, and messages take 10 each way.
    seen = [Transfer(0, 0, 1, 10 - 100), Transfer(1, 50 - 100, 0, 60)]
    found = constant_shifts([0, 1], seen, {0: 0, 1: 1000})
    assert found is not None
    assert abs(found[1] - 100) <= 10


def test_a_wrong_bound_is_widened() -> None:
    found = constant_shifts([0, 1], [Transfer(0, 5000, 1, 10)], {0: 0, 1: 1})
    assert found is not None
    assert found[1] >= 4990


@given(transfers(drift=100))
def test_after_shifts_nothing_arrives_before_it_left_and_the_order_on_each_rank_stays(
    case: tuple[list[Transfer], list[Transfer], list[int], int],
) -> None:
    _, seen, _, bound = case
    constant, later = shifts(range(RANKS), seen, dict.fromkeys(range(RANKS), bound))

    def final(rank: int, time: int) -> int:
        return later[rank](time) + constant[rank]

    for one in seen:
        if one.src != one.dst:
            assert final(one.src, one.sent) <= final(one.dst, one.received)
    for rank in range(RANKS):
        times = sorted(
            [one.sent for one in seen if one.src == rank] + [one.received for one in seen if one.dst == rank]
        )
        moved = [final(rank, time) for time in times]
        assert moved == sorted(moved)


def test_a_clock_that_drifts_is_put_off_only_as_far_as_needed() -> None:
    # Rank 1 gets ahead of no constant: early messages need -100 or less, late ones +50 or more.
    seen = [Transfer(1, 100, 0, 0), Transfer(0, 1000, 1, 950)]
    assert constant_shifts([0, 1], seen, {0: 0, 1: 10}) is None
    found = delays([0, 1], seen)
    assert [found[0](time) for time in (-1, 0, 1000)] == [-1, 100, 1100]
    assert [found[1](time) for time in (100, 949, 950, 951)] == [100, 949, 1100, 1101]
    assert (found[0].largest, found[1].largest) == (100, 150)


def test_messages_in_a_circle_are_an_error() -> None:
    # Each rank sends only after it got what the other one sends after that.
    seen = [Transfer(0, 20, 1, 10), Transfer(1, 20, 0, 10)]
    with pytest.raises(ValueError, match=r"circle \(rank . for rank ., rank . for rank .\)"):
        delays([0, 1], seen)


def test_no_messages_no_shifts() -> None:
    assert constant_shifts([0, 1], [Transfer(1, 5, 1, 0)], {0: 0, 1: 7}) == {0: 0, 1: 0}
    assert Delays()(5) == 5
    assert Delays().largest == 0
