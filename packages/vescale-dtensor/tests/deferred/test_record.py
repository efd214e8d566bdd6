"""Constructions that are written down: what they give when they are made whole, and what is refused before."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from vescale_dtensor import Shard, _random, parallelize_module, random_mode
from vescale_dtensor._deferred import deferred_init, fingerprint, is_deferred, materialize, reads
from vescale_dtensor._deferred.tape import memory_of, needed
from vescale_dtensor.errors import UnsupportedOperationError
from vescale_testing import fake_ranks

STREAM = pytest.mark.parametrize("mode", ["whole", "shard"])


class Everything(nn.Module):
    """Constructions of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16, padding_idx=3)
        self.linear = nn.Linear(16, 20)
        self.conv = nn.Conv2d(3, 8, 3)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)
        self.product = nn.Parameter(torch.randn(16, 16) * 0.02)
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(30, 40), std=0.02))
        self.narrow = nn.Parameter(nn.init.trunc_normal_(torch.empty(30, 40), std=0.02, a=-0.01, b=0.02))
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(30, 40)))
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(30, 8), 0.1))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(5, 6))
        self.dropped = nn.Parameter(nn.functional.dropout(torch.ones(40), 0.5))
        self.order = nn.Parameter(torch.randperm(9).float())
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, 16, 2).float() / 16)))
        self.register_buffer("mask", torch.tril(torch.ones(12, 12)).view(1, 1, 12, 12).bool())
        self.rates = [x.item() for x in torch.linspace(0, 0.3, 4)]
        self.steps = torch.linspace(0, 1, 5).tolist()
        self.held = {"positions": torch.arange(5)}
        self.turns = torch.polar(torch.ones(4, 3), torch.outer(torch.arange(4).float(), torch.rand(3)))
        self.tied = nn.Linear(16, 50, bias=False)
        self.tied.weight = self.embedding.weight
        with torch.no_grad():
            self.linear.weight[2:5].mul_(2)
            self.linear.weight[torch.tensor([7, 8])] = 0.25
            self.linear.bias.data.fill_(0.5)
            self.product.data[:, 1].normal_()
            self.product[3] = self.product[4] + torch.tensor([1.0] * 16)
            self.conv.bias.data = torch.zeros(8)
        self.own = nn.Parameter(torch.empty(6).normal_(generator=torch.Generator().manual_seed(5)))
        self.lstm = nn.LSTM(4, 5)


def build(deferred: bool) -> tuple[Everything, Tensor]:
    """The module, and numbers that are drawn after its construction."""
    torch.manual_seed(7)
    if not deferred:
        return Everything(), torch.rand(3)
    with deferred_init():
        model = Everything()
    return model, torch.rand(3)


@STREAM
def test_the_whole_has_the_bits_of_an_ordinary_construction(mode: Any) -> None:
    if mode == "shard" and _random.provider() is None:
        pytest.skip("without a random plugin the numbers are others")
    expected, later = build(deferred=False)
    with random_mode(mode):
        model, later_too = build(deferred=True)
        assert all(is_deferred(p) for p in model.parameters())
        assert repr(model.linear.bias) == "DeferredTensor(shape=[20], dtype=torch.float32, parameter)"
        before = torch.get_rng_state()
        assert materialize(model) is model
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(later_too, later)
    states = expected.state_dict(), model.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
        assert value.stride() == states[1][name].stride(), name
    assert model.rates == expected.rates
    assert model.steps == expected.steps
    assert torch.equal(model.held["positions"], expected.held["positions"])
    assert torch.equal(model.turns, expected.turns)
    assert model.tied.weight is model.embedding.weight
    assert all(type(p) is nn.Parameter and p.requires_grad for p in model.parameters())


def test_later_writes_make_earlier_draws_needless() -> None:
    with deferred_init():
        linear = nn.Linear(4, 4)
        nn.init.normal_(linear.weight)
        nn.init.zeros_(linear.weight)
    memory = memory_of(linear.weight)
    assert memory is not None
    assert [n.name for n in needed(memory)] == ["empty_strided", "zero_"]
    assert memory.writes == needed(memory)
    assert torch.equal(materialize(linear.weight), torch.zeros(4, 4))


def test_reads_see_what_was_there_at_their_time() -> None:
    with deferred_init():
        x = torch.arange(4.0)
        y = x + 1
        x.mul_(3)
        z = x + y
        x.zero_()
    assert materialize(y).tolist() == [1, 2, 3, 4]
    assert materialize(z).tolist() == [1, 5, 9, 13]
    assert materialize(x).tolist() == [0, 0, 0, 0]


def test_a_constant_is_what_it_was() -> None:
    constant = torch.tensor([1.0, 2.0])
    with deferred_init():
        x = torch.zeros(2) + constant
    constant.fill_(9)
    assert materialize(x).tolist() == [1, 2]


def test_code_sees_the_device_that_it_asked_for() -> None:
    with deferred_init():
        x = torch.empty(3)
        assert (x.device.type, x.is_meta) == ("cpu", False)
        assert torch.zeros(2, device=x.device).device.type == "cpu"
        meta = torch.empty(3, device="meta")
    assert not is_deferred(meta)
    assert x.is_meta


def test_nothing_is_changed_outside() -> None:
    with deferred_init(), deferred_init():
        pass
    assert not is_deferred(torch.ones(2) + 1)
    model = nn.Linear(2, 2)
    assert materialize(model) is model
    with pytest.raises(TypeError, match="target must be a module or a tensor, got int"):
        materialize(3)  # type: ignore[type-var]


