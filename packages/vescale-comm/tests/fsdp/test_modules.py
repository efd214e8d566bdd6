"""Modules that treat their parameters or results in ways of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_comm._fsdp import full_parameters, fully_shard
from vescale_comm._fsdp.shard import engine_of
from vescale_comm.emulator import emulate
from vescale_comm.errors import StaleParameterError


@dataclasses.dataclass
class Result:
    value: Tensor
    more: dict[str, Any]


class Holder:
    __slots__ = ("__dict__",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Inner(nn.Module):
    """Returns its result as the caller wishes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.how = how
        self.auxiliary: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        y = self.second(torch.tanh(self.first(x)))
        if self.how == "attribute":
            self.auxiliary = self.first(y).square().mean()
        return {
            "dataclass": lambda: Result(y, {"y": [y * 2]}),
            "object": lambda: Holder(y),
            "nested": lambda: {"a": ([y], None)},
        }.get(self.how, lambda: y)()


class Outer(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Inner(how) for _ in range(2))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        extra = torch.zeros((), dtype=x.dtype)
        for inner in self.inner:
            result = inner(x)
            if self.how == "dataclass":
                x = result.value + result.more["y"][0]
            elif self.how == "object":
                x = result.value
            elif self.how == "nested":
                x = result["a"][0][0]
            elif self.how == "attribute":
                extra = extra + inner.auxiliary  # and the result is not used at all
            else:
                x = torch.relu_(result)
        return x.sum() + extra


class Passed(nn.Module):
    """A unit whose result is its parameter, and one that gets a parameter of the root as an input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.ModuleList([Table(), Table()])
        self.shared = nn.Parameter(torch.randn(4))
        self.inner = nn.ModuleList(Gate() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.table[0]()) @ self.table[1]()
        for inner in self.inner:
            x = inner(x, self.shared)
        return x.square().sum()


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self) -> Tensor:
        return self.weight.t()


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.linear(x) * gate


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(4, 4, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return x.square().sum()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        make = [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm]
        self.layers = nn.ModuleList(wrap(nn.Linear(4, 4)) for wrap in make)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


class Listed(nn.Module):
    """Parameters in lists and dicts, and one that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList(torch.randn(4) for _ in range(3))
        self.named = nn.ParameterDict({"a": torch.randn(4), "b": torch.randn(())})
        self.register_parameter("none", None)

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.many:
            x = x * parameter
        return (x * self.named["a"] + self.named["b"]).square().sum()


CASES: dict[str, Callable[[], nn.Module]] = {
    **{how: lambda how=how: Outer(how) for how in ("plain", "dataclass", "object", "nested", "attribute")},
    "passed": Passed,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "attention": Attention,
    "norms": Normed,
    "lists": Listed,
}


@pytest.mark.parametrize("case", list(CASES))
def test_gradients_are_those_of_one_device(case: str) -> None:
    def on_rank(rank: int) -> None:
        torch.manual_seed(0)
        reference = CASES[case]().double()
        torch.manual_seed(0)
        model = fully_shard(CASES[case]().double())
        inputs = [torch.randn(2, 3, 4, dtype=torch.float64) for _ in range(2)]
        for _ in range(2):
            model.zero_grad()
            model(inputs[rank]).backward()
            reference.zero_grad()
            buffers = [buffer.clone() for buffer in reference.buffers()]
            for x in inputs:
                for buffer, before in zip(reference.buffers(), buffers, strict=True):
                    buffer.data = before.clone()  # each rank has its own
                (reference(x) / 2).backward()
            for (name, parameter), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
                if whole.grad is None:
                    assert parameter.grad is None, name
                    continue
                info = parameter.vescale
                own = whole.grad.reshape(-1)[info.start : info.stop]
                torch.testing.assert_close(parameter.grad, own, rtol=0, atol=1e-12, msg=name)
        with torch.no_grad():
            model.eval(), reference.eval()
            torch.testing.assert_close(model(inputs[rank]), reference(inputs[rank]), rtol=0, atol=1e-12)
        units = engine_of(model).units
        assert all(not flat.whole.untyped_storage().nbytes() for unit in units for flat in unit.flats)

    emulate(on_rank, 2, "canonical")


def test_an_embedding_that_changes_its_weights_is_refused() -> None:
    def on_rank(rank: int) -> None:
        for units in ([], ["0"]):
            model = fully_shard(nn.Sequential(nn.Embedding(5, 4, max_norm=0.1), nn.Linear(4, 4)), units=units)
            with pytest.raises(StaleParameterError, match=r"0\.weight: the gathered parameter was written to"):
                model(torch.tensor([1, 2]))

    emulate(on_rank, 2, "canonical")


def test_hooks_on_parameters_that_are_passed_in_do_not_pile_up() -> None:
    def on_rank(rank: int) -> None:
        model = fully_shard(Passed())
        for _ in range(3):
            model(torch.ones(2, 3, 4)).backward()
        full = next(f for unit in engine_of(model).units for f in unit.flats[0].full if f.shape == (4,))
        assert not full._backward_hooks

    emulate(on_rank, 1, "canonical")


def test_a_root_that_returns_its_parameter() -> None:
    def on_rank(rank: int) -> None:
        model = fully_shard(Table())
        assert model().shape == (4, 4)
        with torch.no_grad(), pytest.raises(StaleParameterError, match="the root: forward returns a parameter"):
            model()

    emulate(on_rank, 2, "canonical")


def test_objects_and_attributes_stay() -> None:
    def on_rank(rank: int) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].weight.note = "mine"  # type: ignore[attr-defined]
        before = list(model.parameters())
        seen: list[tuple[int, ...]] = []
        model[0].register_forward_pre_hook(lambda module, args: seen.append(tuple(module.weight.shape)))
        fully_shard(model)
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        assert model[0].weight.note == "mine"
        model(torch.ones(1, 4))
        assert seen == [(4, 4)]
        assert model[0].weight is before[0]
        with full_parameters(model):
            assert [tuple(parameter.shape) for parameter in model.parameters()] == [(4, 4), (4,)] * 2

    emulate(on_rank, 2, "canonical")
