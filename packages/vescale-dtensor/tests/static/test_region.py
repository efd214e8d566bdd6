"""`static` against the dynamic path, bit for bit; and everything that must keep a call from being repeated blindly."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vescale_dtensor import DTensor, Replicate, Shard, distribute_tensor, parallelize_module, static
from vescale_dtensor.errors import DTensorError, StaticWarning
from vescale_testing import cached_mesh

RANKS = pytest.mark.ranks(4, pool=True)
PLAN = {
    "parameter": {
        r".*up\.(weight|bias)": {"tp": Shard(0)},
        r".*down\.weight": {"tp": Shard(1)},
        "embed.weight": {"tp": Shard(0)},
    },
    "forward": {"input": {"dp": Shard(0)}},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = (
            nn.LayerNorm(8),
            nn.Linear(8, 12),
            nn.Linear(12, 8),
            nn.Dropout(0.25),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Token numbers to a loss, through everything that a program must repeat: moves, draws, views, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor, scale: float = 1.0) -> dict[str, Any]:
        self.calls.add_(1)
        x = self.embed(tokens) + torch.arange(tokens.size(1)).view(1, -1, 1) * 0.1
        for block in self.blocks:
            x = block(x)
        logits = x @ self.embed.weight.t()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) * scale
        return {"loss": loss, "parts": (logits, [x.detach()]), "scale": scale}


def nets() -> tuple[nn.Module, nn.Module]:
    """A dynamic net and a static one, alike."""
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    torch.manual_seed(0)
    net = Net()
    one, two = (parallelize_module(copy.deepcopy(net), mesh, PLAN) for _ in range(2))
    return one, static(two)


def tokens(number: int, batch: int = 4) -> Tensor:
    return torch.randint(0, 11, (batch, 5), generator=torch.Generator().manual_seed(number))


def recorded(net: nn.Module) -> int:
    return net.static_code().count("def program")


def assert_same(one: nn.Module, two: nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local()), name
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            assert torch.equal(a.grad.to_local(), b.grad.to_local()), name
            assert a.grad.placements == b.grad.placements


def same_output(a: Any, b: Any) -> None:
    assert torch.equal(a["loss"].to_local(), b["loss"].to_local())
    for x, y in zip((a["parts"][0], *a["parts"][1]), (b["parts"][0], *b["parts"][1]), strict=True):
        assert isinstance(y, DTensor)
        assert x._spec is y._spec
        assert torch.equal(x.to_local(), y.to_local())
    assert a["scale"] == b["scale"]


@RANKS
def test_training_is_that_of_the_dynamic_path() -> None:
    one, two = nets()
    trained = []
    for net in (one, two):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        torch.manual_seed(5)
        outputs = []
        for step in range(6):
            for part in range(2):  # gradients add up
                out = net(tokens(2 * step + part))
                out["loss"].backward()
                outputs.append(out)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        trained.append(outputs)
        trained.append(torch.rand(1).item())  # the generator stands where it would
    for a, b in zip(trained[0], trained[2], strict=True):
        same_output(a, b)
    assert trained[1] == trained[3]
    assert_same(one, two)
    assert recorded(two) == 1
    assert int(one.calls) == int(two.calls) == 12


@RANKS
def test_what_changes_between_calls_is_seen() -> None:
    one, two = nets()

    def both(change: Callable[[nn.Module], object], calls: int = 3, batch: int = 4, scale: float = 1.0) -> None:
        for net in (one, two):
            change(net)
        for call in range(calls):
            out = []
            for net in (one, two):
                torch.manual_seed(call)
                out.append(net(tokens(call, batch), scale))
                if out[-1]["loss"].requires_grad:
                    out[-1]["loss"].backward()
            same_output(*out)
        assert_same(one, two)

    def swap(net: nn.Module) -> None:
        old = net.blocks[0].down.weight
        net.blocks[0].down.weight = nn.Parameter(old.detach() * 2)

    both(lambda net: None)
    both(lambda net: None, batch=6)
    both(lambda net: None, scale=0.5)
    both(lambda net: net.eval())
    both(lambda net: net.blocks[0].train())
    both(lambda net: net.train().requires_grad_(False).blocks[1].requires_grad_(True))
    both(
        lambda net: net.requires_grad_(True).load_state_dict(
            {k: v * 0.5 if v.is_floating_point() else v for k, v in net.state_dict().items()}
        )
    )
    both(swap)
    both(lambda net: net.zero_grad())
    with torch.no_grad():
        both(lambda net: None)
    both(lambda net: net.double())
    assert recorded(two) == 8
    both(
        lambda net: net.blocks.append(
            parallelize_module(_seeded(Block).double(), cached_mesh(2, 2, names=("dp", "tp")), {})
        )
    )
    assert recorded(two) == 1


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return make()


@RANKS
def test_checkpoints_around_and_inside() -> None:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    torch.manual_seed(0)
    blocks = [parallelize_module(Block(), mesh, {"parameter": {"up.weight": {"tp": Shard(0)}}}) for _ in range(2)]
    blocks[1].load_state_dict(blocks[0].state_dict())
    static(blocks[1])
    for reentrant in (False, True):
        for step in range(4):
            gradients = []
            for block in blocks:
                torch.manual_seed(step)
                x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0), Replicate()]).requires_grad_()
                checkpoint(block, x, use_reentrant=reentrant).sum().backward()
                gradients.append([x.grad, *(p.grad for p in block.parameters())])
            assert all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(*gradients, strict=True))
    assert "def program" in blocks[1].static_code()

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=False)

    inside = static(parallelize_module(Inside(), mesh, {}))
    with pytest.warns(StaticWarning, match="saved tensors have hooks inside"):
        inside(torch.ones(2, 8)).sum().backward()


def refused(function: Callable[..., Any], *args: Any, modules: Any = (), calls: int = 3) -> str:
    """Call something static a few times, compare with calling it dynamically, and return why it stays dynamic."""
    fixed = static(function, modules=modules)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(calls):
            torch.manual_seed(3)
            expected = function(*args)
            torch.manual_seed(3)
            found = fixed(*args)
            assert torch.equal(found.full_tensor(), expected.full_tensor())
    told = [str(w.message) for w in caught if issubclass(w.category, StaticWarning)]
    assert len(told) == 1, told
    assert "def program" not in fixed.static_code()
    assert "dynamic" in fixed.static_code()
    return told[0]


SEEN: list[Any] = []


def goes_back(x: Tensor) -> Tensor:
    y = x.detach().requires_grad_()
    (y * y).sum().backward()
    return y.grad


def differentiates(x: Tensor) -> Tensor:
    y = x.detach().requires_grad_()
    return torch.autograd.grad((y * y).sum(), [y])[0]


@RANKS
def test_what_cannot_be_repeated_blindly_stays_dynamic() -> None:
    mesh = cached_mesh(4, names=("tp",))
    x = distribute_tensor(torch.arange(8.0) - 2, mesh, [Shard(0)])
    whole = torch.full((8,), 2.0)
    elsewhere = distribute_tensor(whole, mesh, [Shard(0)])
    count = iter(range(99))

    def branches(x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x

    line = branches.__code__.co_firstlineno + 1
    assert f"test_region.py:{line}" in refused(branches, x)
    assert "item hands a value" in refused(lambda x: x * x.max().item(), x)
    assert "tolist hands" in refused(lambda x: x * torch.ones(3).tolist()[0], x)
    assert "boolean index" in refused(lambda x: x * torch.arange(4)[torch.arange(4) > 1].size(0), x)
    assert "nonzero" in refused(lambda x: x * torch.nonzero(torch.arange(3)).size(0), x)
    assert "no input, parameter, buffer" in refused(lambda x: x + elsewhere, x)
    assert "two calls did different things: 't0 = mul(x0, 0)" in refused(lambda x: x * (next(count) // 2), x)
    assert "it has an argument of type object" in refused(lambda x, y: x + 1, x, object(), calls=1)
    assert "grad runs autograd" in refused(differentiates, x)
    assert "backward runs autograd" in refused(goes_back, x)

    class Saves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.last = x * 2
            return self.last

    module = Saves()
    assert "Saves.last is assigned to" in refused(lambda x: module(x), x, modules=[module])
    hooked = nn.Sequential(nn.ReLU())
    hooked[0].register_forward_hook(lambda *_: SEEN.append(1))
    assert "ReLU inside has hooks" in refused(lambda x: hooked(x), x)
    assert len(SEEN) == 6
    assert refused(lambda x: Double.apply(x), x).startswith("static: <lambda> runs dynamically: Double.apply")


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@RANKS
def test_functions_with_their_modules_gradients_and_code() -> None:
    mesh = cached_mesh(4, names=("tp",))
    torch.manual_seed(0)
    layer = parallelize_module(nn.Linear(8, 8), mesh, {"parameter": {"weight": [Shard(0)], "bias": [Shard(0)]}})

    def loss(x: Tensor, y: Tensor, *, power: int = 2) -> tuple[Tensor, float]:
        with torch.no_grad():
            y = y * 3
        return (layer(x) - y).pow(power).mean(), 0.5

    fixed = static(loss)
    for step in range(4):
        results = []
        for function in (loss, fixed):
            x = distribute_tensor(torch.full((3, 8), step + 1.0), mesh, [Replicate()]).requires_grad_()
            y = distribute_tensor(torch.ones(3, 8), mesh, [Shard(1)])
            value, half = function(x, y, power=2)
            value.backward()
            results.append((value.to_local(), x.grad.to_local(), layer.weight.grad.to_local()))
            layer.zero_grad()
            assert half == 0.5
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    code = fixed.static_code()
    assert "switch_gradients(False)" in code
    assert re.search(r"t\d+ = linear\(", code)
    assert torch.is_grad_enabled()
    assert loss.__name__ == fixed.__name__


@RANKS
def test_results_that_are_inputs_and_no_results() -> None:
    mesh = cached_mesh(4, names=("tp",))
    x = distribute_tensor(torch.ones(8), mesh, [Shard(0)])
    same = static(lambda x: (x, x + 1, x.contiguous()))
    for _ in range(3):
        a, b, c = same(x)
    assert a is x
    assert c.to_local().data_ptr() == x.to_local().data_ptr()
    assert b.full_tensor().tolist() == [2.0] * 8
    filled = torch.zeros(4)
    fill = static(lambda out: out.add_(1))
    for _ in range(4):
        assert fill(filled) is filled
    assert filled.tolist() == [4.0] * 4


def test_copies_limits_and_wrong_arguments() -> None:
    module = static(nn.Linear(3, 3))
    x = torch.ones(2, 3)
    for _ in range(3):
        module(x)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.weight.zero_()
        twin.bias.zero_()
    for _ in range(3):
        assert twin(x).abs().sum() == 0
        assert module(x).abs().sum() > 0
    with pytest.raises(TypeError, match="Linear is static already"):
        static(module)
    with pytest.raises(TypeError, match="expected a module or a function, got int"):
        static(3)
    with pytest.raises(DTensorError, match="cannot be pickled"):
        copy.copy(module).forward.__reduce__()
    twice = static(lambda x: x * 2, limit=2)
    for size in (1, 2):
        for _ in range(3):
            twice(torch.ones(size))
    with pytest.warns(StaticWarning, match="called with 2 kinds of arguments"):
        assert twice(torch.ones(3)).tolist() == [2.0] * 3
