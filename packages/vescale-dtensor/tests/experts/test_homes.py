"""Listed experts that move between ranks while a model trains, with every optimizer of torch, against one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from vescale_dtensor import (
    DTensor,
    DTensorError,
    ExpertsAllocator,
    RaggedShard,
    Shard,
    UnsupportedOperationError,
    distribute_tensor,
    expert_parallel,
    implicit_communication,
    parallelize_module,
)
from vescale_dtensor._dispatch import policy
from vescale_testing import run_threads


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share the count of running modules, by which a process knows that an input is not the user's."""
    monkeypatch.setattr(policy.state, "inside_modules", 1000)


WIDTH = 4


class Block(nn.Module):
    """A loop over a list of experts; the router likes the first ones best."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, num_experts, dtype=torch.float64)
        self.gate.bias.data.copy_(torch.linspace(2, -2, num_experts))
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH)).double() for _ in range(num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            if len(token):
                out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None])
        return x + out


def block(num_experts: int) -> Block:
    torch.manual_seed(0)
    return Block(num_experts)


def batch(step: int) -> Tensor:
    return torch.randn(12, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def whole(x: Any) -> Any:
    return x.detach().full_tensor() if isinstance(x, DTensor) else x.detach() if isinstance(x, Tensor) else x


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).pow(2).mean()
        loss.backward()
        return loss

    return whole(optimizer.step(closure))  # type: ignore[no-any-return]


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, amsgrad=True),
    "fused": lambda p: torch.optim.Adam(p, lr=0.05, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.05, max_iter=2),
}
CASES = [((2,), 4, "adamw"), ((2, 2), 5, "sgd"), *[((2,), 4, kind) for kind in list(OPTIMIZERS) if kind != "sgd"][1:]]


@pytest.mark.parametrize(("shape", "num_experts", "kind"), CASES, ids=str)
def test_training_with_moves_equals_one_device(shape: tuple[int, ...], num_experts: int, kind: str) -> None:
    base = block(num_experts)
    reference = copy.deepcopy(base)
    optimizer = OPTIMIZERS[kind](reference.parameters())
    expected = [train(reference, optimizer, batch(step)) for step in range(4)]
    tol = 1e-6 if kind == "lbfgs" else 1e-9  # its quotients of small differences magnify rounding
    ranks = torch.Size(shape).numel()
    copies = iter([copy.deepcopy(base) for _ in range(ranks)])

    def body(rank: int) -> int:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep")[-len(shape) :])
        model = parallelize_module(next(copies), mesh, expert_parallel())
        ours = OPTIMIZERS[kind](model.parameters())
        allocator = ExpertsAllocator(model, ours, tolerance=1.0)
        held = [p.to_local().numel() for p in model.experts.parameters()]
        moved = 0
        for step in range(4):
            loss = train(model, ours, distribute_tensor(batch(step), mesh, [Shard(0)] * len(shape)))
            torch.testing.assert_close(loss, expected[step], rtol=tol, atol=tol)
            if step in (0, 2):
                gradients = {n: whole(p.grad) for n, p in model.named_parameters()}
                values = {n: whole(v) for n, v in model.state_dict().items()}
                for move in allocator.step().values():
                    moved += move.moved
                    assert move.bound <= move.after < move.before
                    assert sorted(move.order) == list(range(num_experts))
                for n, p in model.named_parameters():  # nothing but its place has changed
                    assert torch.equal(whole(p), values[n]), n
                    assert (p.grad is None) == (gradients[n] is None)
                    assert p.grad is None or torch.equal(whole(p.grad), gradients[n]), n
        assert [p.to_local().numel() for p in model.experts.parameters()] != held
        for (name, p), mine in zip(reference.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(whole(mine), p.detach(), rtol=tol, atol=tol, msg=name)
            for key, value in optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    torch.testing.assert_close(whole(ours.state[mine][key]), value, rtol=tol, atol=tol, msg=key)
            if kind not in ("adafactor", "lbfgs"):
                assert all(v._spec is mine._spec for v in ours.state[mine].values() if isinstance(v, DTensor))
        allocator.restore()
        assert [p.to_local().numel() for p in model.experts.parameters()] == held
        return moved

    with implicit_communication("allow" if kind in ("adafactor", "lbfgs") else "error"):
        results = run_threads(ranks, body)
    assert results[0] > 0, "nothing moved: the case tests nothing"
    assert len(set(results)) == 1


def test_states_load_while_experts_are_elsewhere_and_loads_are_counted_once() -> None:
    base = block(4)
    counts = [int((base.gate(batch(0)).topk(2, -1).indices == e).sum()) for e in range(4)]
    copies = iter([copy.deepcopy(base) for _ in range(8)])

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        model, other = (parallelize_module(next(copies), mesh, expert_parallel()) for _ in range(2))
        first, second = (torch.optim.AdamW(m.parameters()) for m in (model, other))
        allocator = ExpertsAllocator(model, first, tolerance=1.0)
        train(model, first, distribute_tensor(batch(0), mesh, [Shard(0), Shard(0)]))
        assert allocator.loads() == {"": counts}
        plan = allocator.plan()
        assert allocator.step() == plan
        assert list(plan) == [""]
        again = copy.deepcopy(model)
        other.load_state_dict(model.state_dict())
        third = torch.optim.AdamW(again.parameters())
        for optimizer in (second, third):
            optimizer.load_state_dict(copy.deepcopy(first.state_dict()))
        x = distribute_tensor(batch(1), mesh, [Shard(0), Shard(0)])
        losses = [train(m, o, x) for m, o in ((model, first), (other, second), (again, third))]
        for p, q, r in zip(model.parameters(), other.parameters(), again.parameters(), strict=True):
            torch.testing.assert_close(whole(q), whole(p), rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(whole(r), whole(p), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(losses[1], losses[0])

    with implicit_communication("allow"):  # states go where the parameters of the others are
        run_threads(4, body)


def test_what_cannot_be_moved_is_refused() -> None:
    copies = iter([block(4) for _ in range(4)])

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        model = parallelize_module(next(copies), mesh, expert_parallel())
        allocator = ExpertsAllocator(model, tolerance=1.0)
        model(distribute_tensor(batch(0), mesh, [Shard(0)]))
        for p in model.experts.parameters():
            p.register_hook(lambda grad: grad)
        with pytest.raises(DTensorError, match=r"weight has gradient hooks"):
            allocator.step()
        torn = {"parameter": {r"experts\.1\.0\.weight": {"ep": RaggedShard((0,), (1, 1))}}}
        other = parallelize_module(next(copies), mesh, [expert_parallel(), torn])
        with pytest.raises(UnsupportedOperationError, match=r"parameter '0\.weight' of expert 1 is placed"):
            other(distribute_tensor(batch(0), mesh, [Shard(0)]))

    run_threads(2, body)
