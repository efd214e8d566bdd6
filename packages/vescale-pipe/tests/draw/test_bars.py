"""What a picture shows, before it is drawn."""

import pytest

from vescale_pipe._draw.bars import Bar, number, picture
from vescale_pipe._simulate import Costs, simulate


def test_bars_of_a_schedule(one_f_one_b):
    shown = picture(one_f_one_b)
    assert [(bar.rank, bar.name, bar.start, bar.end) for bar in shown.bars] == [
        (0, "0F0", 0, 1),
        (0, "0F1", 1, 2),
        (0, "0B0", 4, 6),
        (0, "0B1", 7, 9),
        (1, "1F0", 1, 2),
        (1, "1B0", 2, 4),
        (1, "1F1", 4, 5),
        (1, "1B1", 5, 7),
    ]
    assert [bar.label for bar in shown.bars] == ["0", "1", "0", "1", "0", "0", "1", "1"]
    assert shown.rows == ("rank 0", "rank 1")
    assert shown.title == "1f1b: 2 ranks, 2 micro-batches"
    assert shown.figures == "makespan 9, bubble 33.3% (in the ranks' own span 33.3%), peak 2 activations"
    assert (shown.length, shown.unit) == (9, "")


def test_chunks_have_shades_and_share_the_time_of_a_rank(folded):
    shown = picture(folded)
    assert {(bar.name[0], bar.shade) for bar in shown.bars} == {("0", 0), ("1", 0), ("2", 1), ("3", 1)}
    assert shown.rows == ("rank 0 (stages 0, 3)", "rank 1 (stages 1, 2)")
    assert {bar.end - bar.start for bar in shown.bars if bar.kind in "FIW"} == {0.5, 1.5}
    halves = [(bar.name, bar.part, bar.start, bar.end) for bar in shown.bars if bar.part != "whole"]
    (first, upper, a, b), (second, lower, c, d) = halves
    assert (first, upper, second, lower) == ("2F1", "upper", "2B0", "lower")
    assert (a, b) == (c, d)


def test_costs_give_seconds(one_f_one_b):
    costs = Costs(forward=0.002, backward=0.004, activation=3 * 2**20)
    shown = picture(one_f_one_b, costs, "mine")
    assert shown.unit == "s"
    assert shown.title == "mine"
    assert shown.figures == "makespan 18 ms, bubble 33.3% (in the ranks' own span 33.3%), peak 6 MiB"
    done = simulate(one_f_one_b, costs)
    assert picture(done, title="mine") == shown
    assert picture(done, unit="").figures.startswith("makespan 0.018, ")
    with pytest.raises(ValueError, match="costs are for schedules"):
        picture(done, costs)


def test_measured_bars():
    bars = [
        Bar(0, 1.0, 2.0, "0", "F"),
        Bar(0, 1.5, 2.5, "0", "B"),
        Bar(0, 2.5, 3.0, "x", "message"),
        Bar(2, 4.0, 5.0, "0", "F"),
    ]
    shown = picture(bars, title="measured")
    assert shown.rows == ("rank 0", "rank 1", "rank 2")
    # From 1 to 5 on three ranks; busy are 1.5, 0 and 1.
    assert shown.figures == f"makespan 4 s, bubble {1 - 2.5 / 12:.1%}"
    assert (shown.length, shown.unit) == (5, "s")
    assert picture([]).length == 0


@pytest.mark.parametrize(
    "bar", [Bar(-1, 0, 1, "0"), Bar(0, 2, 1, "0"), Bar(0, -1, 1, "0"), Bar(0, 0, float("nan"), "0")]
)
def test_bars_that_make_no_sense_are_refused(bar):
    with pytest.raises(ValueError, match="bars: "):
        picture([bar])


@pytest.mark.parametrize(
    ("seconds", "unit", "text"),
    [
        (0.0, "s", "0 s"),
        (1.5, "s", "1.5 s"),
        (123.0, "s", "123 s"),
        (0.25, "s", "250 ms"),
        (4.2e-5, "s", "42 us"),
        (3e-9, "s", "3 ns"),
        (5e-13, "s", "5e-13 s"),
        (0.25, "", "0.25"),
        (33.0, "", "33"),
    ],
)
def test_numbers_as_people_write_them(seconds, unit, text):
    assert number(seconds, unit) == text
