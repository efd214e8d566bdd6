"""Costs of collectives, beside formulas on paper."""

from __future__ import annotations

import math

import pytest

from vescale_comm._report import AxisCost, HostCosts, MeshCosts
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
    assert MeshCosts.from_json(costs.to_json()).host == HostCosts()
    with pytest.raises(PlanError, match="nothing is known of the mesh axis tp; known: pod, dp"):
        costs.of(("dp", "tp"), {**sizes, "tp": 2})


def test_beside_a_computation():
    alone = {"reduce_scatter": (1e-3, 2e-9), "all_gather": (2e-3, 1e-9), "all_reduce": (5e-3, 4e-9)}
    beside = {"reduce_scatter": (2e-3, 1e-9), "all_gather": (3e-3, 2e-9), "all_reduce": (6e-3, 3e-9)}
    fast = AxisCost(2, alone)
    assert fast.seconds_beside("all_gather", 1e6) == fast.seconds("all_gather", 1e6)  # not known: nothing is hidden
    slow = AxisCost(4, alone, "ring", beside, stages=True)
    assert slow.seconds_beside("all_gather", 1e6) == pytest.approx(3e-3 + 2e-3)
    assert slow.seconds_beside("all_reduce", 1e6, 7) == pytest.approx(2 * 6e-3 + 3e-3 * (6 / 7) / (3 / 4))
    assert slow.seconds_beside("all_gather", 1e6, 1) == 0.0
    host = HostCosts(copy=1e-10, fresh=2e-10, hook=1e-5, unit=1e-4, shard=2e-5)
    costs = MeshCosts({("dp",): slow, ("pod",): fast}, host)
    assert MeshCosts.from_json(costs.to_json()) == costs
    both = costs.of(("pod", "dp"), {"pod": 2, "dp": 4})
    assert both.beside is None
    assert both.stages
    known = MeshCosts({("dp",): slow, ("pod",): slow}).of(("pod", "dp"), {"pod": 2, "dp": 4})
    assert known.seconds_beside("all_gather", 1e6) == pytest.approx(slow.seconds_beside("all_gather", 1e6, 8))


def test_errors():
    good = {"reduce_scatter": (0.0, 0.0), "all_gather": (0.0, 0.0), "all_reduce": (0.0, 0.0)}
    for arguments, text in (
        ((1, good), "2 ranks or more; got 1"),
        ((2, good, "star"), "needs one of ring, direct, tree; got 'star'"),
        ((2, {"all_gather": (0.0, 0.0)}), "no cost of reduce_scatter, all_reduce"),
        ((2, {**good, "all_gather": (-1.0, 0.0)}), "the cost of all_gather is"),
        ((2, good, "ring", {"all_gather": (0.0, 0.0)}), "beside: there is no cost of reduce_scatter, all_reduce"),
        ((2, good, "ring", {**good, "all_reduce": (0.0, math.inf)}), "beside: the cost of all_reduce is"),
    ):
        with pytest.raises(PlanError, match=text):
            AxisCost(*arguments)
    with pytest.raises(PlanError, match="bytes per second above 0"):
        AxisCost.of_link(1e-6, 0)
    with pytest.raises(PlanError, match=r"needs one of reduce_scatter.*got 'gather'"):
        AxisCost(2, good).seconds("gather", 1)
    with pytest.raises(PlanError, match="unit: costs are finite numbers from 0 on; got -1"):
        HostCosts(unit=-1.0)
    with pytest.raises(PlanError, match="no cost bolts; there are copy, fresh, hook, shard, unit"):
        HostCosts.of_mapping({"bolts": 1.0})
    for text in ("[]x", '[{"axes": ["a"]}]', "3"):
        with pytest.raises(PlanError, match="no costs of a mesh"):
            MeshCosts.from_json(text)
