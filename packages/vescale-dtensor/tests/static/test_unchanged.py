"""The quick way to a program: taken only where the signature is that of the call before, however that is checked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from vescale_dtensor import Replicate, Shard, distribute_tensor, static
from vescale_dtensor._static import unchanged
from vescale_dtensor._static.region import Region
from vescale_dtensor._static.unchanged import Arguments, Metadata
from vescale_testing import cached_mesh


@pytest.fixture(params=["torch's check", "our own"], autouse=True)
def check(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "our own":
        monkeypatch.setattr(unchanged, "_guards", lambda tensors: None)
    return request.param


def tensors() -> list[Tensor]:
    return [torch.ones(4, 4, requires_grad=True), torch.ones(2, 3), nn.Parameter(torch.ones(5))]


def frozen(one: Tensor) -> Tensor:
    return one.detach()


def transposed(one: Tensor) -> Tensor:
    return one.detach().t().requires_grad_()


def reshaped(one: Tensor) -> Tensor:
    return one.detach().view(2, 8).requires_grad_()


def doubled(one: Tensor) -> Tensor:
    return one.detach().double().requires_grad_()


def retyped(one: Tensor) -> Tensor:
    return nn.Parameter(one.detach())


@pytest.mark.parametrize("change", [frozen, transposed, reshaped, doubled, retyped], ids=lambda f: f.__name__)
def test_what_tensors_are_apart_from_values(change: Callable[[Tensor], Tensor]) -> None:
    first = tensors()
    metadata = Metadata(first)
    assert metadata.same(first)
    assert metadata.same(tensors())
    other = [change(first[0]), *first[1:]]
    assert not metadata.same(other)
    assert not Metadata(other).same(first)


def test_what_is_assigned_to_a_tensor_counts() -> None:
    first = tensors()
    metadata = Metadata(first)
    first[1].data = torch.ones(3, 2)
    assert not metadata.same(first)


def test_torchs_check_is_there(check: str) -> None:
    """Where torch no longer has it, programs run all the same, but somebody should know."""
    assert (unchanged._guards(tensors()) is not None) == (check == "torch's check")


@pytest.mark.ranks(2, pool=True)
def test_layouts_of_equal_local_parts_differ() -> None:
    mesh = cached_mesh(2, names=("tp",))
    rows, columns = (distribute_tensor(torch.ones(4, 4), mesh, [Shard(d)]).clone() for d in (0, 1))
    whole = distribute_tensor(torch.ones(2, 4), mesh, [Replicate()])
    assert rows.to_local().shape == whole.to_local().shape
    assert Metadata([rows]).same([rows + 1])
    assert not Metadata([rows]).same([whole])
    assert not Metadata([rows]).same([columns])
    assert not Metadata([rows]).same([rows.to_local()])


def test_arguments() -> None:
    x, y = torch.ones(2), torch.ones(2)
    arguments = Arguments((x, 3), {"scale": None, "bias": y})

    def found(*args: object, **kwargs: object) -> bool:
        return arguments.tensors_of(args, kwargs) is not None

    assert arguments.tensors_of((y, 3), {"scale": None, "bias": x}) == [y, x]
    assert not found(x, 4, scale=None, bias=y)
    assert not found(x, True, scale=None, bias=y)
    assert not found(x, 3, bias=y, scale=None)
    assert not found(x, 3, scale=None)
    assert not found(x, 3, None, bias=y)
    assert not found(x, 3, scale=None, bias=x)  # one tensor twice
    assert not found(x, y, scale=None, bias=y)
    assert not found(3, 3, scale=None, bias=y)
    assert not found(x, 3, scale=x, bias=y)
    assert Arguments((3,), {}).tensors_of((True,), {}) is None


def test_leaves_are_told_from_what_was_computed() -> None:
    leaf = torch.ones(2, requires_grad=True)
    arguments = Arguments((leaf,), {})
    assert arguments.tensors_of((torch.zeros(2, requires_grad=True),), {}) is not None
    assert arguments.tensors_of((leaf * 2,), {}) is None


def test_what_arguments_cannot_be_compared() -> None:
    x = torch.ones(2)
    assert Arguments.possible((x, 1, None, "mean"), {"dtype": torch.float32})
    assert not Arguments.possible((x, x), {})
    assert not Arguments.possible(([x],), {})
    assert not Arguments.possible((x, 1.5), {})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x) * self.scale
        return y if self.training else -y


def swap(net: Net) -> None:
    net.inner[0], net.inner[1] = net.inner[1], net.inner[0]


def replace(net: Net) -> None:
    net.inner[0].weight = nn.Parameter(torch.full((4, 4), 0.5))


def transpose(net: Net) -> None:
    net.inner[0].weight.data = net.inner[0].weight.data.t()


def freeze(net: Net) -> None:
    net.inner[1].weight.requires_grad_(not net.inner[1].weight.requires_grad)


def rescale(net: Net) -> None:
    net.scale += 1


def turn(net: Net) -> None:
    net.train(not net.training)


def reorder(net: Net) -> None:
    net.inner._modules["0"] = net.inner._modules.pop("0")


CHANGES = [swap, replace, transpose, freeze, rescale, turn, reorder]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_what_changes_between_calls_and_back(change: Callable[[Net], None]) -> None:
    torch.manual_seed(0)
    net, twin = Net(), Net()
    twin.load_state_dict(net.state_dict())
    static(net)
    x = torch.randn(3, 4)
    for number in range(14):
        if number % 4 == 3:
            change(net)
            change(twin)
        wanted, found = twin(x), net(x)
        assert torch.equal(wanted, found)
        assert wanted.requires_grad == found.requires_grad
        for module in (net, twin):
            module.zero_grad()
        wanted.sum().backward()
        found.sum().backward()
        for a, b in zip(twin.parameters(), net.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            assert a.grad is None or torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")])
def test_modes_between_calls(mode: Callable[[], torch.no_grad]) -> None:
    net = static(Net())
    x = torch.randn(3, 4)
    for _ in range(4):
        plain = net(x)
        with mode():
            inside = net(x)
        assert plain.requires_grad
        assert plain.dtype == torch.float32
        assert inside.requires_grad == (mode not in (torch.no_grad, torch.inference_mode))
        assert (inside.dtype == torch.bfloat16) == inside.requires_grad


def test_the_quick_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    net = static(Net())
    assert isinstance(net.forward, Region)
    x = torch.randn(3, 4)
    for _ in range(4):
        net(x)

    def slow(*_: object) -> None:
        raise AssertionError("the signature was made anew")

    monkeypatch.setattr(net.forward._held, "state", slow)
    net(torch.randn(3, 4))
    with pytest.raises(AssertionError, match="anew"):
        net(torch.randn(2, 4))
