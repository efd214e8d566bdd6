"""Plans for models of many kinds: what is printed is the plan, it sends what was predicted, and splits the work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from vescale_dtensor import explain, implicit_communication, parallelize_module
from vescale_dtensor._auto import Link, Machine, auto_plan, predict
from vescale_dtensor._auto.rehearse import Rehearsal, loss_of
from vescale_testing import cached_mesh, fake_ranks, run_ranks
from vescale_testing.models import TINY, examples

BANDWIDTH_ONLY = Machine(Link(latency=0.0, bandwidth=1e9))


class MLP(nn.Module):
    def __init__(self, width: int = 8, hidden: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Tied(nn.Module):
    """One weight for tokens and head, and a loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mlp, self.head = nn.Embedding(24, 16), MLP(16, 64), nn.Linear(16, 24, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.mlp(self.tokens(ids))).flatten(0, 1), ids.flatten())


@dataclass
class Batch:
    x: Tensor
    y: Tensor


class TakesDataclass(MLP):
    def forward(self, batch: Batch) -> dict[str, Any]:  # type: ignore[override]
        return {"loss": (super().forward(batch.x) - batch.y).square().mean(), "rows": len(batch.x)}


class TakesMapping(MLP):
    def forward(self, *, batch: dict[str, Tensor], scale: float = 1.0) -> Tensor:  # type: ignore[override]
        return super().forward(batch["x"]) * scale


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MLP().requires_grad_(False), MLP()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)))


class Inner(nn.Module):
    """Between its layers something is done that no layer does."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.norm = nn.ModuleList(MLP() for _ in range(3)), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + part(self.norm(x))
        return x


class Nested(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Inner() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Shared(nn.Module):
    """One layer at three places, and called once more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MLP()] * 3)
        self.last = MLP()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(self.layers[0](x))


class Packed(nn.Module):
    """Queries, keys and values of one projection, told apart by a change of shape."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.packed, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.packed(self.norm(x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4).unbind(0)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    inputs: Any
    shape: tuple[int, ...] = (2, 2)
    names: tuple[str, ...] = ("dp", "tp")
    work: float = 1.1
    """Most work of all ranks together, over that of one device."""
    run: bool = False
    """Whether ranks run the plan, and compare with one device."""


ROWS = torch.linspace(-1, 1, 64).view(8, 8)
CASES = {
    "three ranks": Case(lambda: MLP(7, 5), ROWS[:, :7], (3,), ("tp",), 1.2),
    "data only": Case(MLP, ROWS, (4,), ("dp",)),
    "axes of one": Case(MLP, ROWS, (2, 1, 2), ("pp", "dp", "tp")),
    "alone": Case(MLP, ROWS, (1,), ("tp",)),
    "tied, with a loss": Case(Tied, torch.arange(32).view(4, 8) % 24, run=True),
    "dataclass": Case(TakesDataclass, Batch(ROWS, ROWS)),
    "mapping": Case(TakesMapping, {"batch": {"x": ROWS}, "scale": 2.0}),
    "frozen": Case(Frozen, ROWS, run=True),
    "buffers": Case(Normalized, ROWS, run=True),
    "nested": Case(Nested, ROWS),
    "shared": Case(Shared, ROWS, run=True),
    "a batch of one": Case(MLP, ROWS[:1]),
    "no batch": Case(MLP, ROWS[0]),
    "odd": Case(lambda: MLP(9, 31), torch.linspace(-1, 1, 63).view(7, 9), run=True),
    "packed": Case(Packed, torch.linspace(-1, 1, 512).view(4, 8, 16), run=True),
}


def called(model: nn.Module, inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def stepped(model: nn.Module, inputs: Any) -> Tensor:
    loss = loss_of(called(model, inputs))
    assert loss is not None
    loss.backward()
    return loss.detach()


def run_and_compare(name: str, source: str) -> None:
    """On ranks: a step by a plan gives the loss and gradients of one device."""
    case, scope = CASES[name], dict[str, Any]()
    exec(source, scope)
    inputs = case.inputs.double() if case.inputs.is_floating_point() else case.inputs
    model, single = case.make().double(), case.make().double()
    single.load_state_dict(model.state_dict())
    parallelize_module(model, cached_mesh(*case.shape, names=case.names), scope["plan"])
    with implicit_communication("allow"):
        loss = stepped(model, inputs)
    torch.testing.assert_close(loss.full_tensor(), stepped(single, inputs), rtol=1e-10, atol=1e-12)
    for p, q in zip(model.parameters(), single.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_what_is_printed_is_the_plan_and_sends_what_was_predicted(name: str) -> None:
    case, scope = CASES[name], dict[str, Any]()
    with fake_ranks(torch.Size(case.shape).numel(), rank=0):
        mesh = init_device_mesh("cpu", case.shape, mesh_dim_names=case.names)
        plan = auto_plan(case.make(), mesh, case.inputs, machine=BANDWIDTH_ONLY)
        exec(plan.source(), scope)
        assert predict(case.make(), mesh, scope["plan"], case.inputs).totals == plan.predicted.totals
        whole = predict(case.make(), mesh, {}, case.inputs)
        assert plan.predicted.flops * mesh.size() <= case.work * whole.flops
        model = parallelize_module(case.make(), mesh, scope["plan"])
        with explain() as seen, implicit_communication("allow"):
            stepped(model, case.inputs)
    assert seen.totals() == plan.predicted.totals
    if case.run:
        run_ranks(run_and_compare, 4, kwargs={"name": name, "source": plan.source()}, pool=True)


def test_a_batch_that_is_the_second_dim() -> None:
    """Positions come first; padding has its rows first."""
    model = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0)
    inputs = {"src": torch.zeros(12, 8, 16), "src_key_padding_mask": torch.zeros(8, 12, dtype=torch.bool)}
    with fake_ranks(4, rank=0):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        plan = auto_plan(model, mesh, inputs, machine=BANDWIDTH_ONLY)
        whole = predict(model, mesh, {}, inputs)
    assert plan.predicted.flops <= 1.1 / 4 * whole.flops
    assert plan.predicted.sent <= 1.5 * whole.parameters, "an all-reduce of gradients is the most that it takes"


def test_no_more_bytes_than_by_hand_for_attention_of_torch() -> None:
    example = examples()["MultiheadAttention"]
    inputs, _ = example.batch(TINY)
    with fake_ranks(4, rank=0):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = auto_plan(example.built(TINY), mesh, inputs, machine=BANDWIDTH_ONLY)
        by_hand = predict(example.built(TINY), mesh, example.plan, inputs)
    assert plan.predicted.sent <= by_hand.sent
    assert plan.predicted.flops <= 1.1 * by_hand.flops
    assert plan.predicted.state <= 1.1 * by_hand.state


def test_layers_that_are_alike_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where what is done between them keeps them from being left out."""
    counts, run = [0], Rehearsal._run

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[-1] += 1
        return run(*args, **kwargs)

    monkeypatch.setattr(Rehearsal, "_run", counted)
    with fake_ranks(4, rank=0):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        for layers in (2, 3):
            auto_plan(Nested(layers), mesh, ROWS, machine=BANDWIDTH_ONLY)
            counts.append(0)
    assert counts[0] == counts[1] > 0