USES: dict[str, Callable[[nn.Linear], Any]] = {
    "forward": lambda m: m(torch.ones(4)),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "state_dict": lambda m: m.state_dict(),
    "to": lambda m: m.to(torch.float64),
    "add": lambda m: m.weight + 1,
    "list": lambda m: torch.cat([m.weight]),
    "item": lambda m: m.bias[0].item(),
    "write": lambda m: nn.init.zeros_(m.weight),
    "data": lambda m: m.weight.data,
    "numpy": lambda m: m.weight.detach().numpy(),
    "optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=1.0).zero_grad() or m.weight.sum().backward(),
}


@pytest.mark.parametrize("use", USES)
def test_use_before_there_are_values(use: str) -> None:
    with deferred_init():
        model = nn.Linear(4, 4)
    with pytest.raises(
        UnsupportedOperationError, match="was made inside deferred_init and has no values yet; call par"
    ):
        USES[use](model)


def test_reading_draws_without_one_stream_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_random.state, "provider", None)
    monkeypatch.setattr(_random.state, "asked", True)
    with deferred_init():
        assert materialize(nn.Linear(3, 3)).weight.shape == (3, 3)
        with pytest.raises(UnsupportedOperationError, match="reads numbers that normal_ drew"):
            nn.init.trunc_normal_(torch.empty(3))


def test_an_error_of_the_model_is_its_own() -> None:
    with deferred_init(), pytest.raises(RuntimeError, match=r"size of tensor a \(3\) must match"):
        torch.zeros(3) + torch.zeros(4)
    with deferred_init(), pytest.raises(UnsupportedOperationError, match="resize_ changes the storage"):
        torch.zeros(3).resize_(5)
    with pytest.raises(ZeroDivisionError), deferred_init():
        _ = 1 / 0
    assert not is_deferred(torch.ones(1))


@pytest.mark.parametrize("bounds", [(-2.0, 2.0), (0.1, 2.0), (-9.0, 9.0)])
def test_large_draws_are_judged_in_blocks(bounds: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    if _random.provider() is None:
        pytest.skip("needs a random plugin")

    def construct() -> Tensor:
        torch.manual_seed(11)
        x = torch.empty(70, 20)
        return nn.init.trunc_normal_(x, 0.0, 1.0, *bounds)

    expected, state = construct(), torch.get_rng_state()
    monkeypatch.setattr(reads, "BLOCK", 100)
    monkeypatch.setattr(reads, "whole", lambda ref: pytest.fail("the whole was made"))
    with deferred_init():
        x = construct()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(materialize(x), expected)


class Aliases(nn.Module):
    """Parameters under other names that are no names of parameters, and parameters that share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.__dict__["same"] = self.linear.weight
        self.held = {"both": [self.linear.weight, self.linear.bias]}
        self.rows = nn.Parameter(torch.randn(4, 4))
        self.flat = nn.Parameter(self.rows.detach().view(-1))


def test_what_is_one_thing_stays_one_thing() -> None:
    with deferred_init():
        model = Aliases()
    materialize(model)
    with torch.no_grad():
        model.rows.fill_(3)
    assert model.flat.tolist() == [3.0] * 16
    for deferred in (False, True):
        with deferred_init() if deferred else contextlib.nullcontext():
            distributed = Aliases()
        with fake_ranks(2, rank=0):
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
            plan = {"parameter": {"linear.weight": {"tp": Shard(0)}}}
            for m in (model, parallelize_module(distributed, mesh, plan)):
                assert m.same is m.held["both"][0] is m.linear.weight
                assert m.held["both"][1] is m.linear.bias


def test_running_statistics_of_a_forward_inside() -> None:
    """Batch norm changes them without saying so in its schema."""

    def construct() -> nn.BatchNorm1d:
        torch.manual_seed(2)
        norm = nn.BatchNorm1d(3)
        norm(torch.randn(4, 3))
        return norm

    with random_mode("whole"):
        with deferred_init():
            norm = construct()
        materialize(norm)
    for name, value in construct().state_dict().items():
        assert torch.equal(norm.state_dict()[name], value), name


def test_large_constants_are_what_they_were_and_told_apart() -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.zeros(1 << 21, dtype="float32")
    prints = []
    for number in (1, 2):
        array[5] = number
        with deferred_init():
            x = torch.ones(1 << 21) + torch.from_numpy(array)
        prints.append(fingerprint(x))
    assert prints[0] != prints[1], "ranks with different constants would look the same"
    assert materialize(x)[5] == 3
    array[5] = 7  # behind torch's back: no version counter tells
    with pytest.raises(RuntimeError, match="changed in place afterwards"):
        materialize(x)


def test_an_optimizer_made_too_early_is_told() -> None:
    with deferred_init():
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
    materialize(model)(torch.ones(2)).sum().backward()
    with pytest.raises(UnsupportedOperationError, match="make optimizers afterwards"):
        optimizer.step()


def test_gradients_and_lazy_parameters() -> None:
    with deferred_init():
        linear, lazy = nn.Linear(2, 2), nn.LazyLinear(3)
        linear(torch.ones(2)).sum().backward()
    assert torch.equal(materialize(linear).weight.grad, torch.ones(2, 2))
    assert materialize(lazy)(torch.ones(5)).shape == (3,)


def test_what_would_not_follow_is_refused() -> None:
    with deferred_init():
        hooked, normed = nn.Linear(2, 2), nn.Linear(2, 2)
        hooked.weight.register_hook(lambda grad: grad * 2)
        normed.__dict__["scaled"] = normed.weight * 2
    with pytest.raises(ValueError, match=r"Linear\.weight has gradient hooks"):
        materialize(hooked)
    with pytest.raises(ValueError, match=r"Linear\.scaled is a result that autograd recorded"):
        materialize(normed)
