"""`explain`: every collective, with the module and the line that caused it."""

from __future__ import annotations

import contextlib
import inspect
import io

import pytest
import torch
from torch import Tensor, nn

from vescale_dtensor import Replicate, Shard, Varying, distribute_tensor, implicit_communication
from vescale_dtensor._comm.record import listeners
from vescale_dtensor._explain import explain
from vescale_dtensor._modules import parallelize_module
from vescale_testing import cached_mesh

RANKS = pytest.mark.ranks(4, pool=True)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8, dtype=torch.float64)
        self.down = nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        return torch.tanh(self.down(h))  # the sum of `down` is needed here


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


def line_of(function: object, text: str) -> str:
    lines, start = inspect.getsourcelines(function)  # type: ignore[arg-type]
    (number,) = [start + i for i, line in enumerate(lines) if text in line and "line_of(" not in line]
    return f"{inspect.getsourcefile(function)}:{number}"  # type: ignore[arg-type]


def make() -> Model:
    torch.manual_seed(0)
    plan = {"parameter": {r"mlp.up\..*": {"tp": Shard(0)}, "mlp.down.weight": {"tp": Shard(1)}}}
    return parallelize_module(
        Model(), cached_mesh(2, 2, names=("dp", "tp")), [plan, {"forward": {"input": {"dp": Shard(0)}}}]
    )  # type: ignore[return-value]


@RANKS
def test_a_training_step() -> None:
    model = make()
    x = torch.ones(4, 4, dtype=torch.float64, requires_grad=True)
    with explain() as seen:
        loss = model(x).sum()
        loss.backward()
    assert not listeners
    forward = [r for r in seen.records if r.phase == "forward"]
    backward = [r for r in seen.records if r.phase == "backward"]
    assert [(r.kind, r.axes, r.num_bytes, r.num_ranks, r.cause) for r in forward] == [
        ("all_reduce", ("tp",), 2 * 4 * 8, 2, "operator"),
    ]
    (reduced,) = forward
    assert (reduced.op, reduced.module, reduced.module_class) == ("tanh", "mlp", "MLP")
    assert reduced.line == line_of(MLP.forward, "# the sum of")
    # dp: one all-reduce per parameter; tp: the gradient of what entered the column-parallel layer; x is gathered
    kinds = sorted((r.kind, r.axes, r.num_bytes) for r in backward)
    assert [k for k in kinds if k[1] == ("tp",)] == [("all_reduce", ("tp",), 2 * 4 * 8)]
    assert sorted(k[2] for k in kinds if k[:2] == ("all_reduce", ("dp",))) == [4 * 8, 4 * 8, 4 * 4 * 8, 4 * 4 * 8]
    assert [k for k in kinds if k[0] == "all_gather"] == [("all_gather", ("dp",), 2 * 4 * 8)]
    assert {r.module for r in backward if r.kind == "all_reduce"} == {"mlp.up", "mlp.down"}
    (gathered,) = [r for r in backward if r.kind == "all_gather"]
    assert (gathered.module, gathered.op) == ("", "input")
    assert not seen.implicit
    table = seen.table()
    assert "mlp.down (Linear)" in table
    assert "1x  all_gather" in table
    assert f"{len(seen.records)} collectives on this rank" in table
    assert seen.totals()["all_reduce", ("tp",)] == (2, 2 * 64)
    assert str(seen) == table


@RANKS
def test_what_nobody_asked_for_is_marked() -> None:
    mesh = cached_mesh(4, names=("tp",))
    x = distribute_tensor(torch.ones(8, 4), mesh, [Shard(1)])
    y = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
    with implicit_communication("allow"), explain() as seen:
        x + y
        torch.pdist(x)
        x.redistribute([Replicate()])
        y.full_tensor()
    assert [r.cause for r in seen.records] == ["implicit", "fallback", "redistribute", "redistribute"]
    assert [r.op for r in seen.records][:2] == ["add", "pdist"]
    assert [r.op for r in seen.records][2:] == ["redistribute", "full_tensor"]
    assert seen.records[0].line == line_of(test_what_nobody_asked_for_is_marked, "x + y")
    assert seen.records[2].line == line_of(test_what_nobody_asked_for_is_marked, "x.redistribute")
    assert "! implicit" in seen.table()
    assert "! 2 were implicit" in seen.table()


@RANKS
def test_moves_of_a_plan() -> None:
    plan = {
        "parameter": {r"mlp.up\..*": [Shard(0)], "mlp.down.weight": [Shard(1)]},
        "forward": {"mlp.input": [Shard(0)], "mlp.up.input": [Varying()], "mlp.down.output": [Shard(0)]},
    }
    torch.manual_seed(0)
    model = parallelize_module(Model(), cached_mesh(4, names=("tp",)), plan)
    with explain() as seen:
        model(torch.ones(8, 4, dtype=torch.float64)).sum().backward()
    forward = [(r.kind, r.cause, r.op, r.module) for r in seen.records if r.phase == "forward"]
    assert forward == [
        ("all_gather", "plan", "mlp.up.input", "mlp.up"),
        ("reduce_scatter", "plan", "mlp.down.output", "mlp"),
    ]
    scattered = [r for r in seen.records if r.phase == "forward"][1]
    assert scattered.line == line_of(MLP.forward, "# the sum of")
    moved_back = [(r.kind, r.cause, r.op) for r in seen.records if r.phase == "backward" and r.kind != "all_reduce"]
    assert moved_back == [("all_gather", "plan", "mlp.down.output")]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        seen.print()
    assert printed.getvalue() == seen.table() + "\n"


@RANKS
def test_an_exception_leaves_nothing_behind() -> None:
    with pytest.raises(KeyError), explain():
        raise KeyError("own")
    assert not listeners
    assert torch._C._len_torch_function_stack() == 0
