"""What users of other pipelines reported, and what is right: one test per report that no other file has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pluggy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from vescale_pipe import (
    Action,
    Costs,
    Kind,
    PipeEngine,
    PipePlan,
    Schedule,
    _plugins,
    add_loss,
    build_schedule,
    manual,
    optimize,
    simulate,
)
from vescale_pipe._schedules.registry import reset

mse = functional.mse_loss
SPLIT = [("zb_h1", 2), ("zb_v", 1)]
"""Schedules whose backwards are in two parts, and the ranks on which they have two stages."""


class Call(nn.Module):
    """A linear layer inside a function."""

    def __init__(self, function: Callable[..., Any] = lambda lin, x: lin(x)) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self.lin, *args)


class Blocks(nn.Module):
    """Linear layers one after the other."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Call(lambda lin, x: torch.tanh(lin(x))) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def data(rows: int = 7) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 4), torch.randn(rows, 4)


def loop(forward: Callable[..., Any], x: Tensor, y: Tensor, count: int = 3, loss_fn: Any = mse) -> Tensor:
    """One device, one micro-batch after the other."""
    total = torch.zeros(())
    for a, b in zip(x.tensor_split(count), y.tensor_split(count), strict=True):
        part = loss_fn(forward(a), b) * (len(a) / len(x))
        part.backward()
        total = total + part.detach()
    return total


def chained(stages: list[nn.Module]) -> Callable[[Tensor], Any]:
    def forward(value: Any) -> Any:
        for stage in stages:
            value = stage(value)
        return value

    return forward


def same(mine: Any, theirs: Any) -> bool:
    """All gradients have the same bits."""
    found = list(zip(mine, theirs, strict=True))
    assert found
    assert any(p.grad is not None for p, _ in found)
    return all(p.grad is q.grad or torch.equal(p.grad, q.grad) for p, q in found)


# -- calls as on one device


