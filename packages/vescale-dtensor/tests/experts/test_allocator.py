"""Experts that move between ranks while a model trains: the same training, and states that are not mixed up."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from vescale_dtensor import DTensor, DTensorError, Shard, distribute_tensor, implicit_communication, parallelize_module
from vescale_dtensor._dispatch import policy
from vescale_dtensor._experts import ExpertsAllocator, expert_parallel
from vescale_testing import run_threads


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share the count of running modules, by which a process knows that an input is not the user's."""
    monkeypatch.setattr(policy.state, "inside_modules", 1000)


WIDTH = 4


class Experts(nn.Module):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, WIDTH, 5, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(num_experts, 5, WIDTH, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones(num_experts, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        up, down, scale = (t[index] for t in (self.up, self.down, self.scale))  # [tokens, top-k, ...]
        hidden = torch.tanh(torch.einsum("tw,tkwh->tkh", x, up))
        return torch.einsum("tkh,tkhw,tkw,tk->tw", hidden, down, scale, weights)


class Mixture(nn.Module):
    def __init__(self, num_experts: int, top_k: int = 2) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(WIDTH, num_experts, dtype=torch.float64)
        self.gate.bias.data.copy_(torch.linspace(2, -2, num_experts))  # the first experts get most
        self.experts = Experts(num_experts)

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.gate(x).softmax(-1).topk(self.top_k, -1)
        return x + self.experts(x, index, weights)


def batch(step: int) -> Tensor:
    return torch.randn(16, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def whole(x: Any) -> Tensor:
    return x.detach().full_tensor() if isinstance(x, DTensor) else x.detach()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    return whole(loss)


def mixture(num_experts: int) -> Mixture:
    torch.manual_seed(0)
    return Mixture(num_experts)


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
}


@pytest.mark.parametrize(
    ("shape", "num_experts", "kind"),
    [((4,), 8, "adamw"), ((2, 2), 5, "sgd"), ((2, 2), 8, "adamw"), ((2,), 4, "rmsprop"), ((2,), 4, "adafactor")],
    ids=str,
)
def test_training_with_moves_equals_one_device(shape: tuple[int, ...], num_experts: int, kind: str) -> None:
    base = mixture(num_experts)
    reference = copy.deepcopy(base)
    optimizer = OPTIMIZERS[kind](reference.parameters())
    expected = []
    for step in range(5):
        optimizer.zero_grad()
        expected.append(train_step(reference, optimizer, batch(step)))
    copies = iter([copy.deepcopy(base) for _ in range(4)])

    def body(rank: int) -> int:
        names = ("dp", "ep")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = parallelize_module(next(copies), mesh, expert_parallel())
        ours = OPTIMIZERS[kind](model.parameters())
        allocator = ExpertsAllocator(model, ours, tolerance=1.0)
        moved = 0
        for step in range(5):
            ours.zero_grad()
            loss = train_step(model, ours, distribute_tensor(batch(step), mesh, [Shard(0)] * len(shape)))
            torch.testing.assert_close(loss, expected[step], rtol=1e-9, atol=1e-9)
            if step in (1, 3):
                gradients = {n: whole(p.grad) for n, p in model.experts.named_parameters()}
                before = model.experts._vescale_experts.order
                for move in allocator.step().values():
                    moved += move.moved
                    assert move.bound <= move.after < move.before
                    assert sorted(move.order) == list(range(num_experts))
                after = model.experts._vescale_experts.order
                for n, p in model.experts.named_parameters():  # gradients have moved too
                    for position, expert in enumerate(after):
                        assert torch.equal(whole(p.grad)[position], gradients[n][before.index(expert)])
        allocator.restore()
        for name, p in reference.named_parameters():
            mine = model.get_parameter(name)
            torch.testing.assert_close(whole(mine), p.detach(), rtol=1e-9, atol=1e-9, msg=name)
            for key, value in optimizer.state[p].items():
                torch.testing.assert_close(whole(ours.state[mine][key]), value, rtol=1e-9, atol=1e-9, msg=key)
        return moved

    with implicit_communication("allow"):  # Adafactor's means over whole parameters
        results = run_threads(torch.Size(shape).numel(), body)
    assert results[0] > 0, "nothing moved: the case tests nothing"
    assert len(set(results)) == 1


def test_loads_are_counted_once_over_all_ranks() -> None:
    base = mixture(4)
    counts = [0] * 4
    for step in range(2):
        chosen = base.gate(batch(step)).topk(2, -1).indices
        for e in chosen.flatten().tolist():
            counts[e] += 1
    copies = iter([copy.deepcopy(base) for _ in range(4)])

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        model = parallelize_module(next(copies), mesh, expert_parallel())
        allocator = ExpertsAllocator(model)
        assert allocator.loads() == {"experts": [0] * 4}
        assert allocator.step() == {}, "nothing was counted, nothing moves"
        model(distribute_tensor(batch(0), mesh, [Shard(0), Shard(0)]))
        with torch.no_grad():
            model(batch(1))  # the same tokens on every rank count once
        assert allocator.loads() == {"experts": counts}
        allocator.reset()
        assert allocator.loads() == {"experts": [0] * 4}

    run_threads(4, body)


def test_states_are_refused_while_experts_are_elsewhere() -> None:
    copies = iter([mixture(4) for _ in range(2)])

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        model = parallelize_module(next(copies), mesh, expert_parallel())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        allocator = ExpertsAllocator(model, optimizer, tolerance=1.0)
        before = {n: whole(v) for n, v in model.state_dict().items()}
        model(distribute_tensor(batch(0), mesh, [Shard(0)]))
        plan = allocator.plan()
        assert allocator.step() == plan
        assert list(plan) == ["experts"]
        for refused in (
            model.state_dict, optimizer.state_dict, lambda: model.load_state_dict(before),
            lambda: optimizer.load_state_dict({"state": {}, "param_groups": []}),
        ):  # fmt: skip
            with pytest.raises(DTensorError, match=r"restore\(\)"):
                refused()
        allocator.restore()
        optimizer.state_dict()
        for name, value in model.state_dict().items():
            assert torch.equal(whole(value), before[name])
        with pytest.raises(DTensorError, match="LBFGS keeps its history"):
            ExpertsAllocator(model, torch.optim.LBFGS(model.parameters()))
        with pytest.raises(ValueError, match=r"tolerance = 0\.5"):
            ExpertsAllocator(model, tolerance=0.5)
        with pytest.raises(ValueError, match="no experts whose tokens travel"):
            ExpertsAllocator(nn.Linear(2, 2))

    run_threads(2, body)
