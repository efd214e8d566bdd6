"""Costs: what is not given follows from what is, and what makes no sense is refused."""

import math

import pytest

from vescale_pipe._simulate import Costs


def table(costs, stages=2):
    return costs.seconds(stages).tolist()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [1, 2, 1, 1]),
        ({"forward": 3.0}, [3, 6, 3, 3]),
        ({"backward": 5.0}, [1, 5, 2.5, 2.5]),
        ({"backward": 5.0, "input_grad": 4.0}, [1, 5, 4, 1]),
        ({"backward": 5.0, "weight_grad": 4.0}, [1, 5, 1, 4]),
        ({"input_grad": 4.0}, [1, 5, 4, 1]),
        ({"weight_grad": 4.0}, [1, 5, 1, 4]),
        ({"input_grad": 4.0, "weight_grad": 0.5}, [1, 4.5, 4, 0.5]),
        ({"backward": 3.0, "input_grad": 4.0, "weight_grad": 0.5}, [1, 3, 4, 0.5]),
    ],
)
def test_what_is_not_given_follows(given, expected):
    assert table(Costs(**given)) == [[number] * 2 for number in expected]


def test_numbers_per_stage():
    costs = Costs(forward=[1, 2], backward=[3, 5], message_bytes=[8, 0], bytes_per_second=4.0, activation=(6, 7))
    assert table(costs) == [[1, 2], [3, 5], [1.5, 2.5], [1.5, 2.5]]
    assert costs.transfer(2).tolist() == [2, 0]
    assert [some.tolist() for some in costs.memory(2)] == [[6, 7], [6, 7]]
    assert Costs(message_bytes=8.0).transfer(2).tolist() == [0, 0]
    with pytest.raises(ValueError, match="forward: 2 numbers given for 3 stages"):
        costs.seconds(3)


def test_a_chunk_costs_its_share():
    costs = Costs(forward=3, backward=6, activation=8, kept_for_weights=4, message_bytes=5, latency=2).divided(2)
    assert table(costs) == [[1.5] * 2, [3] * 2, [1.5] * 2, [1.5] * 2]
    assert (costs.activation, costs.kept_for_weights, costs.message_bytes, costs.latency) == (4, 2, 5, 2)
    with pytest.raises(ValueError, match="forward is given per stage"):
        Costs(forward=[1.0, 2.0]).divided(2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("forward", -1.0),
        ("backward", [1.0, math.nan]),
        ("weight_grad", math.inf),
        ("latency", -0.1),
        ("latency", math.nan),
        ("bytes_per_second", 0.0),
        ("message_bytes", -1),
        ("activation", -1),
        ("overlap", 1.1),
        ("overlap", math.nan),
        ("rank_speed", [1.0, 0.0]),
        ("rank_speed", [math.inf]),
        ("link", "rendezvous"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        Costs(**{name: value})


def test_a_half_longer_than_the_whole_is_refused():
    with pytest.raises(ValueError, match="backward: it is shorter"):
        Costs(backward=1.0, input_grad=2.0).seconds(1)


def test_speeds_are_for_each_rank():
    assert Costs().speeds(3).tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="2 speeds given for 3 ranks"):
        Costs(rank_speed=[1, 2]).speeds(3)