class Masked(nn.Module):
    """The second block alone takes the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Call()
        self.second = Call(lambda lin, x, mask: lin(x * mask))

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        return self.second(self.first(x), mask)


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 2), ("interleaved_1f1b", 1)])
def test_a_keyword_goes_to_the_stage_that_takes_it(schedule: str, ranks: int) -> None:
    model = Masked()
    twin = copy.deepcopy(model)
    plan = PipePlan(schedule=schedule, num_microbatches=3, at=["second"])
    engine = PipeEngine(model, None, plan, mse, act_out=ranks)
    x, y = data()
    mask = (torch.rand(7, 1) > 0.5).float()
    loss, _ = engine(x, mask=mask, target=y)
    rows = torch.cat([x, mask], 1)
    assert torch.equal(loss, loop(lambda a: twin(a[:, :4].contiguous(), mask=a[:, 4:].contiguous()), rows, y))
    assert same(model.parameters(), twin.parameters())


def test_nothing_is_run_on_made_up_numbers() -> None:
    """A model is recorded on meta; real forwards and backwards are those of the steps, from the first one on."""
    model = Blocks()
    forwards, backwards = [], []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: forwards.append(args[0].is_meta))
        block.lin.weight.register_hook(lambda grad: backwards.append(grad.is_meta))
    engine = PipeEngine(model, None, PipePlan(num_microbatches=3, at=["blocks.1"]), mse, act_out=2)
    for step in (1, 2):
        x, y = data(6)
        engine(x, target=y)
        assert forwards.count(False) == backwards.count(False) == len(backwards) == 2 * 3 * step
    assert forwards.count(True)  # it was recorded


def test_modes_are_those_of_the_model() -> None:
    """Dropout of modules and between modules is off in evaluation, and on again in training."""

    class Drops(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            x = functional.dropout(self.blocks[0](x), 0.5, self.training)
            return functional.dropout(self.blocks[1](x), 0.5, self.training)

    model = Drops()
    engine = PipeEngine(model, None, PipePlan(num_microbatches=2, at=["blocks.1"]), mse, act_out=2)
    x, y = data(6)
    assert bool((engine.eval_step(x)[1] == 0).any())
    engine.eval()
    _, outputs = engine.eval_step(x)
    assert torch.equal(outputs, torch.cat([model(one) for one in x.tensor_split(2)]))
    assert not bool((outputs == 0).any())
    engine.train()
    _, outputs = engine(x, target=y)
    assert bool((outputs == 0).any())


def test_stages_of_any_number_of_layers() -> None:
    model = Blocks(6)
    twin = copy.deepcopy(model)
    engine = PipeEngine(model, None, PipePlan(num_microbatches=3, at=["blocks.1", "blocks.5"]), mse, act_out=3)
    x, y = data()
    engine(x, target=y)
    loop(twin, x, y)
    assert same(model.parameters(), twin.parameters())


# -- backwards in two parts


@pytest.mark.parametrize(("schedule", "ranks"), SPLIT)
def test_a_checkpoint_is_run_again_once(schedule: str, ranks: int) -> None:
    runs = [0, 0]

    def stage(number: int) -> Callable[..., Any]:
        def inner(lin: nn.Module, x: Tensor) -> Tensor:
            runs[number] += 1
            return torch.tanh(lin(torch.tanh(lin(x))))

        return lambda lin, x: checkpoint(inner, lin, x, use_reentrant=False)

    stages: list[nn.Module] = [Call(stage(0)), Call(stage(1))]
    twins = copy.deepcopy(stages)
    plan = PipePlan(schedule=schedule, num_microbatches=3)
    engine = PipeEngine(manual(stages), None, plan, mse, act_out=ranks)
    x, y = data()
    engine(x, target=y)
    assert runs == [6, 6]
    loop(chained(twins), x, y)
    assert same(engine.parameters(), (p for one in twins for p in one.parameters()))


@pytest.mark.parametrize(("schedule", "ranks"), SPLIT)
def test_a_weight_that_a_stage_uses_twice(schedule: str, ranks: int) -> None:
    stages: list[nn.Module] = [
        Call(lambda lin, x: lin(torch.tanh(lin(x)) * lin.weight.sum())),
        Call(lambda lin, x: functional.linear(lin(lin(x)), lin.weight.t())),
    ]
    twins = copy.deepcopy(stages)
    plan = PipePlan(schedule=schedule, num_microbatches=4)
    engine = PipeEngine(manual(stages), None, plan, mse, act_out=ranks)
    for _ in range(2):
        x, y = data()
        engine(x, target=y)
        loop(chained(twins), x, y, 4)
        assert same(engine.parameters(), (p for one in twins for p in one.parameters()))


@pytest.mark.parametrize(("schedule", "ranks"), [*SPLIT, ("1f1b", 2), ("looped_bfs", 1)])
def test_hooks_of_parameters_run_as_in_a_loop(schedule: str, ranks: int) -> None:
    """Once per micro-batch, on every stage, with the gradient that a loop would have by then."""
    model = Blocks()
    twin = copy.deepcopy(model)
    seen: dict[str, dict[str, list[Tensor]]] = {"mine": {}, "theirs": {}}
    for who, one in (("mine", model), ("theirs", twin)):
        for name, parameter in one.named_parameters():
            rows = seen[who].setdefault(name, [])
            parameter.register_post_accumulate_grad_hook(lambda p, rows=rows: rows.append(p.grad.clone()))
    plan = PipePlan(schedule=schedule, num_microbatches=4, at=["blocks.1"])
    x, y = data()
    PipeEngine(model, None, plan, mse, act_out=ranks)(x, target=y)
    loop(twin, x, y, 4)
    for name, rows in seen["mine"].items():
        assert len(rows) == 4
        assert all(torch.equal(a, b) for a, b in zip(rows, seen["theirs"][name], strict=True))


@pytest.mark.ranks(4, timeout=60)
def test_gradients_are_reduced_over_replicas_when_a_stage_is_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pipelines side by side: hooks see the gradient of the last micro-batch, and reduce while others compute."""
    monkeypatch.setenv(_plugins.OFF, "all")  # none that wraps stages, to reduce in its own way
    _plugins.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    torch.manual_seed(0)
    model = Blocks()
    twins = [copy.deepcopy(model) for _ in range(2)]
    plan = PipePlan(schedule="zb_h1", num_microbatches=3, at=["blocks.1"], timeout=20)
    engine = PipeEngine(model, mesh, plan, mse, example=((torch.zeros(2, 4),), {}))
    works: list[Any] = []
    counts: dict[Tensor, int] = {}

    def count(parameter: Tensor) -> None:
        counts[parameter] = counts.get(parameter, 0) + 1
        if counts[parameter] == 3:
            works.append(dist.all_reduce(parameter.grad, group=mesh.get_group("dp"), async_op=True))

    for parameter in engine.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    batches = [data() for _ in range(2)]
    x, y = batches[mesh.get_local_rank("dp")]
    engine(x, target=y)
    assert len(works) == 2
    for work in works:
        work.wait()
    for twin, (a, b) in zip(twins, batches, strict=True):
        loop(twin, a, b)
    names = [dict(twin.named_parameters()) for twin in twins]
    for name, parameter in engine.named_parameters():
        assert torch.equal(parameter.grad, names[0][name].grad + names[1][name].grad)
    engine.close()


