"""Deferred modules on a mesh: each rank's part, against the same construction on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_dtensor import (
    DTensor,
    Replicate,
    Shard,
    _random,
    distribute_tensor,
    parallelize_module,
    random_mode,
    zeros,
)
from vescale_dtensor._deferred import deferred_init, deferred_local, is_deferred
from vescale_dtensor._irregular import ragged
from vescale_dtensor._mesh import mesh_info
from vescale_dtensor.errors import UnsupportedOperationError
from vescale_dtensor.placements import I, InterleavedShard
from vescale_testing import cached_mesh
from vescale_testing.oracle import placements

RANKS = pytest.mark.ranks(4, pool=True)
MODE: Any = "shard" if _random.provider() is not None else "whole"


def sizes_of_allocations(make: Callable[[], Any]) -> tuple[Any, int]:
    """The result, and the most bytes that lay in new tensors at one time."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.weak import WeakIdKeyDictionary

    class Counter(TorchDispatchMode):
        most = 0

        def __init__(self) -> None:
            super().__init__()
            self.seen: Any = WeakIdKeyDictionary()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for r in result if isinstance(result, list | tuple) else [result]:
                if isinstance(r, Tensor) and not r.is_meta:
                    self.seen[r.untyped_storage()] = r.untyped_storage().nbytes()
            self.most = max(self.most, sum(self.seen.values()))
            return result

    with Counter() as counter:
        result = make()
    return result, counter.most


MAKES: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: nn.init.normal_(torch.empty(8, 6), 1.0, 0.5),
    "uneven": lambda: nn.init.kaiming_uniform_(torch.empty(5, 7)),
    "short": lambda: nn.init.normal_(torch.empty(2, 3)),
    "single": lambda: nn.init.trunc_normal_(torch.empty(1, 1, 6)),
    "factory": lambda: torch.randn(8, 6) * 0.02 + torch.ones(6),
    "rand": lambda: (torch.rand(9, 4) - 0.5).mul_(2),
    "randint": lambda: torch.randint(3, 90, (7, 5)).float(),
    "truncated": lambda: nn.init.trunc_normal_(torch.empty(9, 8), std=0.3),
    "tail": lambda: nn.init.trunc_normal_(torch.empty(9, 8), std=0.3, a=0.1),
    "orthogonal": lambda: nn.init.orthogonal_(torch.empty(6, 8)),
    "eye": lambda: nn.init.eye_(torch.empty(6, 8)),
    "dirac": lambda: nn.init.dirac_(torch.empty(6, 8, 3)),
    "padding": lambda: nn.Embedding(10, 6, padding_idx=7).weight.detach(),
    "columns": lambda: _written(lambda x: x[:, 2:5].mul_(3)),
    "row": lambda: _written(lambda x: x.t()[4].copy_(torch.arange(7.0))),
    "drawn row": lambda: _written(lambda x: x[3].normal_()),
    "transposed": lambda: torch.randn(6, 8).t(),
    "expanded": lambda: torch.randn(8, 1).expand(8, 6).clone(),
    "steps": lambda: torch.arange(48.0).view(8, 6),
    "half": lambda: torch.randn(8, 6).to(torch.bfloat16),
    "channels": lambda: torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
    "filled": lambda: torch.full((8, 6), 2.5),
    "mask": lambda: torch.tril(torch.ones(8, 8)).bool(),
    "whole dropout": lambda: nn.functional.dropout(torch.ones(8, 6), 0.5),
}


def _written(write: Callable[[Tensor], Any]) -> Tensor:
    x = torch.randn(7, 6)
    write(x)
    return x


@RANKS
@pytest.mark.parametrize("codes", ["S0 I", "S1 S0", "S0 S0", "I R", "G1/1.2 S1", "I G2/0.1"])
def test_parts_have_the_bits_of_one_device(codes: str) -> None:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    with random_mode(MODE):
        for name, make in MAKES.items():
            torch.manual_seed(3)
            expected, later = make(), torch.rand(2)
            torch.manual_seed(3)
            with deferred_init():
                x = make()
            assert torch.equal(torch.rand(2), later), name
            d = distribute_tensor(x, mesh, placements(codes))
            assert torch.equal(d.to_local(), distribute_tensor(expected, mesh, placements(codes)).to_local()), name
            assert (d.dtype, d.shape) == (expected.dtype, expected.shape), name
            assert d.to_local().untyped_storage().nbytes() == d.to_local().nbytes, name


