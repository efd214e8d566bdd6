"""A sharded optimizer trains as one device does, and with the same bits whatever the stage, transport or buckets."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_comm._optimizer.optimizer import DistributedOptimizer
from vescale_comm._transport import peer

STEPS = 20
ROWS = 2
"""Samples of one rank in one step."""


class Model(nn.Module):
    """Odd sizes, a weight that is used twice, a norm, and a parameter without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 13)
        self.norm = nn.LayerNorm(13)
        self.down = nn.Linear(13, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.down(torch.tanh(self.norm(self.up(x)))) * self.scale
        return self.head(x)


class Orthogonal(torch.optim.Optimizer):
    """Follows the closest orthogonal matrix of the momentum, so it needs whole matrices; others get plain descent."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(0.9).add_(parameter.grad)
                update = momentum
                if momentum.ndim == 2:
                    u, _, v = torch.linalg.svd(momentum, full_matrices=False)
                    update = u @ v
                parameter.sub_(update, alpha=group["lr"])


def batches(world: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    del dtype
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 11, (world * ROWS, 5), generator=generator) for _ in range(STEPS)]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train_alone(make: Callable[[list[Any]], list[torch.optim.Optimizer]], world: int) -> list[Tensor]:
    """Train on whole batches on one device."""
    torch.manual_seed(0)
    model = Model().double()
    optimizers = make(list(model.named_parameters()))
    for tokens in batches(world):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, tokens).backward()
        for optimizer in optimizers:
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def train_sharded(rank: int, world: int, make: Callable[[nn.Module], DistributedOptimizer]) -> list[Tensor]:
    """Train on this rank's part of the batches."""
    torch.manual_seed(rank)  # ranks start from the values of the first one
    if rank == 0:
        torch.manual_seed(0)
    model = Model().double()
    optimizer = make(model)
    for tokens in batches(world):
        optimizer.zero_grad()
        loss_of(model, tokens[rank * ROWS : (rank + 1) * ROWS]).backward()
        optimizer.step()
    optimizer.finish_param_sync()
    found = [p.detach().clone() for p in model.parameters()]
    optimizer.close()
    return found


def decay_groups(named: list[Any], **matrix: Any) -> list[dict[str, Any]]:
    return [
        {"params": [pair for pair in named if pair[1].ndim == 2], **matrix},
        {"params": [pair for pair in named if pair[1].ndim != 2], "weight_decay": 0.0, "lr": 0.003},
    ]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


SINGLE: dict[str, Callable[[list[Any]], list[torch.optim.Optimizer]]] = {
    "adamw": lambda named: [torch.optim.AdamW(decay_groups(named), lr=0.01, weight_decay=0.1)],
    "sgd": lambda named: [sgd(named)],
    "orthogonal": lambda named: [Orthogonal(named)],
    "muon": lambda named: [
        torch.optim.Muon([pair for pair in named if pair[1].ndim == 2], lr=0.01),
        torch.optim.Adagrad([pair for pair in named if pair[1].ndim != 2], lr=0.02),
    ],
}
SHARDED: dict[str, tuple[str, Callable[[nn.Module, int], DistributedOptimizer]]] = {
    "adamw, stage 1": (
        "adamw",
        lambda m, z: DistributedOptimizer(
            decay_groups(list(m.named_parameters())),
            torch.optim.AdamW,
            zero=z,
            model=m,
            lr=0.01,
            weight_decay=0.1,
            bucket_mb=5e-4,
        ),
    ),
    "adamw without a model, whole": (
        "adamw",
        lambda m, z: DistributedOptimizer(
            decay_groups(list(m.named_parameters())),
            torch.optim.AdamW,
            zero=z,
            plan="whole",
            lr=0.01,
            weight_decay=0.1,
            foreach=True,
        ),
    ),
    "sgd": (
        "sgd",
        lambda m, z: DistributedOptimizer(
            m,
            torch.optim.SGD,
            zero=z,
            lr=0.1,
            momentum=0.9,
            nesterov=True,
            weight_decay=0.01,
            plan={r"up\..*": 8, ".*": "flat"},
        ),
    ),
    "orthogonal": ("orthogonal", lambda m, z: DistributedOptimizer(m, Orthogonal, zero=z, transport="p2p")),
    "muon and adagrad": (
        "muon",
        lambda m, z: DistributedOptimizer(
            [
                {"params": [p for p in m.parameters() if p.ndim == 2], "optimizer": torch.optim.Muon, "lr": 0.01},
                {"params": [p for p in m.parameters() if p.ndim != 2]},
            ],
            torch.optim.Adagrad,
            zero=z,
            model=m,
            lr=0.02,
        ),
    ),
}


@pytest.mark.ranks(2)
def test_two_ranks_train_as_one_device(rank: int, world: int) -> None:
    check_all(rank, world)


@pytest.mark.ranks(3)
def test_three_ranks_train_as_one_device(rank: int, world: int) -> None:
    check_all(rank, world)


@pytest.mark.ranks(4)
def test_four_ranks_train_as_one_device(rank: int, world: int) -> None:
    check_all(rank, world)


def check_all(rank: int, world: int) -> None:
    expected = {name: train_alone(make, world) for name, make in SINGLE.items()}
    for (name, (which, make)), zero in itertools.product(SHARDED.items(), (1, 2)):
        found = train_sharded(rank, world, lambda m, make=make, zero=zero: make(m, zero))  # type: ignore[misc]
        for a, b in zip(found, expected[which], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


def replicated(rank: int, world: int, optimizer_options: dict[str, Any]) -> list[Tensor]:
    """Data parallel by hand: every gradient is added in rank order, in single precision."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **optimizer_options)
    for tokens in batches(world):
        optimizer.zero_grad()
        loss_of(model, tokens[rank * ROWS : (rank + 1) * ROWS]).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parts = [torch.empty_like(parameter.grad) for _ in range(world)]
            dist.all_gather(parts, parameter.grad)
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            parameter.grad = total / world
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.ranks(3)
def test_bits_do_not_depend_on_stage_transport_or_buckets(
    rank: int, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, small = peer.BESIDE, peer.SMALL
    for implementation in ({}, {"foreach": True, "amsgrad": True}):
        expected = replicated(rank, world, implementation)
        for zero, transport, bucket_mb, plan, share in [
            (1, "p2p", 8, "flat", False),
            (1, "p2p", 2e-4, "flat", False),
            (2, "p2p", 2e-4, "flat", False),
            (2, "native", 2e-4, "whole", False),
            (1, "shared", 2e-4, "flat", False),
            (2, "shared", 8, "flat", True),
        ]:
            torch.manual_seed(0)
            model = Model()
            # Small buckets go by threads, as large ones do; the others by the calling thread.
            monkeypatch.setattr(peer, "BESIDE", 0 if bucket_mb < 1 else beside)
            monkeypatch.setattr(peer, "SMALL", 0 if bucket_mb < 1 else small)
            optimizer = DistributedOptimizer(
                model,
                torch.optim.AdamW,
                zero=zero,
                transport=transport,
                bucket_mb=bucket_mb,
                plan=plan,
                share_parameters=share,
                lr=0.01,
                **implementation,
            )
            for tokens in batches(world):
                optimizer.zero_grad()
                loss_of(model, tokens[rank * ROWS : (rank + 1) * ROWS]).backward()
                optimizer.step()
            optimizer.finish_param_sync()
            for a, b in zip(model.parameters(), expected, strict=True):
                assert torch.equal(a, b), (zero, transport, bucket_mb, plan, implementation)
            optimizer.close()