@pytest.mark.slow
def test_compiled_modules_are_told_of_and_right() -> None:
    model = Blocks()
    twin = copy.deepcopy(model)
    model.blocks[0].compile(backend="aot_eager")
    plan = PipePlan(schedule="zb_h1", num_microbatches=3, at=["blocks.1"])
    engine = PipeEngine(model, None, plan, mse, act_out=2)
    x, y = data(6)
    with pytest.warns(UserWarning, match="has made one piece"):
        engine(x, target=y)
    loop(twin, x, y)
    assert same(model.parameters(), twin.parameters())


# -- scaled gradients


def test_a_scaler_of_gradients() -> None:
    model = Blocks()
    twin = copy.deepcopy(model)
    engine = PipeEngine(model, None, PipePlan(schedule="zb_h1", num_microbatches=3, at=["blocks.1"]), mse, act_out=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
    mine, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, twin))
    scales = []
    for step in range(5):
        x, y = data()
        if step == 3:
            x = x.clone()
            x[0, 0] = float("inf")
        scales.append(scaler.get_scale())
        loss, _ = engine(x, target=y, grad_scale=scaler.get_scale())
        scaler.scale(loss)
        scaler.step(mine)
        scaler.update()
        if step != 3:
            assert torch.equal(loss, loop(twin, x, y))
            assert same(model.parameters(), twin.parameters())  # powers of two, and they are unscaled by now
            theirs.step()
        mine.zero_grad()
        theirs.zero_grad()
    assert scales == [16.0, 16.0, 32.0, 32.0, 16.0]