@RANKS
def test_what_is_made_by_parts() -> None:
    """All but these, whose elements depend on others, or lie in another order: they are made whole, and cut."""
    info = mesh_info(cached_mesh(2, 2, names=("dp", "tp")))
    not_by_parts = set()
    with random_mode(MODE):
        for name, make in MAKES.items():
            with deferred_init():
                x = make()
            if deferred_local(x, info, (0, -2)) is None:
                not_by_parts.add(name)
            if x.ndim == 2:
                cut = ragged(2, (1, 2)), I
                assert (deferred_local(x, info, cut) is None) == (name in not_by_parts | {"padding", "columns", "row"})
    assert not_by_parts == {"transposed", "channels", "drawn row", "steps", "eye"}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.scale = nn.Parameter(torch.ones(width) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(4 * width, width, padding_idx=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 4 * width, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.arange(12.0).view(1, 12, 1) / 100, persistent=False)
        self.mask = torch.ones(12).cumsum(0).sqrt()
        self.apply(self.initialize)

    def initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.mask[: tokens.shape[1], None])


PLAN = {
    "parameter": {
        "embed.weight": {"tp": Shard(0)},
        r"blocks\.\d+\.up\.(weight|bias)": {"tp": Shard(0)},
        r"blocks\.\d+\.down\.weight": {"tp": Shard(1)},
    },
    "forward": {"input": {"dp": Shard(0)}, "output": {"tp": Replicate()}},
}


def gathered(module: nn.Module) -> dict[str, Tensor]:
    return {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in module.state_dict().items()}


@RANKS
def test_a_module_trains_as_on_one_device() -> None:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    with random_mode(MODE):
        torch.manual_seed(1)
        expected = Model(8, 2)
        torch.manual_seed(1)
        with deferred_init():
            model = Model(8, 2)
        parallelize_module(model, mesh, PLAN)
    assert not any(is_deferred(t) for t in (*model.parameters(), *model.buffers(), model.mask))
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.to_local().shape == (16, 8)
    assert not model.mask.is_meta
    for name, value in gathered(model).items():
        assert torch.equal(value, expected.state_dict()[name]), name
    tokens = torch.randint(0, 32, (4, 12), generator=torch.Generator().manual_seed(0))
    for m in (expected, model):
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
        for _ in range(2):
            m(tokens).logsumexp(-1).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in gathered(model).items():
        torch.testing.assert_close(value, expected.state_dict()[name], rtol=1e-4, atol=1e-5)


@RANKS
@pytest.mark.parametrize("code", ["S0", "G1/1.1.1.1"])
def test_ranks_hold_little_more_than_their_shards(code: str) -> None:
    mesh = cached_mesh(4)
    plan = {"parameter": {".*(weight|bias|scale)": placements(code)}}

    def make() -> nn.Module:
        with deferred_init():
            model = Model(192, 4)
        return parallelize_module(model, mesh, plan)

    torch.manual_seed(0)
    with random_mode("shard"):  # also without a plugin: the memory is the same
        model, most = sizes_of_allocations(make)
    own = sum(p.to_local().nbytes for p in model.parameters())  # type: ignore[attr-defined]
    assert 4 * own == sum(p.nbytes for p in model.parameters())
    assert most <= 1.2 * own, (most, own)


@RANKS
def test_a_placement_that_no_block_fits() -> None:
    mesh = cached_mesh(4)
    with random_mode(MODE):
        torch.manual_seed(0)
        expected = torch.randn(24, 4)
        torch.manual_seed(0)
        with deferred_init():
            x = torch.randn(24, 4)
        d = distribute_tensor(x, mesh, [InterleavedShard(0, 3)])
    assert torch.equal(d.full_tensor(), expected)


@RANKS
def test_ranks_that_construct_different_modules(rank: int) -> None:
    mesh = cached_mesh(4)
    torch.manual_seed(rank == 2)
    with deferred_init():
        model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"2 of 2 parameters and buffers differ .* first 'weight'"):
        parallelize_module(model, mesh, {})
    with random_mode("whole"):
        parallelize_module(model, mesh, {}, src_data_rank=1)
    torch.manual_seed(0)
    weight: Any = model.weight
    assert torch.equal(weight.to_local(), nn.Linear(4, 4).weight)


@RANKS
def test_dtensors_inside_the_block() -> None:
    mesh = cached_mesh(4)
    d = distribute_tensor(torch.ones(4), mesh)
    with deferred_init():
        for use in (
            lambda: distribute_tensor(torch.ones(4), mesh),
            lambda: parallelize_module(nn.Linear(2, 2), mesh, {}),
            lambda: zeros(4, device_mesh=mesh),
            lambda: d + 1,
        ):
            with pytest.raises(UnsupportedOperationError, match="inside deferred_init"):
                use()
    assert torch.equal((d + 1).to_local(), torch.full((4,), 2.0))
