"""State dicts speak of whole parameters, whatever the number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_comm._fsdp import full_parameters, fully_shard, load_optimizer_state, optimizer_state
from vescale_comm._plan import Whole
from vescale_comm._shards import ShardTensor
from vescale_comm.emulator import emulate
from vescale_comm.errors import MismatchError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), nn.Tanh()) for _ in range(2)
        )
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def make(seed: int = 4) -> Model:
    torch.manual_seed(seed)
    return Model()


def assembled(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the labelled parts of all ranks together; each element must be there once."""
    found: dict[str, Any] = {}
    for name, value in parts[0].items():
        if not isinstance(value, ShardTensor):
            found[name] = value
            continue
        whole = torch.full(value.global_shape, torch.nan, dtype=value.dtype)
        for part in parts:
            at = 0
            for box in part[name].boxes:
                place = whole[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))]
                assert place.isnan().all(), "an element is on two ranks"
                place.copy_(part[name].plain()[at : at + box.numel].view(box.shape))
                at += box.numel
        assert not whole.isnan().any(), "an element is on no rank"
        found[name] = whole
    return found


@pytest.mark.parametrize("world", [1, 3])
def test_labelled_shards_make_the_whole(world: int) -> None:
    def on_rank(rank: int) -> dict[str, Any]:
        return fully_shard(make()).state_dict()

    got, want = assembled(emulate(on_rank, world, "canonical")), make().state_dict()
    assert list(got) == list(want)
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def test_state_dicts_of_submodules() -> None:
    def on_rank(rank: int) -> None:
        model = fully_shard(make())
        part = model.blocks[1].state_dict()
        assert part["0.weight"].global_shape == (3, 3)
        model.blocks[0].load_state_dict(part, strict=True)

    emulate(on_rank, 2, "canonical")


def test_only_tied_parameters_are_the_same_memory() -> None:
    def run(rank: int) -> tuple[set[tuple[str, ...]], int]:
        model = fully_shard(make(), granularity=Whole())
        model(torch.arange(4)).sum().backward()
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
        values = {name: value for name, value in model.state_dict().items() if isinstance(value, ShardTensor)}
        for name, state in optimizer_state(optimizer)["state"].items():
            values |= {f"{name} {key}": value for key, value in state.items() if isinstance(value, ShardTensor)}
        places: dict[Any, list[str]] = {}
        for name, value in values.items():
            places.setdefault((value.untyped_storage()._cdata, value.storage_offset()), []).append(name)
        same = {tuple(names) for names in places.values() if len(names) > 1}
        return same, sum(not value.numel() for value in values.values())

    found = emulate(run, 3)
    assert [same for same, _ in found] == [{("embed.weight", "head.weight")}] * 3
    assert max(empty for _, empty in found) > 3  # a rank has nothing of several


def test_loading_whole_tensors_and_own_shards() -> None:
    def on_rank(rank: int) -> None:
        other = make(9)
        model = fully_shard(make(), granularity=3)
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        assert all(type(value) is Tensor for value in kept.values())
        own = model.state_dict()
        model.load_state_dict(other.state_dict())
        with full_parameters(model):
            for (name, got), want in zip(model.named_parameters(), other.parameters(), strict=True):
                assert torch.equal(got, want), name
            inside = model.state_dict()
            assert all(not isinstance(value, ShardTensor) for value in inside.values())
            assert inside["blocks.0.0.weight"].shape == (3, 3)
        # The labelled shards share memory, so what was loaded is in them.
        whole = other.embed.weight.detach().reshape(-1)
        info = model.embed.weight.vescale
        assert torch.equal(own["embed.weight"].plain(), whole[info.start : info.stop])
        model.load_state_dict(own)
        with pytest.raises(RuntimeError, match=r"embed\.weight: it is a shard of other elements"):
            model.load_state_dict({**own, "embed.weight": own["blocks.0.0.weight"]})
        with pytest.raises(RuntimeError, match=r"scale: expected the whole tensor, of shape \(\)"):
            model.load_state_dict({**own, "scale": torch.zeros(5)})

    emulate(on_rank, 2, "canonical")


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for step in range(count):
        optimizer.zero_grad()
        model(torch.arange(4) + step % 3).square().mean().backward()
        optimizer.step()


def test_optimizer_state_goes_to_another_number_of_ranks() -> None:
    def train(rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
        model = fully_shard(make().double())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        steps(model, optimizer, 3)
        return model.state_dict(), optimizer_state(optimizer)

    parts = emulate(train, 3, "canonical")
    weights = assembled([part[0] for part in parts])
    names = list(parts[0][1]["state"])
    states = {name: assembled([part[1]["state"][name] for part in parts]) for name in names}
    groups = parts[0][1]["param_groups"]
    assert groups[0]["params"] == names == [name for name, _ in make().named_parameters()]

    reference = make().double()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.1)
    steps(reference, optimizer, 3)
    for name, parameter in reference.named_parameters():
        for key, value in optimizer.state[parameter].items():
            torch.testing.assert_close(
                states[name][key].to(value.dtype), value, rtol=0, atol=1e-12, msg=f"{name} {key}"
            )
    steps(reference, optimizer, 3)

    def go_on(rank: int) -> None:
        model = fully_shard(make(8).double())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        model.load_state_dict(weights)
        load_optimizer_state(optimizer, {"state": states, "param_groups": groups})
        assert optimizer.param_groups[0]["lr"] == 0.1
        steps(model, optimizer, 3)
        with full_parameters(model):
            for (name, got), want in zip(model.named_parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=1e-10, msg=name)

    emulate(go_on, 2, "canonical")


def test_optimizer_states_that_do_not_fit() -> None:
    def on_rank(rank: int) -> None:
        model = fully_shard(make())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        steps(model, optimizer, 1)
        state = optimizer_state(optimizer)
        assert state["state"]["embed.weight"]["momentum_buffer"].global_shape == (7, 3)
        load_optimizer_state(optimizer, state)
        with pytest.raises(MismatchError, match="has 0 groups"):
            load_optimizer_state(optimizer, {"state": {}, "param_groups": []})
        with pytest.raises(MismatchError, match=r"other parameters than the optimizer: blocks"):
            load_optimizer_state(optimizer, {"state": {}, "param_groups": [{"params": ["embed.weight"]}]})
        wrong = {**state, "state": {"scale": {"momentum_buffer": torch.zeros(3)}}}
        with pytest.raises(MismatchError, match="momentum_buffer of scale"):
            load_optimizer_state(optimizer, wrong)
        with pytest.raises(MismatchError, match="not of a module that fully_shard sharded"):
            optimizer_state(torch.optim.SGD(make().parameters(), lr=0.1))

    emulate(on_rank, 2, "canonical")