@pytest.mark.ranks(2, timeout=60)
def test_a_scaler_on_ranks_skips_on_all_of_them(rank: int) -> None:
    """Gradients that overflow on one rank only; with a scaler per rank the scales would drift apart."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    model = Blocks()
    plan = PipePlan(num_microbatches=2, at=["blocks.1"], timeout=20)
    engine = PipeEngine(model, dist.group.WORLD, plan, mse, example=((torch.zeros(2, 4),), {}))
    scaler = ShardedGradScaler("cpu", init_scale=16.0)
    trains = torch.optim.SGD(engine.parameters(), lr=0.1)
    if rank == 1:
        model.blocks[1].lin.weight.register_hook(lambda grad: grad * float("inf"))
    before = [one.detach().clone() for one in engine.parameters()]
    x, y = data()
    loss, _ = engine(x, target=y, grad_scale=scaler.get_scale())
    scaler.scale(loss)
    scaler.step(trains)
    scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(engine.parameters(), before, strict=True))
    assert scaler.get_scale() == 8.0
    engine.close()


# -- values between real processes


@pytest.mark.ranks(3, timeout=60)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_anything_goes_between_processes(rank: int, schedule: str) -> None:
    """Containers, None, numbers, indexes, masks, complex values, odd strides; gradients for some micro-batches only."""
    torch.manual_seed(0)

    def first(lin: nn.Module, x: Tensor) -> Any:
        out = lin(x)
        more = out.square().mean()
        add_loss(more)
        turned = out.t().contiguous().t()
        return {
            "a": turned,
            "more": more,
            "none": None,
            "rest": (2, "text", x.argsort(0)[:, 0], x > 0, torch.complex(out, x)),
        }

    def second(lin: nn.Module, got: dict[str, Any]) -> Any:
        two, text, order, mask, z = got["rest"]
        assert (two, text, got["none"]) == (2, "text", None)
        assert got["a"].stride()[0] == 1
        x = got["a"] if float(mask[0, 0]) else got["a"].detach()
        x.mul_(2)
        return lin(x)[order] * two + z.imag * mask, lin(x)[:, ::2]

    def third(lin: nn.Module, got: tuple[Tensor, Tensor]) -> dict[str, Any]:
        return {"out": lin(got[0]) + torch.cat([got[1], got[1]], 1), "name": "text"}

    stages: list[nn.Module] = [Call(first), Call(second), Call(third)]
    twins = copy.deepcopy(stages)
    plan = PipePlan(schedule=schedule, num_microbatches=4, added_losses=True, timeout=20)
    graph = manual(stages, [[0], [(0, None)], [(1, None)]])
    engine = PipeEngine(graph, dist.group.WORLD, plan, lambda out, y: mse(out["out"], y))
    for rows in (8, 8, 9):
        x, y = data(rows)
        loss, outputs = engine(x, target=y)
        total = torch.zeros(())
        for a, b in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
            made = twins[0](a)
            more = made["more"]
            part = mse(twins[2](twins[1](made))["out"], b)
            weight = len(a) / rows
            torch.autograd.backward([part, more], [torch.tensor(weight), torch.tensor(weight)])
            total = total + (part + more).detach() * weight
        assert torch.equal(loss, total)
        for p, q in zip(stages[rank].parameters(), twins[rank].parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
        assert (outputs is None) == (rank != 2)
        assert outputs is None or (outputs["out"].shape, outputs["name"]) == ((rows, 4), "text")
    engine.close()


# -- schedules


def test_a_schedule_that_is_slower_is_seen_before_it_runs() -> None:
    """Where both halves take longer than the whole, a zero bubble schedule loses, and the search knows."""
    costs = Costs(forward=1.0, backward=2.0, input_grad=1.5, weight_grad=1.5)
    spent = {name: simulate(build_schedule(name, 2, 4), costs).makespan for name in ("1f1b", "zb_h1")}
    assert spent["1f1b"] == 5 * 3.0
    assert spent["zb_h1"] >= 4 * 4.0 + 1 * 1.0
    assert simulate(optimize(costs, 2, 4, chunks=[1]), costs).makespan <= spent["1f1b"]


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A plugin that adds a schedule."""
    monkeypatch.setenv(_plugins.OFF, "all")
    _plugins.reset()
    reset()

    def serial(num_ranks: int, num_microbatches: int) -> Schedule:
        rows = [
            [Action(kind, rank, m) for m in range(num_microbatches) for kind in (Kind.F, Kind.I, Kind.W)]
            for rank in range(num_ranks)
        ]
        return Schedule.of("serial", range(num_ranks), num_microbatches, rows)

    def vescale_register_schedules(registry: Any) -> None:
        registry.register("serial", serial)

    toy = ModuleType("toy")
    toy.vescale_register_schedules = pluggy.HookimplMarker("vescale_pipe")(vescale_register_schedules)  # type: ignore[attr-defined]
    _plugins.manager().register(toy, name="toy")
    yield
    _plugins.reset()
    reset()


def test_a_schedule_of_a_plugin_runs_by_its_name(plugin: None) -> None:
    model = Blocks()
    twin = copy.deepcopy(model)
    engine = PipeEngine(model, None, PipePlan(schedule="serial", num_microbatches=3, at=["blocks.1"]), mse, act_out=2)
    x, y = data()
    engine(x, target=y)
    loop(twin, x, y)
    assert same(model.parameters(), twin.parameters())
