"""The state in terms of whole parameters: it goes into other numbers of ranks, other plans, and to and from torch."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_comm._optimizer.optimizer import DistributedOptimizer
from vescale_comm._plugin import vescale_layout
from vescale_comm._shards import ShardTensor
from vescale_comm.errors import MismatchError


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 2)).double()


def data(steps: int) -> Tensor:
    return torch.randn(steps, 6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Tensor, rank: int = 0, world: int = 1) -> None:
    for x in batches:
        optimizer.zero_grad()
        model(x[rank::world]).square().mean().backward()
        optimizer.step()
    if isinstance(optimizer, DistributedOptimizer):
        optimizer.finish_param_sync()


def slices(box: Any) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))


def save(optimizer: DistributedOptimizer) -> dict[str, Any]:
    """Do what a checkpoint does: write the boxes of every rank, as the hook tells them, into whole tensors."""
    own = optimizer.state_dict()
    told: list[tuple[str, str, Any]] = []
    for name, values in own["state"].items():
        for key, value in values.items():
            layout = vescale_layout(value) if isinstance(value, Tensor) else None
            told.append((name, key, value if layout is None else (layout.global_shape, layout.boxes, layout.local)))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, told)
    state: dict[str, dict[str, Any]] = {}
    filled: dict[tuple[str, str], int] = {}
    for name, key, value in (one for rank in everyone for one in rank):
        values = state.setdefault(name, {})
        if not isinstance(value, tuple):
            assert key not in values or torch.equal(values[key], value)
            values[key] = value
            continue
        shape, boxes, local = value
        whole = values.setdefault(key, torch.full(shape, torch.nan, dtype=local.dtype))
        begin = 0
        for box in boxes:
            count = torch.Size(box.shape).numel()
            whole[slices(box)] = local[begin : begin + count].view(box.shape)
            begin += count
            filled[name, key] = filled.get((name, key), 0) + count
    for (name, key), count in filled.items():
        assert count == state[name][key].numel()  # every element once
        assert not state[name][key].isnan().any()
    return {"state": state, "param_groups": own["param_groups"]}


def load(optimizer: DistributedOptimizer, saved: dict[str, Any]) -> None:
    """Do what a checkpoint does: fill what the state has, allocate the rest, and hand it over."""
    state = optimizer.state_dict()["state"]
    for name, values in saved["state"].items():
        for key, whole in values.items():
            target = state.setdefault(name, {}).get(key)
            if target is None:
                target = optimizer.allocate_state(("state", name, key), tuple(whole.shape), whole.dtype)
                if target is not None:
                    state[name][key] = target
            layout = None if target is None else vescale_layout(target)
            if layout is None:
                state[name][key] = whole.clone()
                continue
            begin = 0
            for box in layout.boxes:
                count = torch.Size(box.shape).numel()
                layout.local[begin : begin + count].view(box.shape).copy_(whole[slices(box)])
                begin += count
            assert begin == layout.local.numel()
    optimizer.load_state_dict({"state": state, "param_groups": saved["param_groups"]})


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda named: torch.optim.AdamW(named, lr=0.02, amsgrad=True),
    lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
]


def sharded(model: nn.Module, number: int, group: Any = None, **options: Any) -> DistributedOptimizer:
    cls, arguments = [
        (torch.optim.AdamW, {"lr": 0.02, "amsgrad": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    ][number]
    return DistributedOptimizer(model, cls, group_or_mesh=group, bucket_mb=1e-4, **options, **arguments)


@pytest.mark.ranks(3)
def test_a_state_goes_into_other_numbers_of_ranks_and_plans(rank: int, world: int) -> None:
    pair = dist.new_group([0, 1])
    for number in range(2):
        reference = net()
        alone = OPTIMIZERS[number](reference.named_parameters())
        train(reference, alone, data(4))
        model = net()
        optimizer = sharded(model, number)
        train(model, optimizer, data(4), rank, world)
        saved = save(optimizer)
        weights = model.state_dict()
        full = optimizer.full_state_dict()
        for index, name in enumerate(dict(model.named_parameters())):
            for key, value in alone.state_dict()["state"][index].items():
                torch.testing.assert_close(saved["state"][name][key], value, rtol=1e-10, atol=1e-12)
                assert torch.equal(full["state"][name][key], saved["state"][name][key])
        # Six rows do for two ranks and three.
        train(reference, alone, data(7)[4:])
        if rank < 2:
            for plan, state in [("flat", saved), ("whole", saved), ("flat", full)]:
                other = net()
                other.load_state_dict(weights)
                resumed = sharded(other, number, pair, plan=plan)
                if state is saved:
                    load(resumed, state)
                else:
                    resumed.load_state_dict(state)
                train(other, resumed, data(7)[4:], rank, 2)
                for a, b in zip(other.parameters(), reference.parameters(), strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.ranks(2)
def test_states_are_exchanged_with_optimizers_of_torch(rank: int, world: int) -> None:
    reference, model = net(), net()
    alone = torch.optim.AdamW(reference.parameters(), lr=0.02)
    train(reference, alone, data(3))
    model.load_state_dict(reference.state_dict())
    optimizer = DistributedOptimizer(model, torch.optim.AdamW, lr=1.0)
    optimizer.load_state_dict(alone.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.02
    train(reference, alone, data(3))
    train(model, optimizer, data(3), rank, world)
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    # On one rank, a state also goes through a pickle, and a load in place changes nothing.
    before = optimizer.full_state_dict()
    optimizer.load_state_dict(optimizer.state_dict())
    state = optimizer.state_dict()
    state["param_groups"][0]["params"].reverse()  # names count, not places
    optimizer.load_state_dict(state)
    optimizer.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    after = optimizer.full_state_dict()
    for name, values in before["state"].items():
        for key, value in values.items():
            assert torch.equal(value, after["state"][name][key])


@pytest.mark.ranks(2)
def test_states_of_tensors_that_differ_in_numbers_are_kept_apart(rank: int, world: int) -> None:
    model = net()
    optimizer = DistributedOptimizer(model, torch.optim.Adam, lr=0.01)
    train(model, optimizer, data(1), rank, world)
    state = optimizer.full_state_dict()
    state["state"]["0.weight"]["step"] = torch.tensor(5.0)
    del state["state"]["2.bias"]
    optimizer.load_state_dict(state)
    train(model, optimizer, data(1), rank, world)
    steps = {name: float(values["step"]) for name, values in optimizer.full_state_dict()["state"].items()}
    assert steps == {"0.weight": 6, "0.bias": 2, "1.weight": 2, "1.bias": 2, "2.weight": 2, "2.bias": 1}


@pytest.mark.ranks(2)
def test_states_that_do_not_fit_are_refused(rank: int, world: int) -> None:
    model = net()
    optimizer = DistributedOptimizer(model, torch.optim.Adam, lr=0.01)
    train(model, optimizer, data(1), rank, world)
    good = optimizer.state_dict()
    assert all(type(values["exp_avg"]) is ShardTensor for values in good["state"].values())
    assert optimizer.allocate_state(("state", "0.weight", "exp_avg"), (2, 2), torch.float64) is None
    assert optimizer.allocate_state(("state", "0.weight", "step"), (), torch.float32) is None

    def refused(text: str, **changes: Any) -> None:
        with pytest.raises(MismatchError, match=text):
            optimizer.load_state_dict({**good, **changes})

    (group,) = good["param_groups"]
    refused("has 0 parameter groups", param_groups=[])
    refused("group 0 has 5 parameters", param_groups=[{**group, "params": group["params"][:-1]}])
    refused(r"other parameters: 2\.bias, x", param_groups=[{**group, "params": [*group["params"][:-1], "x"]}])
    state = {name: dict(values) for name, values in good["state"].items()}
    state["0.weight"]["exp_avg"] = torch.zeros(2, 2)
    refused(r"exp_avg of 0\.weight has shape \[2, 2\]", state=state)
    state["0.weight"]["exp_avg"] = good["state"]["1.weight"]["exp_avg"]
    refused(r"exp_avg of 0\.weight holds .* of a tensor of \[4, 5\]", state=state)
