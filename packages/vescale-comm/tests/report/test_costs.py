"""Costs of collectives, beside formulas on paper."""

from __future__ import annotations

import math

import pytest

from vescale_comm._report import AxisCost, MeshCosts
from vescale_comm.errors import PlanError

ALPHA, BANDWIDTH, ADD = 5e-6, 45e9, 1e-12


@pytest.mark.parametrize("ranks", [2, 3, 8, 1024, 10_000])
def test_formulas(ranks):
    n = 436e6
    moved = (ranks - 1) / ranks * n / BANDWIDTH
    added = (ranks - 1) / ranks * n * ADD
    ring = AxisCost.of_link(ALPHA, BANDWIDTH, ADD)
    assert ring.seconds("all_gather", n, ranks) == pytest.approx((ranks - 1) * ALPHA + moved)
    assert ring.seconds("reduce_scatter", n, ranks) == pytest.approx((ranks - 1) * ALPHA + moved + added)
    assert ring.seconds("all_reduce", n, ranks) == pytest.approx(2 * (ranks - 1) * ALPHA + 2 * moved + added)
    tree = AxisCost.of_link(ALPHA, BANDWIDTH, ADD, "tree")
    assert tree.seconds("all_reduce", 0, ranks) == pytest.approx(2 * math.ceil(math.log2(ranks)) * ALPHA)
    assert tree.seconds("all_reduce", n, ranks) - tree.seconds("all_reduce", 0, ranks) == pytest.approx(
        2 * moved + added
    )
    direct = AxisCost.of_link(ALPHA, BANDWIDTH, algorithm="direct")
    assert direct.seconds("reduce_scatter", 0, ranks) == pytest.approx(ALPHA * (1 + (ranks - 2) / 4))


def test_measured_numbers_hold_where_they_were_measured():
    measured = AxisCost(4, {"reduce_scatter": (1e-3, 2e-9), "all_gather": (2e-3, 1e-9), "all_reduce": (5e-3, 4e-9)})
    assert measured.seconds("all_reduce", 1e6) == measured.seconds("all_reduce", 1e6, 4) == pytest.approx(9e-3)
    assert measured.seconds("all_reduce", 0, 7) == pytest.approx(1e-2)  # 6 messages in place of 3
    assert measured.seconds("all_gather", 1e9, 2) == pytest.approx(2e-3 / 3 + 1 / 1.5)  # half in place of 3/4
    assert measured.seconds("all_gather", 1e9, 1) == 0.0


def test_several_axes_cost_what_the_slowest_does():
    fast, slow = AxisCost.of_link(1e-6, 100e9), AxisCost.of_link(1e-5, 10e9)
    sizes = {"pod": 4, "dp": 8, "one": 1}
    costs = MeshCosts({("pod",): slow, ("dp",): fast})
    both = costs.of(("pod", "dp", "one"), sizes)
    assert both.ranks == 32
    for operation in ("reduce_scatter", "all_gather", "all_reduce"):
        assert both.seconds(operation, 1e7) == pytest.approx(slow.seconds(operation, 1e7, 32))
    assert costs.of(("dp", "one"), sizes) is fast
    known = MeshCosts({**costs.axes, ("pod", "dp"): fast})
    assert known.of(("pod", "dp"), sizes) is fast
    assert MeshCosts.from_json(known.to_json()) == known
    with pytest.raises(PlanError, match="nothing is known of the mesh axis tp; known: pod, dp"):
        costs.of(("dp", "tp"), {**sizes, "tp": 2})


def test_errors():
    good = {"reduce_scatter": (0.0, 0.0), "all_gather": (0.0, 0.0), "all_reduce": (0.0, 0.0)}
    for arguments, text in (
        ((1, good), "2 ranks or more; got 1"),
        ((2, good, "star"), "needs one of ring, direct, tree; got 'star'"),
        ((2, {"all_gather": (0.0, 0.0)}), "no cost of reduce_scatter, all_reduce"),
        ((2, {**good, "all_gather": (-1.0, 0.0)}), "the cost of all_gather is"),
    ):
        with pytest.raises(PlanError, match=text):
            AxisCost(*arguments)
    with pytest.raises(PlanError, match="bytes per second above 0"):
        AxisCost.of_link(1e-6, 0)
    with pytest.raises(PlanError, match=r"needs one of reduce_scatter.*got 'gather'"):
        AxisCost(2, good).seconds("gather", 1)
    for text in ("[]x", '[{"axes": ["a"]}]', "3"):
        with pytest.raises(PlanError, match="no costs of a mesh"):
            MeshCosts.from_json(text)
