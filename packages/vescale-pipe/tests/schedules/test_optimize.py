"""The search finds optima of tiny cases, is never worse than a schedule with a name, and keeps within memory."""

import itertools
import random

import pytest

from vescale_pipe._schedule import Action, Kind, Schedule, validate
from vescale_pipe._schedules import build_schedule, costs_per_stage, optimize
from vescale_pipe._schedules._search import named
from vescale_pipe._simulate import Costs, simulate
from vescale_pipe.errors import ScheduleError

NAMES = ("gpipe", "1f1b", "eager_1f1b", "zb_h1", "zb_h2")


def all_orders(stage, count, whole):
    """Return all orders of one stage, each in the order of micro-batches (which are all alike).

    Backwards are split, or, with `whole`, each of them split or not.
    """
    found = []

    def extend(row, f, i, waiting):
        if i == count and not waiting:
            found.append(row)
        if f < count:
            extend([*row, Action(Kind.F, stage, f)], f + 1, i, waiting)
        if i < f:
            extend([*row, Action(Kind.I, stage, i)], f, i + 1, [*waiting, i])
        if whole and i < f and not waiting:
            extend([*row, Action(Kind.B, stage, i)], f, i + 1, waiting)
        if waiting:
            extend([*row, Action(Kind.W, stage, waiting[0])], f, i, waiting[1:])

    extend([], 0, 0, [])
    return found


def optimum(oracle, ranks, count, memory=None, **prices):
    """Try everything."""
    best = float("inf")
    for rows in itertools.product(*(all_orders(stage, count, "whole" in prices) for stage in range(ranks))):
        try:
            run = oracle(Schedule.of("any", range(ranks), count, rows), **prices)
        except AssertionError:
            # Ranks that wait for each other.
            continue
        if memory is None or max(run.peak) <= memory:
            best = min(best, run.makespan)
    return best


def as_costs(prices):
    return Costs(
        forward=prices["forward"],
        input_grad=prices["inputs"],
        weight_grad=prices["weights"],
        latency=prices.get("latency", 0.0),
        backward=prices.get("whole"),
    )


SKEWED = [
    (3, 2, {"forward": [1, 3, 3], "inputs": [2, 2, 2], "weights": [1, 4, 1]}, 24.0, 21.0),
    (3, 2, {"forward": [3, 1, 3], "inputs": [2, 3, 4], "weights": [1, 4, 3], "latency": 1.0}, 32.0, 28.0),
    (3, 2, {"forward": [2, 3, 1], "inputs": [1, 3, 4], "weights": [1, 3, 4], "latency": 0.5}, 25.5, 24.0),
]


@pytest.mark.parametrize(("ranks", "count", "prices", "by_name", "best"), SKEWED)
def test_skewed_costs_have_better_schedules_than_those_with_names(oracle, ranks, count, prices, by_name, best):
    assert optimum(oracle, ranks, count, **prices) == best
    assert min(oracle(build_schedule(name, ranks, count), **prices).makespan for name in NAMES) == by_name
    found = optimize(as_costs(prices), ranks, count, chunks=[1])
    validate(found, canonical=True)
    assert oracle(found, **prices).makespan == best


@pytest.mark.parametrize("seed", range(6))
def test_tiny_cases_with_random_costs_are_solved(oracle, seed):
    draw = random.Random(seed)
    ranks, count = draw.choice([(2, 2), (2, 3), (3, 2)])
    prices = {what: [draw.randint(1, 4) for _ in range(ranks)] for what in ("forward", "inputs", "weights")}
    prices["latency"] = draw.choice([0.0, 0.5, 1.0])
    found = optimize(as_costs(prices), ranks, count, chunks=[1])
    assert oracle(found, **prices).makespan == optimum(oracle, ranks, count, **prices)


@pytest.mark.parametrize("memory", [1, 2, 3])
def test_tiny_cases_with_little_memory_are_solved(oracle, memory):
    prices = {"forward": [1, 2], "inputs": [2, 1], "weights": [1, 2]}
    found = optimize(as_costs(prices), 2, 3, chunks=[1], memory=memory)
    run = oracle(found, **prices)
    assert max(run.peak) <= memory
    assert run.makespan == optimum(oracle, 2, 3, memory, **prices)


