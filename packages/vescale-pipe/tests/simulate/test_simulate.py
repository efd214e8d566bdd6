"""Times that were worked out on paper for two ranks and two micro-batches, and the formulas of the papers."""

import pytest
import torch

from vescale_pipe._schedule import Action, Kind, Schedule
from vescale_pipe._simulate import Costs, simulate
from vescale_pipe.errors import ScheduleError

ONE_F_ONE_B = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
GPIPE = ("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")
METHODS = ["scalar", "waves"]


def starts(done):
    return [some.tolist() for some in done.start]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("lines", "costs", "expected", "makespan"),
    [
        # A forward takes 1, a backward 2; rank 0 waits for the backwards of rank 1.
        (ONE_F_ONE_B, {}, [[0, 1, 4, 7], [1, 2, 4, 5]], 9),
        (GPIPE, {}, [[0, 1, 5, 7], [1, 2, 3, 5]], 9),
        # The first message arrives at 1.5, the first gradient at 5, the second at 8.
        (ONE_F_ONE_B, {"latency": 0.5}, [[0, 1, 5, 8], [1.5, 2.5, 4.5, 5.5]], 10),
        # 3 bytes at 2 a second and 0.5 of latency are 2 seconds.
        (GPIPE, {"latency": 0.5, "bytes_per_second": 2, "message_bytes": 3}, [[0, 1, 9, 11], [3, 4, 5, 7]], 13),
        # The same on one link: the second message leaves at 2.5, when the first one has gone, not at 2.
        (
            GPIPE,
            {"latency": 0.5, "bytes_per_second": 2, "message_bytes": 3, "link": "fifo"},
            [[0, 1, 9.5, 11.5], [3, 4.5, 5.5, 7.5]],
            13.5,
        ),
        # Rank 1 is twice as fast.
        (ONE_F_ONE_B, {"rank_speed": [1, 2]}, [[0, 1, 2.5, 4.5], [1, 1.5, 2.5, 3]], 6.5),
        # Stage 1 has a backward of 3.
        (ONE_F_ONE_B, {"backward": [2, 3]}, [[0, 1, 5, 9], [1, 2, 5, 6]], 11),
        # ZB-H1: idle (P - 1)(F + I - W) = 1 on each rank.
        (("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"), {}, [[0, 1, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]], 7),
        # A joined pair of a forward (1) and a backward (2), of which 3/4 of the shorter is hidden, takes 2.25.
        (("0F0 0F1 0B0 0B1", "1F0 (1F1 1B0) 1B1"), {"overlap": 0.75}, [[0, 1, 4.25, 6.25], [1, 2, 2, 4.25]], 8.25),
        (("0F0 0F1 0B0 0B1", "1F0 (1F1 1B0) 1B1"), {}, [[0, 1, 5, 7], [1, 2, 2, 5]], 9),
        # The inputs of stage 0 need no gradients: its whole backward is a W.
        (("0F0 0W0", "1F0 1B0"), {}, [[0, 4], [1, 2]], 5),
        (("0F0 0F1", "1F0 1F1"), {}, [[0, 1], [1, 2]], 3),
        (("0F0 0B0",), {}, [[0, 1]], 3),
    ],
)
def test_times_worked_out_on_paper(written, method, lines, costs, expected, makespan):
    done = simulate(written(*lines), Costs(**costs), method=method)
    assert starts(done) == expected
    assert done.makespan == makespan


@pytest.mark.parametrize("method", METHODS)
def test_stages_of_one_rank_exchange_no_messages(written, method):
    # Rank 0 holds stages 0 and 3, rank 1 stages 1 and 2.
    schedule = written("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0", placement=[0, 1, 1, 0])
    assert starts(simulate(schedule, Costs(latency=1.0), method=method)) == [[0, 5, 6, 14], [2, 3, 9, 11]]


