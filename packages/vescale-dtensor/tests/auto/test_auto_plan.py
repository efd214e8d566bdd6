"""Plans that are found: what they cut, that they send what was predicted, and no more than plans by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from vescale_dtensor import (
    DTensor,
    PlanError,
    Replicate,
    Shard,
    Varying,
    distribute_tensor,
    explain,
    implicit_communication,
    parallelize_module,
)
from vescale_dtensor._auto import AutoPlan, Link, Machine, auto_plan, predict
from vescale_dtensor.placements import InterleavedShard
from vescale_testing import cached_mesh, fake_ranks, run_ranks

VOCAB, WIDTH, HEADS = 24, 16, 4
BANDWIDTH_ONLY = Machine(Link(latency=0.0, bandwidth=1e9))
"""Collectives cost their bytes and nothing else."""


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Attention(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        if fused:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        parts = self.qkv(x).split(d, dim=2) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (p.view(b, t, HEADS, d // HEADS).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(fused)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(fused) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).view(-1, VOCAB), ids.reshape(-1))


def megatron(fused: bool) -> dict[str, Any]:
    """Tensor and sequence parallelism by hand, on the axis "tp"."""
    column = r"blocks\.\d+\.(attention\.[qkv]|mlp\.0)\.(weight|bias)"
    parameter: dict[str, Any] = {
        column: {"tp": Shard(0)},
        r"blocks\.\d+\.(attention\.o|mlp\.2)\.weight": {"tp": Shard(1)},
        r"(tokens|head)\.weight": {"tp": Shard(0)},
    }
    if fused:
        parameter[r"blocks\.\d+\.attention\.qkv\.(weight|bias)"] = {"tp": InterleavedShard(0, 3)}
    whole, rows = {"tp": Varying()}, {"tp": Shard(1)}
    forward = {
        "tokens.output": rows,
        r"blocks\.\d+\.(attention|mlp).input": whole,
        r"blocks\.\d+\.(attention|mlp).output": rows,
        "head.input": whole,
    }
    return {"parameter": parameter, "forward": forward}


DATA = {"forward": {"input": {"tp": Shard(0)}}}
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "mlp": (MLP, torch.linspace(-1, 1, 64).view(8, 8)),
    "decoder": (Decoder, torch.arange(32).view(4, 8) % VOCAB),
    "fused": (lambda: Decoder(fused=True), torch.arange(32).view(4, 8) % VOCAB),
}


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch)
    return out if out.ndim == 0 else out.square().sum()


def run_and_compare(source: str, kind: str, shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    """On ranks: train one step by a plan given as Python; return what was sent."""
    scope: dict[str, Any] = {}
    exec(source, scope)
    make, batch = MODELS[kind]
    torch.manual_seed(0)
    model, single = make().double(), make().double()
    single.load_state_dict(model.state_dict())
    batch = batch.double() if batch.is_floating_point() else batch
    parallelize_module(model, cached_mesh(*shape, names=names), scope["plan"])
    with explain() as seen, implicit_communication("allow"):
        loss = loss_of(model, batch)
        loss.backward()
    expected = loss_of(single, batch)
    expected.backward()
    torch.testing.assert_close(loss.detach().full_tensor(), expected.detach(), rtol=1e-10, atol=1e-12)
    for p, q in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-9, atol=1e-11)
    return seen.totals()


def planned(
    kind: str, shape: tuple[int, ...] = (4,), names: tuple[str, ...] = ("tp",), **options: Any
) -> tuple[AutoPlan, list[float]]:
    """The plan for a model in double precision, and the bytes that plans by hand send."""
    make, batch = MODELS[kind]
    batch = batch.double() if batch.is_floating_point() else batch
    with fake_ranks(4, rank=0):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = make().double()
        plan = auto_plan(model, mesh, batch, **options)
        by_hand: list[Any] = [megatron(kind == "fused"), DATA] if isinstance(model, Decoder) else [DATA]
        return plan, [predict(model, mesh, hand, batch).sent for hand in by_hand] if names == ("tp",) else []


@pytest.mark.parametrize("kind", ["decoder", "fused"])
def test_no_more_bytes_than_by_hand_and_as_many_as_predicted(kind: str) -> None:
    plan, by_hand = planned(kind, machine=BANDWIDTH_ONLY)
    assert plan.predicted.sent <= min(by_hand)
    with fake_ranks(4, rank=0):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        make, batch = MODELS[kind]
        whole = predict(make().double(), mesh, {}, batch)
    assert plan.predicted.flops <= 1.1 / 4 * whole.flops, "the work is split"
    kwargs = {"source": plan.source(), "kind": kind, "shape": (4,), "names": ("tp",)}
    for sent in run_ranks(run_and_compare, 4, kwargs=kwargs, pool=True):
        assert sent == plan.predicted.totals


def test_a_plan_for_two_axes() -> None:
    plan, _ = planned("mlp", (2, 2), ("a", "b"))
    assert set(plan) == {"parameter", "forward"}
    kwargs = {"source": plan.source(), "kind": "mlp", "shape": (2, 2), "names": ("a", "b")}
    for sent in run_ranks(run_and_compare, 4, kwargs=kwargs, pool=True):
        assert sent == plan.predicted.totals


@pytest.mark.parametrize("kind", ["decoder", "fused"])
def test_predictions_for_plans_by_hand(kind: str) -> None:
    """Also of a plan that operators have to complete by communication of their own."""
    make, batch = MODELS[kind]
    source = "from vescale_dtensor.placements import *\nplan = " + repr(megatron(kind == "fused"))
    with fake_ranks(4, rank=0):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        cost = predict(make().double(), mesh, megatron(kind == "fused"), batch)
    assert cost.totals
    kwargs = {"source": source, "kind": kind, "shape": (4,), "names": ("tp",)}
    assert run_ranks(run_and_compare, 4, kwargs=kwargs, pool=True)[0] == cost.totals
    assert cost.parameters < 4 * cost.parameters == cost.state


def test_memory_by_hand() -> None:
    with fake_ranks(4, rank=0):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        cost = predict(MLP(), mesh, {"parameter": {"up.weight": {"tp": Shard(0)}}}, torch.zeros(8, 8))
    assert cost.parameters == 4 * (8 * 32 // 4 + 32 + 32 * 8 + 8)
    assert cost.state == 4 * cost.parameters
    # the input, this rank's quarter of what tanh gives, as much of the weight that it meets, and the output
    assert cost.activations == 4 * (8 * 8 + 8 * 32 // 4 + 8 * 32 // 4 + 8 * 8)
    assert cost.memory == cost.state + cost.activations


def test_memory_limits_what_is_kept_whole() -> None:
    free, _ = planned("mlp", machine=BANDWIDTH_ONLY)
    wide = torch.zeros(4096, 8, dtype=torch.double)
    with fake_ranks(4, rank=0):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        data = auto_plan(MLP().double(), mesh, wide, machine=BANDWIDTH_ONLY)
        assert not data["parameter"], "many rows: the batch is cut, parameters are whole"
        state = predict(MLP().double(), mesh, {}, wide).state
        limit = data.predicted.activations + state // 2
        cut = auto_plan(MLP().double(), mesh, wide, machine=BANDWIDTH_ONLY, memory=limit)
    assert free.predicted.parameters < data.predicted.parameters
    assert cut.predicted.state < data.predicted.state
    assert cut.predicted.memory <= limit


def test_dtensors_among_the_inputs_fix_the_axes_of_data() -> None:
    with fake_ranks(4, rank=0):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        batch = distribute_tensor(torch.zeros(8, 8), mesh, [Shard(0), Replicate()])
        plan = auto_plan(MLP(), mesh, batch)
        assert not any("dp" in v for k, v in plan["forward"].items() if k.startswith("input"))
        assert plan.predicted.flops <= 1.1 / 4 * predict(MLP(), mesh, {}, torch.zeros(8, 8)).flops


class Drops(MLP):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x if mask.all() else x * mask)


@pytest.mark.ranks(4, pool=True)
def test_parallelize_module_with_auto() -> None:
    mesh = cached_mesh(4, names=("tp",))
    model = MLP()
    with pytest.raises(PlanError, match=r'call parallelize_module\(module, mesh, "auto", example_inputs=batch\)'):
        parallelize_module(model, mesh, "auto", src_data_rank=0)
    batch = torch.ones(8, 8)
    parallelize_module(model, mesh, "auto", example_inputs=batch)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    model(batch).square().sum().backward()
    with pytest.raises(PlanError, match="found different plans"):
        auto_plan(MLP(), mesh, torch.ones(8, 8), memory=None if mesh.get_rank() else 1)
    mask = torch.ones(8, 8, dtype=torch.long)
    assert "takes no" not in str(auto_plan(Drops(), mesh, (batch, mask)))
    mask[0, 0] = int(mesh.get_rank() > 0)  # ranks that have other data: nobody's count
    assert "takes no" in str(auto_plan(Drops(), mesh, (batch, mask)))


class Asks(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if (x > 0).all() else x + 1)


def test_models_that_ask_for_values_get_a_no_that_is_told() -> None:
    with fake_ranks(4, rank=0):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        plan = auto_plan(Asks(), mesh, torch.ones(8, 8))
        assert "reads its data 1 times for a yes or no, and the prediction takes no" in str(plan)
        assert plan["parameter"] == auto_plan(MLP(), mesh, torch.ones(8, 8))["parameter"]


def test_planning_leaves_no_traces() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 8))
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    with fake_ranks(4, rank=0):
        auto_plan(model, init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), torch.ones(8, 8))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if x.sum().item() > 0 else x


def test_errors_say_what_to_do() -> None:
    with fake_ranks(4, rank=0):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        with pytest.raises(PlanError, match=r"failed there: .*Models that read values"):
            auto_plan(Reads(), mesh, torch.ones(2, 8))
        with pytest.raises(TypeError, match="example_inputs must be a tensor"):
            auto_plan(MLP(), mesh, 3)
        with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
            auto_plan(3, mesh, torch.ones(2, 8))  # type: ignore[arg-type]
        model = parallelize_module(MLP(), mesh, {})
        with pytest.raises(PlanError, match="parallelized already"):
            auto_plan(model, mesh, torch.ones(2, 8))
        with pytest.raises(PlanError, match="has no names for its axes"):
            auto_plan(MLP(), init_device_mesh("cpu", (4,)), torch.ones(2, 8))
