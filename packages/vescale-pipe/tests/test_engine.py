"""The engine against a plain loop on one device: losses, gradients, parameters, buffers, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from vescale_pipe._engine import PipeEngine
from vescale_pipe._plan import PipePlan

SCHEDULES = [
    ("gpipe", 4, None),
    ("1f1b", 4, None),
    ("eager_1f1b", 4, None),
    ("interleaved_1f1b", 2, 2),
    ("looped_bfs", 2, 2),
    ("zb_h1", 4, None),
    ("zb_h2", 4, None),
    ("interleaved_zb", 2, 2),
    ("zb_v", 2, None),
    ("dualpipe_v", 2, None),
]
mse = functional.mse_loss


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Skips(nn.Module):
    """The first value is used twice in each later block; one block's value in the last one only."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Cross() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.blocks[0](x, x)
        second = x = self.blocks[1](x, first)
        x = self.blocks[2](x, first)
        return self.blocks[3](x, first) + second


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(8, 8)
        self.value = nn.Linear(8, 8)
        self.block = Block()

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.block(x + torch.tanh(self.key(other)) * self.value(other))


class Tied(nn.Module):
    """One weight at both ends and in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def floats(rows: int) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    return (torch.randn(rows, 8),), {}, torch.randn(rows, 8)


def tokens(rows: int) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    return (torch.randint(0, 11, (rows, 5)),), {}, torch.randint(0, 11, (rows, 5))


def cross_entropy(out: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(out.flatten(0, -2), target.flatten())


MODELS: dict[str, tuple[type[nn.Module], Callable[[int], Any], Callable[..., Tensor]]] = {
    "chain": (Chain, floats, mse),
    "skips": (Skips, floats, mse),
    "tied": (Tied, tokens, cross_entropy),
}
AT = ["blocks.1", "blocks.2", "blocks.3"]


def pieces(value: Any, rows: int, count: int) -> list[Any]:
    """A value per micro-batch, as `torch.tensor_split` cuts tensors with all rows."""
    if isinstance(value, Tensor) and value.dim() and len(value) == rows:
        return list(value.tensor_split(count))
    return [value] * count


def loop(
    model: nn.Module, batch: Any, count: int, loss_fn: Callable[..., Tensor], weights: list[float] | None = None
) -> Tensor:
    """The reference: one device, one micro-batch after the other."""
    args, kwargs, target = batch
    rows = len(args[0])
    cut_args = [pieces(one, rows, count) for one in args]
    cut_kwargs = {name: pieces(one, rows, count) for name, one in kwargs.items()}
    total = torch.zeros(())
    for m, y in enumerate(target.tensor_split(count)):
        out = model(*(one[m] for one in cut_args), **{name: one[m] for name, one in cut_kwargs.items()})
        loss = loss_fn(out, y) * (weights[m] if weights else len(y) / rows)
        loss.backward()
        total = total + loss.detach()
    return total


def check(engine: PipeEngine, reference: nn.Module) -> None:
    """Parameters, gradients and buffers of an engine are those of the reference."""
    theirs = dict(reference.named_parameters(remove_duplicate=False))
    seen = 0
    for name, mine in engine.named_parameters():
        want = theirs[name]
        assert torch.equal(mine, want), name
        assert (mine.grad is None) == (want.grad is None), name
        if mine.grad is not None and want.grad is not None:
            assert torch.equal(mine.grad, want.grad), name
        seen += 1
    assert seen
    state = reference.state_dict()
    for name, value in engine.state_dict().items():
        assert torch.equal(value, state[name]), name


def train(
    name: str,
    schedule: str,
    ranks: int,
    chunks: int | None,
    count: int,
    rows: list[int],
) -> None:
    """Some steps of the engine beside the reference."""
    kind, batches, loss_fn = MODELS[name]
    torch.manual_seed(0)
    model = kind()
    reference = copy.deepcopy(model)
    plan = PipePlan(schedule=schedule, num_microbatches=count, chunks=chunks, at=AT, timeout=20)
    engine = PipeEngine(model, None, plan, loss_fn, example=batches(rows[0])[:2], act_out=ranks)
    steps = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (engine, reference)]
    for size in rows:
        batch = batches(size)
        loss, _ = engine(*batch[0], target=batch[2], **batch[1])
        want = loop(reference, batch, count, loss_fn)
        assert loss is not None
        assert torch.equal(loss, want)
        assert not loss.requires_grad
        check(engine, reference)
        for one in steps:
            one.step()
            one.zero_grad()
    engine.close()


@pytest.mark.parametrize(("schedule", "ranks", "chunks"), SCHEDULES)
@pytest.mark.parametrize("count", [1, 2, 12])
def test_fewer_micro_batches_than_stages_and_many(schedule: str, ranks: int, chunks: int | None, count: int) -> None:
    train("chain", schedule, ranks, chunks, count, [24])


@pytest.mark.parametrize("name", ["chain", "tied", "skips"])
def test_one_process_without_ranks_runs_the_same_script(name: str) -> None:
    kind, batches, loss_fn = MODELS[name]
    model = kind()
    reference = copy.deepcopy(model)
    engine = PipeEngine(model, None, PipePlan(num_microbatches=3, at=AT), loss_fn)
    for rows in (7, 9):
        batch = batches(rows)
        loss, outputs = engine(*batch[0], target=batch[2])
        assert torch.equal(loss, loop(reference, batch, 3, loss_fn))
        assert len(outputs) == rows
        check(engine, reference)


@pytest.mark.ranks(2, timeout=60)
def test_sequences_change_length_from_step_to_step(rank: int) -> None:
    """Shorter and longer, in training and in evaluation: never stale rows, never a wait without end."""
    torch.manual_seed(0)
    model = Tied()
    reference = copy.deepcopy(model)
    plan = PipePlan(num_microbatches=2, at=["blocks.2"], timeout=20)
    engine = PipeEngine(
        model, dist.group.WORLD, plan, cross_entropy, example=((torch.zeros(2, 6, dtype=torch.int64),), {})
    )
    for length in (6, 3, 9, 6):
        x, y = torch.randint(0, 11, (4, length)), torch.randint(0, 11, (4, length))
        _, outputs = engine.eval_step(x, target=y)
        assert (outputs is None) == (rank == 0)
        if outputs is not None:
            assert torch.equal(outputs, torch.cat([reference(one) for one in x.tensor_split(2)]))
        loss, _ = engine(x, target=y)
        assert torch.equal(loss, loop(reference, ((x,), {}, y), 2, cross_entropy))
        check(engine, reference)
    engine.close()
