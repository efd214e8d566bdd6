"""Costs of stages from costs of finer pieces or of ranks."""

import pytest

from vescale_pipe._schedules._scale import costs_per_stage, make_task
from vescale_pipe._simulate import Costs
from vescale_pipe.errors import ScheduleError


def test_numbers_are_for_a_rank_and_are_divided():
    costs = costs_per_stage(Costs(forward=3.0, backward=6.0, latency=0.5, message_bytes=8.0, activation=2.0), 2, 2)
    assert (costs.forward, costs.backward, costs.activation) == (1.5, 3.0, 1.0)
    assert (costs.latency, costs.message_bytes) == (0.5, 8.0)


def test_pieces_are_added_and_the_last_one_speaks():
    given = Costs(forward=[1, 2, 3, 4], weight_grad=0.5, message_bytes=[10, 20, 30, 40], rank_speed=[1, 2])
    costs = costs_per_stage(given, 2, 1)
    assert costs.forward == (3.0, 7.0)
    assert costs.weight_grad == 1.0
    assert costs.message_bytes == (20.0, 40.0)
    assert costs.rank_speed == (1.0, 2.0)
    assert costs.input_grad is None
    assert costs_per_stage(given, 2, 2).forward == (1.0, 2.0, 3.0, 4.0)


@pytest.mark.parametrize(("ranks", "chunks"), [(3, 1), (2, 4), (4, 2)])
def test_pieces_must_divide(ranks, chunks):
    with pytest.raises(ScheduleError, match=f"4 pieces, which do not divide evenly into {ranks * chunks} stages"):
        costs_per_stage(Costs(forward=[1, 2, 3, 4]), ranks, chunks)


def test_sequences_must_agree():
    with pytest.raises(ScheduleError, match=r"one length; given are \{'forward': 2, 'activation': 4\}"):
        costs_per_stage(Costs(forward=[1, 2], activation=[1, 2, 3, 4]), 2, 1)


def test_list_scheduling_gets_seconds_of_the_ranks_and_of_messages_between_them():
    costs = Costs(
        forward=2.0, input_grad=[1, 2, 3, 4], weight_grad=1.0, latency=0.5, message_bytes=[10, 20, 30, 40],
        bytes_per_second=10.0, rank_speed=[1, 2], activation=5.0, kept_for_weights=3.0,
    )  # fmt: skip
    task = make_task((0, 1, 1, 0), 7, costs)
    assert task.seconds == ((2, 1, 1, 2), (2, 1.5, 2, 5), (1, 1, 1.5, 4), (1, 0.5, 0.5, 1))
    assert task.hop == (1.5, 0.0, 3.5, 0.0)
    assert (task.kept, task.later) == ((5.0,) * 4, (3.0,) * 4)
    assert task.num_ranks == 2
