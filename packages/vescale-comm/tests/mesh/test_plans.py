"""Costs of plans, beside formulas on paper."""

from __future__ import annotations

import itertools

import pytest

from vescale_comm._mesh import PLANS, choose_plan, default_costs, plan_seconds
from vescale_comm._mesh.plans import CALL
from vescale_comm._report import AxisCost, MeshCosts

ALPHA, BANDWIDTH = 1e-5, 10e9


def test_ring_formulas():
    ring = AxisCost.of_link(ALPHA, BANDWIDTH)
    costs = MeshCosts({("a",): ring, ("b",): ring})
    p, q, n = 4, 8, 1e6
    sizes, names = {"a": p, "b": q}, ("a", "b")

    def all_reduce(ranks, nbytes):
        return 2 * (ranks - 1) * ALPHA + 2 * (ranks - 1) / ranks * nbytes / BANDWIDTH

    paper = {
        "flat": CALL + all_reduce(p * q, n),
        "axes": 2 * CALL + all_reduce(p, n) + all_reduce(q, n),
        "nested": 3 * CALL + 2 * ((q - 1) * ALPHA + (q - 1) / q * n / BANDWIDTH) + all_reduce(p, n / q),
    }
    for plan, seconds in paper.items():
        assert plan_seconds(plan, n, names, sizes, costs) == pytest.approx(seconds)


def test_the_choice_is_the_least_of_all():
    sizes = {"pod": 16, "dp": 8, "one": 1}
    near, far = AxisCost.of_link(2e-6, 200e9), AxisCost.of_link(2e-5, 20e9)
    costs = MeshCosts({("pod",): far, ("dp",): near})
    chosen = set()
    for power, names in itertools.product(range(8, 34), (("pod", "dp"), ("pod", "dp", "one"))):
        plan = choose_plan(2**power, names, sizes, costs)
        seconds = {one: plan_seconds(one, 2**power, ("pod", "dp"), sizes, costs) for one in PLANS}
        assert seconds[plan] == min(seconds.values())
        chosen.add(plan)
    assert chosen == {"axes", "nested"}  # with a fast inner axis, a flat ring over all ranks is never best
    assert choose_plan(1, ("pod", "one"), sizes, costs) == "flat"


def test_defaults_know_all_axes():
    for kind in ("p2p", "shared", "nccl", "native"):
        costs = default_costs(kind, ("x", "y"))
        assert plan_seconds("flat", 1e6, ("x", "y"), {"x": 2, "y": 3}, costs) > 0
