"""Predicted steps, beside formulas on paper."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vescale_comm._plan import Unit
from vescale_comm._report import AxisCost, HostCosts, MeshCosts, predict
from vescale_comm._report.modules import module_units
from vescale_comm.errors import PlanError

LINK = AxisCost.of_link(alpha=1e-3, bandwidth=1e9)
LAYERS, NUMEL = 4, 1 << 20
UNITS = tuple(Unit(f"layers.{i}", ((f"layers.{i}.w", (1024, 1024)),)) for i in range(LAYERS))
BYTES = NUMEL * 4


def ring(operation, nbytes, ranks):
    times = 2 if operation == "all_reduce" else 1
    return times * ((ranks - 1) * 1e-3 + (ranks - 1) / ranks * nbytes / 1e9)


def ask(strategy, ranks, **options):
    times = [(0.1, 0.2)] * LAYERS
    return predict(UNITS, {"dp": ranks}, strategy, {"dp": LINK}, compute_seconds=times, bucket_bytes=BYTES, **options)


@pytest.mark.parametrize("ranks", [2, 8])
def test_ddp(ranks):
    one = ring("all_reduce", BYTES, ranks)
    found = ask("ddp", ranks)
    assert found.seconds == pytest.approx(0.3 * LAYERS + one)  # all but the last bucket are hidden
    assert found.exposed == pytest.approx(one)
    assert found.communicating == {"dp": pytest.approx(LAYERS * one)}
    assert found.sent == {"dp": pytest.approx(LAYERS * BYTES * 2 * (ranks - 1) / ranks)}
    assert found.peak_bytes == LAYERS * NUMEL * (4 + 4 + 8)
    alone = ask("ddp", ranks, overlap=0.0, update_seconds=0.5, copy=1e-9)
    assert alone.seconds == pytest.approx(0.3 * LAYERS + LAYERS * (one + BYTES * 1e-9) + 0.5)
    assert alone.computing == pytest.approx(0.3 * LAYERS + LAYERS * BYTES * 1e-9 + 0.5)


def test_zero():
    ranks = 8
    scatter = gather = ring("all_gather", BYTES, ranks)
    found = ask("zero2", ranks, update_seconds=0.8)
    # The first gather of the next step and the last reduction are seen.
    assert found.seconds == pytest.approx(gather + 0.3 * LAYERS + scatter + 0.8 / ranks)
    assert found.fixed_bytes == LAYERS * NUMEL * (4 + 12 / ranks)
    assert found.peak_bytes == found.fixed_bytes + 2 * BYTES  # one is reduced, one is computed
    one = ask("zero1", ranks)
    assert one.peak_bytes == LAYERS * NUMEL * (4 + 4 + 8 / ranks)
    assert one.sent == found.sent
    assert ask("zero1", 1).seconds == pytest.approx(0.3 * LAYERS)


def test_fsdp():
    ranks = 8
    gather = ring("all_gather", BYTES, ranks)
    found = ask("fsdp", ranks)
    assert found.seconds == pytest.approx(gather + 0.3 * LAYERS + gather)
    assert found.fixed_bytes == LAYERS * NUMEL * 16 / ranks
    # Backward: the unit at work, the next one, and its gradient.
    assert found.peak_bytes == found.fixed_bytes + 3 * BYTES
    assert found.sent["dp"] == pytest.approx((3 * LAYERS - 1) * BYTES * 7 / 8)
    without = ask("fsdp", ranks, prefetch=0)
    assert without.seconds == pytest.approx(0.3 * LAYERS + LAYERS * gather + (LAYERS - 1) * 2 * gather + gather)
    kept = ask("fsdp", ranks, reshard=False)
    assert kept.sent["dp"] == pytest.approx(2 * LAYERS * BYTES * 7 / 8)
    assert kept.peak_bytes == found.fixed_bytes + (LAYERS + 1) * BYTES
    # Bound by the network: everything is sent one after the other.
    slow = {"dp": AxisCost.of_link(alpha=1.0, bandwidth=1e9)}
    busy = predict(UNITS, {"dp": ranks}, "fsdp", slow, compute_seconds=0.01)
    assert busy.seconds == pytest.approx(sum(busy.communicating.values()), rel=0.01)


HOST = HostCosts(copy=1e-9, fresh=2e-9, hook=1e-3, unit=4e-3, shard=2e-3)


@pytest.mark.parametrize("ranks", [2, 8])
def test_what_a_rank_does_besides(ranks):
    costs = MeshCosts({("dp",): LINK}, HOST)

    def ask_of(strategy, **options):
        times = [(0.1, 0.2)] * LAYERS
        return predict(UNITS, {"dp": ranks}, strategy, costs, compute_seconds=times, bucket_bytes=BYTES, **options)

    computing, copy, fresh = 0.3 * LAYERS, BYTES * 1e-9, BYTES * 2e-9
    # In buckets: a copy of each gradient and its hook. The buffers of zero2 come and go.
    assert ask_of("ddp").computing == pytest.approx(computing + LAYERS * (copy + 1e-3))
    assert ask_of("zero1").computing == pytest.approx(computing + LAYERS * (copy + 1e-3))
    assert ask_of("zero2").computing == pytest.approx(computing + LAYERS * (copy + fresh + 1e-3))
    assert ask_of("ddp", copy=0.0).computing == pytest.approx(computing + LAYERS * 1e-3)
    # fsdp: a copy of the own shard and memory for the whole per gather; a copy of the gradients and memory for them;
    # a copy of the own shard of the sum, and memory for it.
    hooks = LAYERS * (4e-3 + 2e-3)
    gather, reduce = copy / ranks + fresh, copy + fresh + (copy + fresh) / ranks
    found = ask_of("fsdp")
    assert found.computing == pytest.approx(computing + hooks + (2 * LAYERS - 1) * gather + LAYERS * reduce)
    kept = ask_of("fsdp", reshard=False)
    assert kept.computing == pytest.approx(computing + hooks + LAYERS * gather + LAYERS * reduce)
    # Where nothing is hidden, the step is the sum of all.
    alone = ask_of("fsdp", overlap=0.0)
    assert alone.seconds == pytest.approx(found.computing + sum(alone.communicating.values()))
    # Where ranks share memory, what others read is copied there: the own shard, and their parts of the gradients.
    staged = MeshCosts({("dp",): AxisCost(2, LINK.operations, stages=True)}, HOST)
    more = predict(UNITS, {"dp": ranks}, "fsdp", staged, compute_seconds=[(0.1, 0.2)] * LAYERS)
    staged_bytes = (2 * LAYERS - 1) / ranks + LAYERS * (ranks - 1) / ranks
    assert more.computing - found.computing == pytest.approx(staged_bytes * copy)


def test_what_collectives_take_from_a_computation():
    alone = dict.fromkeys(("reduce_scatter", "all_gather", "all_reduce"), (0.04, 0.0))
    times = [(0.1, 0.2)] * LAYERS
    for added, longest in ((0.0, 0.04), (0.01, 0.04), (0.04, 0.04), (0.06, 0.06)):
        beside = dict.fromkeys(alone, (added, 0.0))
        costs = {"dp": AxisCost(2, alone, "ring", beside)}
        found = predict(UNITS, {"dp": 2}, "ddp", costs, compute_seconds=times, bucket_bytes=BYTES)
        # All but the last bucket are reduced beside the backward; the last one has nothing beside it.
        assert found.seconds == pytest.approx(0.3 * LAYERS + (LAYERS - 1) * added + longest)
        given = predict(UNITS, {"dp": 2}, "ddp", costs, compute_seconds=times, bucket_bytes=BYTES, overlap=0.0)
        assert given.seconds == pytest.approx(0.3 * LAYERS + LAYERS * 0.04)


def test_limits_of_buckets_are_those_of_the_strategies():
    import inspect

    from vescale_comm import DistributedDataParallel
    from vescale_comm._report.steps import BUCKETS

    default = inspect.signature(DistributedDataParallel).parameters["bucket_mb"].default
    assert default * (1 << 20) == BUCKETS["ddp"]
    free = {"dp": AxisCost.of_link(0.0, 1e30)}
    units = [Unit(f"{i}", ((f"{i}.w", (1024, 1024)),)) for i in range(2 * LAYERS)]
    reduced = [
        sum(span.name.startswith(("all_reduce", "reduce_scatter")) for span in found.spans)
        for found in (predict(units, {"dp": 2}, name, free, compute_seconds=1.0) for name in ("ddp", "zero2"))
    ]
    assert reduced == [2, 4]  # 32 MiB in buckets of 25 and 8


def test_replicas_of_shards():
    mesh, costs = {"pod": 4, "dp": 8}, {"pod": LINK, "dp": LINK}
    found = predict(UNITS, mesh, "fsdp", costs, compute_seconds=[(0.1, 0.2)] * LAYERS)
    gather, shard = ring("all_gather", BYTES, 8), ring("all_reduce", BYTES / 8, 4)
    # Sums over replicas come when all shards are there.
    assert found.seconds == pytest.approx(gather + 0.3 * LAYERS + gather + LAYERS * shard)
    assert found.communicating["pod"] == pytest.approx(LAYERS * shard)
    assert found.fixed_bytes == LAYERS * NUMEL * 16 / 8
    whole = predict(UNITS, mesh, "ddp", costs, compute_seconds=1.0, bucket_bytes=1 << 40)
    assert whole.communicating == {"podxdp": pytest.approx(ring("all_reduce", LAYERS * BYTES, 32))}


def test_ten_thousand_ranks():
    costs = {"replicate": AxisCost.of_link(1e-5, 25e9), "shard": AxisCost.of_link(5e-6, 45e9)}
    options = {"compute_seconds": 10.0, "param_bytes": 2, "grad_bytes": 2, "state_bytes": 12}
    ring_of_all = predict("llama-3-70b", {"shard": 10_000}, "fsdp", costs, **options)
    mixed = predict("llama-3-70b", {"replicate": 160, "shard": 64}, "fsdp", costs, **options)
    assert mixed.seconds < ring_of_all.seconds / 2
    assert mixed.peak_bytes > ring_of_all.peak_bytes
    assert ring_of_all.exposed > 0
    assert "fsdp on replicate=160 x shard=64:" in mixed.explain()


def test_units_of_a_module():
    with torch.device("meta"):
        block = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model = nn.ModuleDict({"head": nn.Linear(8, 2), "blocks": nn.ModuleList([block, nn.Linear(8, 8)])})
        model["tied"] = nn.Linear(8, 2)
        model["tied"].weight = model["head"].weight
        model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    units = module_units(model)
    assert units[0] == Unit("", (("scale", (1,)), *units[0].tensors[1:]))
    names = [name for unit in units for name, _ in unit.tensors]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert all(name.startswith(unit.name) for unit in units for name, _ in unit.tensors)
    found = predict(model, {"dp": 4}, "fsdp", {"dp": LINK}, compute_seconds=0.1)
    assert found.seconds > 0.1


def test_errors():
    for change, text in (
        ({"strategy": "zero3"}, "needs one of ddp, zero1, zero2, fsdp; got 'zero3'"),
        ({"mesh": {}}, "needs the size of one axis"),
        ({"mesh": {"dp": 0}}, "from 1 on"),
        ({"costs": {"tp": LINK}}, "nothing is known of the mesh axis dp"),
        ({"compute_seconds": -1.0}, "compute_seconds: needs seconds from 0 on; got -1"),
        ({"compute_seconds": [(1.0, 2.0)]}, "there are 4 units, but times of 1"),
        ({"update_seconds": float("nan")}, "update_seconds"),
        ({"overlap": 2.0}, "a share from 0 to 1; got 2"),
        ({"buckets": 3}, "unexpected keyword argument 'buckets'"),
        ({"model": []}, "no parameters"),
        ({"model": 3}, "needs a module, a name, a config or units; got int"),
    ):
        arguments = {
            "model": UNITS,
            "mesh": {"dp": 2},
            "strategy": "ddp",
            "costs": {"dp": LINK},
            "compute_seconds": 1.0,
        }
        with pytest.raises(PlanError, match=text):
            predict(**{**arguments, **change})
