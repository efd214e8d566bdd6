"""Which modules become regions: granularity, and `static_eager`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from vescale_dtensor import Replicate, Shard, distribute_tensor, parallelize_module, static, static_eager
from vescale_testing import cached_mesh

RANKS = pytest.mark.ranks(4, pool=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Python decides by a value between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            if x.abs().sum().item() < 0:
                break
        return x


def nets() -> tuple[Net, Net]:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    torch.manual_seed(0)
    net = Net()
    plan = {
        "parameter": {r"blocks\.\d\.up\..*": {"tp": Shard(0)}, r"blocks\.\d\.down\.weight": {"tp": Shard(1)}},
        "forward": {"input": {"dp": Shard(0)}},
    }
    one, two = (parallelize_module(copy.deepcopy(net), mesh, plan) for _ in range(2))
    return one, two  # type: ignore[return-value]


def train(net: nn.Module, steps: int = 4) -> list[Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        net(torch.full((4, 8), step + 1.0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.to_local() for p in net.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def in_blocks(name: str, module: nn.Module) -> bool:
    return "blocks." in name


@RANKS
@pytest.mark.parametrize("granularity", ["layers", Block, (Block, nn.Linear), in_blocks])
def test_regions_smaller_than_the_module(granularity: object) -> None:
    one, two = nets()
    static(two, granularity=granularity)  # type: ignore[call-overload]
    same(train(one), train(two))
    code = two.static_code()
    assert "# blocks.1\n# Block, signature 0\ndef program(" in code
    assert code.count("def program(") == (3 if isinstance(granularity, tuple) else 2)
    twin = copy.deepcopy(two)
    same(train(twin, 1), train(two, 1))


@RANKS
def test_static_eager_is_for_the_outermost_modules_in_the_block() -> None:
    one, two = nets()
    blocks = [two.blocks[0], nn.Linear(3, 3)]
    with static_eager() as eager:
        for _ in range(4):
            x = distribute_tensor(torch.ones(4, 8), one.first.weight.device_mesh, [Shard(0), Replicate()])
            assert torch.equal(one.blocks[0](x).to_local(), blocks[0](x).to_local())
            blocks[1](torch.ones(3))
        assert "def program(" in blocks[0].static_code()
        assert not hasattr(blocks[1], "static_code")  # it has no DTensors
        with pytest.raises(RuntimeError, match="entered already"):
            eager.__enter__()
    assert not hasattr(blocks[0], "static_code")
    assert "forward" not in blocks[0].__dict__
    with static_eager(granularity="layers"):
        same(train(one), train(two))
        assert "def program(" in two.blocks[1].static_code()
    same(train(one), train(two))
    assert "forward" not in two.blocks[1].__dict__


def test_wrong_arguments() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="granularity: no submodule of Linear fits 'layers'"):
        static(nn.Linear(2, 2), granularity="layers")
    with pytest.raises(ValueError, match='granularity: expected "module", "layers", classes'):
        static(net, granularity="blocks")
    with pytest.raises(ValueError, match="is for modules; a function is recorded as a whole"):
        static(lambda x: x, granularity="layers")
    with pytest.raises(ValueError, match="passes: expected some of"):
        static_eager(passes=["none"])