@pytest.mark.parametrize("seed", range(5))
def test_it_is_never_worse_than_a_schedule_with_a_name_that_fits(checked, seed):
    draw = random.Random(seed)
    ranks, count = draw.choice([(1, 3), (2, 5), (3, 4), (3, 7)])
    pieces = 2 * ranks
    costs = Costs(
        forward=[draw.uniform(0.5, 2) for _ in range(pieces)],
        input_grad=[draw.uniform(0.5, 2) for _ in range(pieces)],
        weight_grad=[draw.uniform(0.5, 2) for _ in range(pieces)],
        activation=[draw.uniform(0.5, 2) for _ in range(pieces)],
        latency=draw.choice([0.0, 0.2]),
        overlap=draw.choice([0.0, 0.6]),
        link=draw.choice(["free", "fifo"]),
    )
    by_name = []
    for chunks in (1, 2):
        scaled = costs_per_stage(costs, ranks, chunks)
        runs = [simulate(schedule, scaled) for schedule in named(ranks, count, chunks, scaled, None)]
        by_name += [(run.makespan, max(run.peak)) for run in runs]
    middle = sorted(peak for _, peak in by_name)[len(by_name) // 2]
    for memory in (None, middle):
        found = optimize(costs, ranks, count, memory=memory)
        checked(found)
        run = simulate(found, costs_per_stage(costs, ranks, found.num_stages // ranks))
        fitting = [time for time, peak in by_name if memory is None or peak <= memory]
        assert run.makespan <= min(fitting) * (1 + 1e-9)
        assert memory is None or max(run.peak) <= memory * (1 + 1e-9)


@pytest.mark.parametrize(
    ("ranks", "count", "whole"), [(2, 2, 1.25), (2, 2, 1.75), (2, 3, 1.25), (3, 1, 1.25), (3, 1, 1.75)]
)
def test_tiny_cases_with_cheaper_whole_backwards_are_solved(oracle, ranks, count, whole):
    prices = {"forward": [1.0] * ranks, "inputs": [1.0] * ranks, "weights": [1.0] * ranks, "whole": [whole] * ranks}
    found = optimize(as_costs(prices), ranks, count, chunks=[1])
    assert oracle(found, **prices).makespan == optimum(oracle, ranks, count, **prices)


def test_cheaper_whole_backwards_go_first_and_halves_fill_the_drain():
    costs = Costs(forward=1.0, backward=1.25, input_grad=1.0, weight_grad=1.0)
    found = optimize(costs, 4, 8, chunks=[1])
    kinds = {action.kind for rank in range(4) for action in found.actions(rank)}
    assert kinds == set(Kind)
    # A fill of 3 forwards, 8 micro-batches of 2.25, and a drain of 3 input gradients instead of backwards: at most 24.
    assert simulate(found, costs).makespan <= 24.0
    assert min(simulate(build_schedule(name, 4, 8), costs).makespan for name in NAMES) == 24.75


def test_neighbouring_halves_are_merged_where_that_costs_nothing():
    found = optimize(Costs(forward=1.0, backward=1.75, input_grad=1.0, weight_grad=1.0), 4, 18, chunks=[1])
    assert found.name.endswith(", merged")
    for rank in range(4):
        for first, second in itertools.pairwise(found.actions(rank)):
            assert (first.kind, second) != (Kind.I, first._replace(kind=Kind.W))


def test_single_changes_may_help():
    costs = Costs(forward=1.0, backward=1.25, input_grad=1.0, weight_grad=1.0, latency=0.25)
    found = optimize(costs, 4, 8, chunks=[1])
    assert found.name.endswith(", changed")
    assert simulate(found, costs).makespan <= 25.0


def test_overlap_is_used():
    costs = Costs(overlap=0.8)
    found = optimize(costs, 2, 6, chunks=[1])
    assert any(found.joined(rank) for rank in range(2))
    plain = min(simulate(build_schedule(name, 2, 6), costs).makespan for name in NAMES)
    assert simulate(found, costs).makespan < plain


def test_chunks_that_pay_are_taken():
    assert optimize(Costs(), 2, 4, chunks=[1, 2]).num_stages == 4
    assert optimize(Costs(latency=5.0), 2, 4, chunks=[1, 2]).num_stages == 2


def test_chunks_that_do_not_divide_the_pieces_are_left_out():
    costs = Costs(forward=[1.0, 2.0, 1.0])
    assert optimize(costs, 3, 4, chunks=[1, 2]).num_stages == 3
    with pytest.raises(ScheduleError, match="no number of chunks is possible\\. costs are given for 3 pieces"):
        optimize(costs, 3, 4, chunks=[2])


def test_too_little_memory_says_how_much_is_needed():
    with pytest.raises(
        ScheduleError, match=r"memory = 0.5, but one micro-batch alone keeps 1 on some rank, with any of \[1, 2\]"
    ):
        optimize(Costs(), 3, 4, memory=0.5)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_memory_for_one_micro_batch_is_enough(oracle, ranks):
    for chunks in (1, 2):
        found = optimize(Costs(), ranks, 4 if chunks == 1 else 2, chunks=[chunks], memory=1)
        assert oracle(found).peak == [chunks] * ranks


def test_the_result_is_the_same_every_time():
    costs = Costs(forward=[1.0, 3.0, 2.0], latency=0.25)
    first, second = (optimize(costs, 3, 5, chunks=[1]) for _ in range(2))
    assert first == second
    assert first.name == second.name


def test_it_has_a_name_among_the_schedules():
    costs = Costs(forward=[1.0, 3.0], latency=0.25)
    found = build_schedule("optimized", 2, 4, chunks=1, costs=costs)
    assert found == optimize(costs, 2, 4, chunks=[1])
    assert build_schedule("optimized", 2, 4) == optimize(Costs(), 2, 4)


def test_one_number_of_chunks_may_be_given_by_itself():
    assert optimize(Costs(), 2, 3, chunks=1) == optimize(Costs(), 2, 3, chunks=[1])


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((2, 4, Costs()), {}, r"costs must be a Costs, and 2 was given; the order is optimize\(costs, num_ranks, num"),
        ((Costs(), 0, 4), {}, "num_ranks = 0; it must be a whole number from 1"),
        ((Costs(), 2, 4.0), {}, "num_microbatches = 4.0; it must be a whole number from 1"),
        ((Costs(), 2, 4), {"chunks": 0}, "chunks = 0; it must be a whole number from 1, or some of them"),
        ((Costs(), 2, 4), {"chunks": []}, r"chunks = \[\]"),
        ((Costs(), 2, 4), {"chunks": "2"}, "chunks = '2'"),
        ((Costs(), 2, 4), {"memory": -1}, "memory = -1; it must be a number above 0"),
    ],
)
def test_arguments_that_make_no_sense_are_told(arguments, options, text):
    with pytest.raises(ScheduleError, match=text):
        optimize(*arguments, **options)