@pytest.mark.parametrize("method", METHODS)
def test_stages_that_take_from_several(written, method):
    lines = ("0F0 0B0", "1F0 1B0", "2F0 2B0")
    # 1 and 2 work side by side on what 0 gives.
    assert starts(simulate(written(*lines), edges=[(0, 1), (0, 2)], method=method)) == [[0, 4], [1, 2], [1, 2]]
    # A skip from 0 to 2 beside the chain; what 0 gives has 3 bytes, so that the skip is slower than the chain.
    costs = Costs(bytes_per_second=1.0, message_bytes=[3, 0.5, 0])
    done = simulate(written(*lines), costs, edges=[(1, 2), (0, 2), (0, 1)], method=method)
    # Forward: 0 until 1, at 1 and 2 at 4; 1 until 5, at 2 at 5.5. Back: 2 until 8.5, at 1 at 9, at 0 at 11.5; 1 until
    # 11, at 0 at 14.
    assert starts(done) == [[0, 14], [4, 9], [5.5, 6.5]]
    # One link for both messages of a rank: 0 sends to two ranks, which are two links.
    fifo = Costs(bytes_per_second=1.0, message_bytes=[3, 0.5, 0], link="fifo")
    assert starts(simulate(written(*lines), fifo, edges=[(0, 1), (0, 2), (1, 2)], method=method)) == starts(done)
    # Two stages on one rank that take from the same one: the lower stage is served first.
    shared = written("0F0", "2F0 1F0", placement=[0, 1, 1])
    both = simulate(shared, fifo, edges=[(0, 1), (0, 2)], method=method)
    assert starts(both) == [[0], [7, 8]]


def gpipe(ranks, microbatches):
    every = range(microbatches)
    rows = [[Action(kind, rank, m) for kind in (Kind.F, Kind.B) for m in every] for rank in range(ranks)]
    return Schedule.of("gpipe", range(ranks), microbatches, rows)


def one_f_one_b(ranks, microbatches):
    rows = []
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, microbatches)
        row = [Action(Kind.F, rank, m) for m in range(ahead)]
        for m in range(microbatches):
            row += [Action(Kind.F, rank, m + ahead)] if m + ahead < microbatches else []
            row.append(Action(Kind.B, rank, m))
        rows.append(row)
    return Schedule.of("1f1b", range(ranks), microbatches, rows)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 5), (4, 8), (8, 24), (5, 3)])
def test_formulas_of_gpipe_and_1f1b(method, ranks, microbatches):
    costs = Costs(forward=1.25, backward=3.5)
    for schedule in (gpipe(ranks, microbatches), one_f_one_b(ranks, microbatches)):
        done = simulate(schedule, costs, method=method)
        work, idle = microbatches * 4.75, (ranks - 1) * 4.75
        assert done.makespan == work + idle
        assert done.busy == (work,) * ranks
        assert done.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1), abs=1e-12)
        live = [microbatches if schedule.name == "gpipe" else min(ranks - r, microbatches) for r in range(ranks)]
        assert list(done.peak) == live


@pytest.mark.parametrize("method", METHODS)
def test_measured_durations_take_the_place_of_costs(written, method):
    schedule = written(*ONE_F_ONE_B)
    durations = [torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([5.0, 6.0, 7.0, 8.0])]
    done = simulate(schedule, durations=durations, method=method)
    # 0F0 to 1, 0F1 to 3; 1F0 1-6, 1B0 6-12, 1F1 12-19, 1B1 19-27; 0B0 12-15, 0B1 27-31.
    assert starts(done) == [[0, 1, 12, 27], [1, 6, 12, 19]]
    assert done.makespan == 31
    for wrong in ([durations[0]], [durations[0], durations[1][:3]]):
        with pytest.raises(ValueError, match="durations: give one number for each action"):
            simulate(schedule, durations=wrong, method=method)
    with pytest.raises(ValueError, match="durations: they must be finite"):
        simulate(schedule, durations=[-durations[0], durations[1]], method=method)


def test_many_ranks_are_simulated_by_waves():
    done = simulate(one_f_one_b(96, 7), Costs(latency=0.3))
    assert done.makespan == simulate(one_f_one_b(96, 7), Costs(latency=0.3), method="scalar").makespan


def test_nothing_takes_no_time():
    done = simulate(Schedule.of("empty", [0, 1], 0, [[], []]))
    assert (done.makespan, done.bubble, done.own_bubble, done.busy, done.peak) == (0, 0, 0, (0, 0), (0, 0))
    assert done.critical_path() == ()


def test_unknown_methods_and_edges_are_refused(written):
    schedule = written(*ONE_F_ONE_B)
    with pytest.raises(ValueError, match="method: 'fast' given"):
        simulate(schedule, method="fast")
    for edge in ((0, 2), (-1, 0), (1, 1)):
        with pytest.raises(ValueError, match="edges: "):
            simulate(schedule, edges=[edge])
    with pytest.raises(ScheduleError, match="does not go on"):
        simulate(schedule, edges=[(0, 1), (1, 0)])
