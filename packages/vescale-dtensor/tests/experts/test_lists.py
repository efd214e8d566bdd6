"""Hand-written mixtures with a list of experts, on meshes of threads, against one device."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from vescale_dtensor import (
    DTensor,
    Replicate,
    Shard,
    UnsupportedOperationError,
    distribute_tensor,
    implicit_communication,
    parallelize_module,
)  # fmt: skip
from vescale_dtensor._dispatch import policy
from vescale_dtensor._experts import expert_parallel
from vescale_dtensor._experts.blocks import listed_experts
from vescale_testing import run_threads

WIDTH = 6


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share the count of running modules, by which a process knows that an input is not the user's."""
    monkeypatch.setattr(policy.state, "inside_modules", 1000)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, 4, dtype=torch.float64)
        self.w2 = nn.Linear(4, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(torch.tanh(self.w1(x)))
        return out


class Block(nn.Module):
    """The mixture of many codes: a loop over a list of experts, which skips those that nobody chose."""

    def __init__(self, num_experts: int = 4, top_k: int = 2, shift: float = 0.0, recompute: Any = None) -> None:
        super().__init__()
        self.top_k, self.recompute = top_k, recompute
        self.gate = nn.Linear(WIDTH, num_experts, dtype=torch.float64)
        self.gate.bias.data[-1] = shift
        self.experts = nn.ModuleList(Expert() for _ in range(num_experts))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden.reshape(-1, hidden.shape[-1])
        scores = self.gate(x)
        weights, chosen = scores.softmax(-1).topk(self.top_k, -1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            if token.numel():
                out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out.reshape(hidden.shape), scores


class Model(nn.Module):
    """A block between two layers, with a loss that evens out the experts."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.block = Block(**options)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.block.recompute is None:
            y, scores = self.block(x)
        else:
            y, scores = checkpoint(self.block, x, use_reentrant=self.block.recompute)
        share = scores.softmax(-1).mean(0)
        return (x + y).pow(2).mean() + (share * share).sum()  # type: ignore[no-any-return]


def make(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def batch(*shape: int) -> Tensor:
    return torch.randn(*shape, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def whole(x: Any) -> Any:
    return None if x is None else x.detach().full_tensor() if isinstance(x, DTensor) else x.detach()


def train(model: nn.Module, x: Any, steps: int = 2) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        seen += [whole(loss), whole(norm), *(whole(p.grad) for p in model.parameters())]
        optimizer.step()
    return seen + [whole(p) for p in model.parameters()]


CASES = [
    ((2,), ("ep",), "ep", [Shard(0)], {}),
    ((4,), ("ep",), "ep", [Shard(0)], {"num_experts": 5, "top_k": 1}),
    ((4,), ("ep",), "ep", [Replicate()], {"num_experts": 3}),
    ((2, 2), ("dp", "ep"), "ep", [Shard(0), Shard(0)], {"shift": 50.0, "top_k": 1}),
    ((2, 2), ("dp", "ep"), "ep", [Shard(0), Shard(0)], {"recompute": False, "num_experts": 6}),
    ((4,), ("ep",), "ep", [Shard(0)], {"recompute": True, "shift": 50.0, "top_k": 1}),
    ((2, 2), ("ep", "tp"), ("tp", "ep"), [Shard(0), Replicate()], {"num_experts": 5}),
    ((2, 2), ("ep", "tp"), "ep", [Shard(0), Replicate()], {}),
    ((2,), ("dp",), (), [Shard(0)], {"shift": 50.0, "top_k": 1}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{dict(zip(c[1], c[0], strict=True))}-{c[2]}-{c[3]}-{c[4]}")
def test_training_equals_one_device(case: Any) -> None:
    mesh_shape, names, axes, placements, options = case
    shape = ((8, 3), (4,))[CASES.index(case) % 2]
    base = make(**options)
    expected = train(copy.deepcopy(base), batch(*shape))
    models = iter([copy.deepcopy(base) for _ in range(4)])

    def body(rank: int) -> list[Any]:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
        model = parallelize_module(next(models), mesh, expert_parallel(axes))
        return train(model, distribute_tensor(batch(*shape), mesh, placements))

    with implicit_communication("error"):
        results = run_threads(torch.Size(mesh_shape).numel(), body)
    for got in results:
        for mine, theirs in zip(got, expected, strict=True):
            assert (mine is None) == (theirs is None), "an expert that no rank called has no gradient"
            if theirs is not None:
                torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_found_by_structure() -> None:
    assert listed_experts(Block()) == ("experts", 4)
    unlike = Block()
    unlike.experts[0].w1 = nn.Linear(WIDTH, 5)
    unrouted = Block()
    unrouted.gate = nn.Linear(WIDTH, 7)
    for other in (unlike, unrouted, Expert(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), make().first):
        assert listed_experts(other) is None


def test_names_shapes_and_owners_of_listed_experts() -> None:
    base = make(num_experts=5)
    names = [n for n, _ in base.named_parameters()]
    models = iter([copy.deepcopy(base) for _ in range(4)])

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        model = parallelize_module(next(models), mesh, "experts")
        assert [n for n, _ in model.named_parameters()] == names
        held = [e for e in range(5) if model.block.experts[e].w1.weight.to_local().numel()]
        assert held == [[0, 1, 2], [3, 4]][rank % 2]
        for name, p in base.named_parameters():
            assert torch.equal(whole(model.get_parameter(name)), p.detach())
        model.load_state_dict(base.state_dict())
        again = pickle.loads(pickle.dumps(base.block))
        assert torch.equal(again(batch(3))[0], base.block(batch(3))[0])

    run_threads(4, body)


class Statistic(Block):
    """Adds a loss over all tokens."""

    def forward(self, hidden: Tensor) -> Any:
        out, scores = super().forward(hidden)
        return out, scores, scores.mean()


class Chained(Block):
    """The second expert works on what the first gave."""

    def forward(self, hidden: Tensor) -> Any:
        return self.experts[1](self.experts[0](hidden))


class Noisy(Block):
    """Draws inside of the block."""

    def forward(self, hidden: Tensor) -> Any:
        return super().forward(hidden + torch.rand(()) if self.training else hidden)


class InPlace(Block):
    """Changes its input."""

    def forward(self, hidden: Tensor) -> Any:
        return super().forward(hidden.mul_(2) if self.training else hidden * 2)


class Whole(Block):
    """Mixes tokens with each other."""

    def forward(self, hidden: Tensor) -> Any:
        return super().forward(hidden - hidden.mean(0))


class Counter(Expert):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x)


class Counting(Block):
    """Experts that change a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Counter() for _ in range(4))


@pytest.mark.parametrize(
    ("cls", "message"),
    [(Counting, "change their buffers"),
     (Statistic, r"shape \[\] that is not a matter of each token"), (Chained, "depend on results of other experts"),
     (Noisy, "draws random numbers"), (InPlace, "changes its input in place"), (Whole, "not a matter of each token")],
)  # fmt: skip
def test_blocks_that_cannot_be_spread_are_refused(cls: Any, message: str) -> None:
    torch.manual_seed(0)
    base = cls()
    models = iter([copy.deepcopy(base) for _ in range(2)])

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        block = parallelize_module(next(models), mesh, expert_parallel())
        with pytest.raises(UnsupportedOperationError, match=message), torch.no_grad():
            block(distribute_tensor(batch(8), mesh, [Shard(0)]))

    run_threads(2, body)
