"""A hand-written mixture with stacked experts, on meshes of threads, against one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from vescale_dtensor import (
    DTensor,
    ImplicitCommunicationError,
    MeshMismatchError,
    Partial,
    Replicate,
    Shard,
    UnsupportedOperationError,
    distribute_tensor,
    explain,
    implicit_communication,
    parallelize_module,
    static,
)  # fmt: skip
from vescale_dtensor._dispatch import policy
from vescale_dtensor._experts import expert_parallel
from vescale_dtensor.errors import StaticWarning
from vescale_testing import cached_mesh, run_threads


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share the count of running modules, by which a process knows that an input is not the user's."""
    monkeypatch.setattr(policy.state, "inside_modules", 1000)


WIDTH = 6


class Experts(nn.Module):
    """Stacked two-layer experts; the loop skips experts that nobody chose."""

    def __init__(self, num_experts: int, hidden: int = 4) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, WIDTH, hidden, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(num_experts, hidden, WIDTH, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(num_experts, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.num_experts):
            token, slot = torch.where(index == e)
            if len(token):
                y = torch.tanh(x[token] @ self.up[e]) @ self.down[e] + self.bias[e]
                out = out.index_add(0, token, y * weights[token, slot].unsqueeze(1))
        return out


class Wide(Experts):
    """Results are wider than tokens."""

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return torch.cat((x, x), 1)


class Mixture(nn.Module):
    """A router and experts; `shift` moves the router's taste, to leave experts without tokens."""

    def __init__(self, num_experts: int = 4, top_k: int = 2, shift: float = 0.0, recompute: Any = None) -> None:
        super().__init__()
        self.top_k, self.recompute = top_k, recompute
        self.gate = nn.Linear(WIDTH, num_experts, dtype=torch.float64)
        nn.init.zeros_(self.gate.bias)
        self.gate.bias.data[-1] = shift
        self.experts = Experts(num_experts)

    def mix(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        weights, index = scores.topk(self.top_k, -1)
        return x + self.experts(x, index, weights / weights.sum(-1, keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute is None:
            return self.mix(x)
        return checkpoint(self.mix, x, use_reentrant=self.recompute)  # type: ignore[no-any-return]


def mixture(**options: Any) -> Mixture:
    torch.manual_seed(0)
    return Mixture(**options)


def batch(rows: int = 12) -> Tensor:
    return torch.randn(rows, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def whole(x: Any) -> Tensor:
    return x.detach().full_tensor() if isinstance(x, DTensor) else x.detach()


def train(model: nn.Module, x: Any, steps: int = 2) -> list[Tensor]:
    """Input gradient, then losses, gradients and parameters of all steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        x = x.detach().requires_grad_()
        loss = model(x).pow(2).mean()
        loss.backward()
        seen += [loss, x.grad, *(p.grad for p in model.parameters())]
        seen = [whole(t) for t in seen]
        optimizer.step()
    return seen + [whole(p) for p in model.parameters()]


CASES = [
    # mesh, names, axes of experts, input placements, options
    ((2,), ("ep",), "ep", "S0", {}),
    ((4,), ("ep",), "ep", "I", {}),  # the same tokens everywhere: cut for the experts, gathered afterwards
    ((4,), ("ep",), "ep", "S0", {"num_experts": 3}),  # a rank without experts
    ((4,), ("ep",), "ep", "S0", {"num_experts": 6, "shift": 50.0, "top_k": 1}),  # all tokens to the last expert
    ((2, 2), ("dp", "ep"), "ep", "S0 S0", {"num_experts": 5, "shift": 50.0}),
    ((2, 2), ("dp", "ep"), "ep", "S0 I", {}),
    ((2, 2), ("ep", "dp"), "ep", "S0 S0", {"recompute": False}),
    ((2, 2), ("dp", "ep"), "ep", "S0 S0", {"recompute": False, "num_experts": 6, "shift": 50.0, "top_k": 1}),
    ((4,), ("ep",), "ep", "S0", {"recompute": True, "shift": 50.0, "top_k": 1}),
    ((2, 2), ("ep", "tp"), "ep", "S0 I", {}),  # experts are copies along tp, which does the same work twice
    ((2, 2), ("ep", "tp"), ("ep", "tp"), "S0 I", {"num_experts": 5}),
    ((4,), ("dp",), (), "S0", {"shift": 50.0}),  # every rank has all experts
    ((2, 2, 2), ("dp", "ep", "tp"), ("ep", "tp"), "S0 S0 I", {"num_experts": 8}),
]  # fmt: skip


def code_to_placements(codes: str) -> list[Any]:
    return [Shard(int(c[1:])) if c[0] == "S" else Replicate() for c in codes.split()]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{dict(zip(c[1], c[0], strict=True))}-{c[2]}-{c[3]}-{c[4]}")
def test_training_equals_one_device(case: Any) -> None:
    shape, names, axes, codes, options = case
    rows = 12 if CASES.index(case) % 2 else 5  # cut evenly or not, on some meshes with ranks that have none
    base = mixture(**options)
    expected = train(copy.deepcopy(base), batch(rows))
    models = iter([copy.deepcopy(base) for _ in range(8)])

    def body(rank: int) -> list[Tensor]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = parallelize_module(next(models), mesh, expert_parallel(axes))
        return train(model, distribute_tensor(batch(rows), mesh, code_to_placements(codes)))

    with implicit_communication("error"):
        results = run_threads(torch.Size(shape).numel(), body)
    for got in results:
        for mine, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_no_grad_plain_inputs_and_frozen_experts() -> None:
    base = mixture()
    expected = base(batch()).detach()
    frozen = copy.deepcopy(base)
    frozen.experts.requires_grad_(False)
    frozen(batch()).sum().backward()
    models = iter([(copy.deepcopy(base), copy.deepcopy(base).requires_grad_(False)) for _ in range(4)])

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ep",))
        model, still = next(models)
        parallelize_module(model, mesh, expert_parallel())
        with torch.no_grad():
            torch.testing.assert_close(whole(model(batch())), expected)  # a plain input: the same on every rank
            got = model(distribute_tensor(batch(), mesh, [Shard(0)]))
            assert got.placements == (Shard(0),), "tokens come back to where they were"
            torch.testing.assert_close(whole(got), expected)
        still.gate.requires_grad_(True)
        parallelize_module(still, mesh, expert_parallel())
        still(distribute_tensor(batch(), mesh, [Shard(0)])).sum().backward()
        for name, p in frozen.named_parameters():
            grad = still.get_parameter(name).grad
            assert (grad is None) == (p.grad is None)
            if p.grad is not None:
                torch.testing.assert_close(whole(grad), p.grad, rtol=1e-9, atol=1e-9)

    run_threads(4, body)


@pytest.mark.ranks(2, pool=True)
def test_explain_tells_what_travels() -> None:
    """By hand: the 3 tokens of a rank choose experts (0, 1), (2, 3), (1, 3); rank 0 has 0 and 1, rank 1 the others."""
    mesh = cached_mesh(2, names=("ep",))
    model = parallelize_module(mixture().experts, mesh, expert_parallel())
    chosen = torch.tensor([[0, 1], [2, 3], [1, 3]] * 2)
    args = [distribute_tensor(t, mesh, [Shard(0)]) for t in (batch(6), chosen, torch.ones(6, 2).double())]
    args[0].requires_grad_()
    with explain() as seen:
        model(*args).sum().backward()
    sent = [(r.phase, r.num_bytes) for r in seen.records if r.kind == "all_to_all"]
    row = WIDTH * 8
    # Two numbers per rank; two numbers per choice; a weight per choice; then four rows: one token goes to both.
    assert sent == [("forward", n) for n in (2 * 2 * 8, 6 * 2 * 8, 6 * 8, 4 * row, 4 * row)] + [
        ("backward", 4 * row),
        ("backward", 4 * row),
    ]
    assert {(r.axes, r.cause, r.op) for r in seen.records if r.kind == "all_to_all"} == {
        (("ep",), "operator", "run_experts")
    }


@pytest.mark.ranks(2, pool=True)
def test_static_programs_are_not_made_of_routes() -> None:
    """Where tokens go depends on data, so a recorded call must not be repeated."""
    mesh = cached_mesh(2, names=("ep",))
    base = mixture()
    module = parallelize_module(copy.deepcopy(base), mesh, expert_parallel())
    ours = static(module)
    inputs = [torch.randn(6, WIDTH, dtype=torch.float64) for _ in range(4)]
    with pytest.warns(StaticWarning, match="tokens travel to experts"):
        results = [ours(distribute_tensor(x, mesh, [Shard(0)])) for x in inputs]
    for x, got in zip(inputs, results, strict=True):
        torch.testing.assert_close(whole(got), base(x).detach(), rtol=1e-9, atol=1e-9)


def test_a_hidden_dim_that_is_cut_is_gathered_and_that_is_said() -> None:
    base = mixture()
    expected = base.experts(batch(), torch.zeros(12, 1, dtype=torch.int64), torch.ones(12, 1).double()).detach()
    models = iter([copy.deepcopy(base.experts) for _ in range(8)])

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
        experts = parallelize_module(next(models), mesh, expert_parallel())
        x = distribute_tensor(batch(), mesh, [Shard(0), Shard(1)])
        index, ones = torch.zeros(12, 1, dtype=torch.int64), torch.ones(12, 1).double()
        torch.testing.assert_close(whole(experts(x, index, ones)), expected)
        pending = distribute_tensor(batch(), mesh, [Partial(), Replicate()])
        torch.testing.assert_close(whole(experts(pending, index, ones)), expected)

    with implicit_communication("allow"):
        run_threads(4, body)
    with implicit_communication("error"), pytest.raises(ImplicitCommunicationError, match="experts moves sharded data"):
        run_threads(4, body)


def test_errors_name_what_is_wrong() -> None:
    models = iter([mixture().experts for _ in range(2 * 2)])
    wider = Wide(4)
    wide = iter([copy.deepcopy(wider) for _ in range(2)])

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        other = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        experts = parallelize_module(next(models), mesh, expert_parallel())
        x, index, ones = batch(4), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1).double()
        with pytest.raises(IndexError, match="chose expert 4; there are 4 experts"):
            experts(x, index + 4, ones)
        with pytest.raises(UnsupportedOperationError, match=r"\[tokens, top-k\]; an argument is \[4\]"):
            experts(x, index[:, 0], ones)
        with pytest.raises(MeshMismatchError, match="router's weights"):
            experts(x, index, distribute_tensor(ones, other, [Replicate()]))
        uneven = next(models)
        parallelize_module(uneven, mesh, [expert_parallel(), {"parameter": {"down": {"ep": Shard(1)}}}])
        with pytest.raises(UnsupportedOperationError, match="'down' is placed"):
            uneven(x, index, ones)
        wrong = parallelize_module(next(wide), mesh, expert_parallel())
        with pytest.raises(ValueError, match=r"one row of \[6\] torch.float64 per token, but for .*, 12\]"):
            wrong(x, torch.arange(4).unsqueeze(1), ones)

    run_threads(2, body)
