"""List scheduling: what a policy prefers, memory, and orders that are given."""

import itertools
import math
import random

import pytest

from vescale_pipe._schedule import Kind
from vescale_pipe._schedules import build_schedule
from vescale_pipe._schedules._columns import loop, vee
from vescale_pipe._schedules._listing import Policy, Task, list_schedule, orders_of

FREE = (math.inf,)


def task(placement, count, forward=1.0, inputs=1.0, weights=1.0, hop=0.0):
    stages = len(placement)

    def row(price):
        return tuple(price) if isinstance(price, (list, tuple)) else (float(price),) * stages

    whole = tuple(i + w for i, w in zip(row(inputs), row(weights), strict=True))
    hops = [0.0 if a == b else hop for a, b in itertools.pairwise(placement)]
    return Task(
        tuple(placement), count, (row(forward), whole, row(inputs), row(weights)), (*hops, 0.0), row(1.0), row(1.0)
    )


def text(schedule, rank):
    return " ".join(map(str, schedule.actions(rank)))


def test_backwards_or_forwards_go_first():
    one = task([0], 2)
    assert text(list_schedule("x", one, Policy(FREE)), 0) == "0F0 0I0 0F1 0I1 0W0 0W1"
    assert text(list_schedule("x", one, Policy(FREE, backward_first=False)), 0) == "0F0 0F1 0I0 0I1 0W0 0W1"
    assert text(list_schedule("x", one, Policy(FREE, split=False)), 0) == "0F0 0B0 0F1 0B1"


def test_the_later_or_the_earlier_stage_goes_first():
    two = task([0, 0], 2)
    deep = list_schedule("x", two, Policy(FREE, split=False, backward_first=False))
    broad = list_schedule("x", two, Policy(FREE, split=False, backward_first=False, deep_first=False))
    assert text(deep, 0).startswith("0F0 1F0 0F1 1F1")
    assert text(broad, 0).startswith("0F0 0F1 1F0 1F1")


def test_orders_may_say_which_backwards_are_whole():
    orders = orders_of(build_schedule("zb_h1", 2, 3), whole=2)
    assert [row[0] for row in orders[0]].count(Kind.B) == 2
    found = list_schedule("x", task([0, 1], 3), Policy(FREE * 2, orders=orders))
    assert text(found, 0) == "0F0 0F1 0B0 0F2 0B1 0I2 0W2"


def test_memory_decides_when_weight_gradients_must_run():
    assert text(list_schedule("x", task([0], 2), Policy([1.0])), 0) == "0F0 0I0 0W0 0F1 0I1 0W1"


def test_no_order_fits_less_than_one_micro_batch():
    assert list_schedule("x", task([0, 1, 1], 2), Policy([1.0, 1.5])) is None
    assert list_schedule("x", task([0, 1, 1], 2), Policy([1.0, 2.0])) is not None


def test_a_patient_rank_waits_for_what_others_need():
    # Rank 1 gets the second forward 1 after it has nothing but a weight gradient of 4 to do.
    two = task([0, 1], 2, forward=[3.0, 1.0], inputs=[1.0, 1.0], weights=[1.0, 4.0])
    hasty = list_schedule("x", two, Policy(FREE * 2, patience=0.0))
    patient = list_schedule("x", two, Policy(FREE * 2, patience=1.0))
    assert text(hasty, 1) == "1F0 1I0 1W0 1F1 1I1 1W1"
    assert text(patient, 1) == "1F0 1I0 1F1 1I1 1W0 1W1"


def test_given_orders_stay_and_weight_gradients_fill_the_gaps(oracle):
    given = build_schedule("1f1b", 4, 8)
    orders = orders_of(given)
    assert orders[3] == [(Kind.F if i % 2 == 0 else Kind.I, 3, i // 2) for i in range(16)]
    filled = list_schedule("x", task(loop(4, 1), 8), Policy(FREE * 4, patience=1.0, orders=orders))
    assert orders_of(filled) == orders
    assert oracle(filled).makespan < oracle(given).makespan


@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_policy_the_schedule_is_right_and_keeps_its_memory(checked, oracle, seed):
    draw = random.Random(seed)
    ranks, chunks = draw.choice([(1, 1), (2, 1), (3, 1), (2, 2), (3, 2), (2, 3)])
    placement = vee(ranks) if chunks == 2 and draw.random() < 0.5 else loop(ranks, chunks)
    prices = [[draw.choice([0.5, 1.0, 2.0, 3.0]) for _ in placement] for _ in range(3)]
    one = task(placement, draw.randint(1, 7), *prices, hop=draw.choice([0.0, 0.75]))
    for split in (True, False):
        for backward_first in (True, False):
            for deep_first in (True, False):
                cap = [float(draw.randint(chunks, chunks * ranks + 2)) for _ in range(ranks)]
                policy = Policy(cap, split, backward_first, deep_first, draw.choice([0.0, 0.5, 1.0]))
                found = list_schedule("x", one, policy)
                assert found is not None
                checked(found)
                assert all(peak <= most for peak, most in zip(oracle(found).peak, cap, strict=True))
