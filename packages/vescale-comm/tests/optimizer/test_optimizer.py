"""What a sharded optimizer does at the edges: accumulation, unused parameters, changes from outside, errors."""

import contextlib
import copy
import gc
import re
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_comm._fsdp import fully_shard
from vescale_comm._optimizer.optimizer import DistributedOptimizer
from vescale_comm._replicate import DistributedDataParallel, replicate
from vescale_comm.errors import CommError, MismatchError, PlanError, TransportError


def net(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 2)).to(dtype)


def data(steps: int, world: int) -> Tensor:
    return torch.randn(steps, world * 2, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def mine(x: Tensor, rank: int) -> Tensor:
    return x[2 * rank : 2 * rank + 2]


def assert_same(model: nn.Module, reference: nn.Module) -> None:
    for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.ranks(2)
def test_micro_batches_add_up_with_and_without_no_sync(rank: int, world: int) -> None:
    for zero in (1, 2):
        model, reference = net(), net()
        optimizer = DistributedOptimizer(model, torch.optim.AdamW, zero=zero, lr=0.01, bucket_mb=1e-4)
        alone = torch.optim.AdamW(reference.parameters(), lr=0.01)
        for step, x in enumerate(data(6, world)):
            for parts in range(3):
                loss = model(mine(x, rank) + parts).square().mean()
                if parts < 2 and step % 2:
                    with optimizer.no_sync():
                        loss.backward()
                else:
                    loss.backward()
                reference(x + parts).square().mean().backward()
            optimizer.clip_grad_norm_(0.5)
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            optimizer.step()
            alone.step()
            optimizer.zero_grad()
            alone.zero_grad()
        optimizer.finish_param_sync()
        assert_same(model, reference)
        # What was dropped does not count.
        model(mine(x, rank)).sum().backward()
        optimizer.zero_grad()
        model(mine(x, rank)).square().mean().backward()
        reference(x).square().mean().backward()
        optimizer.step()
        alone.step()
        optimizer.finish_param_sync()
        assert_same(model, reference)


@pytest.mark.ranks(3)
def test_parameters_that_nobody_used_are_left_alone(rank: int, world: int) -> None:
    model, reference = net(), net()
    optimizer = DistributedOptimizer(model, torch.optim.Adam, lr=0.01, weight_decay=0.1)
    alone = torch.optim.Adam(reference.parameters(), lr=0.01, weight_decay=0.1)

    def run(which: nn.Sequential, x: Tensor, step: int) -> Tensor:
        # The middle layer takes part in every third step only, the last one on some ranks only.
        x = which[0](x)
        return which[1](x).square().mean() if step % 3 == 0 else x.square().mean()

    for step, x in enumerate(data(7, world)):
        optimizer.zero_grad()
        alone.zero_grad()
        loss = run(model, mine(x, rank), step)
        if step >= 4 and rank == 1:
            loss = loss + model[2](model[1](model[0](mine(x, rank)))).square().mean() * world
        loss.backward()
        expected = run(reference, x, step)
        if step >= 4:
            expected = expected + reference[2](reference[1](reference[0](mine(x, 1)))).square().mean()
        expected.backward()
        optimizer.step()
        alone.step()
    optimizer.finish_param_sync()
    assert_same(model, reference)
    steps = {name: values["step"].item() for name, values in optimizer.state_dict()["state"].items() if values}
    assert steps["0.weight"] == 7
    assert steps["1.bias"] == len({0, 3, 6} | {4, 5, 6})
    assert steps["2.weight"] == 3


@pytest.mark.ranks(2)
def test_a_model_in_bfloat16_is_updated_in_single_precision(rank: int, world: int) -> None:
    model = net(dtype=torch.bfloat16)
    wide = copy.deepcopy(model).float()
    optimizer = DistributedOptimizer(model, torch.optim.SGD, lr=1e-3, main_dtype=torch.float32)
    for step, x in enumerate(data(8, world).to(torch.bfloat16)):
        optimizer.zero_grad()
        model(mine(x, rank)).square().mean().backward()
        # The same sum by hand: gradients of all ranks in single precision, updates in single precision.
        grads = []
        narrow = [p.detach().to(torch.bfloat16).requires_grad_() for p in wide.parameters()]
        for other in range(world):
            out = torch.func.functional_call(
                copy.deepcopy(model), dict(zip(dict(model.named_parameters()), narrow, strict=True)), mine(x, other)
            )
            grads.append(torch.autograd.grad(out.square().mean(), narrow))
        for parameter, *parts in zip(wide.parameters(), *grads, strict=True):
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part.float()
            with torch.no_grad():
                parameter.sub_(total / world, alpha=1e-3)
        optimizer.step()
        optimizer.finish_param_sync()
        for a, b in zip(model.parameters(), wide.parameters(), strict=True):
            assert torch.equal(a, b.to(torch.bfloat16)), step
    main = optimizer.full_state_dict()["state"]
    for name, parameter in wide.named_parameters():
        assert torch.equal(main[name]["main"], parameter.detach())
    # Values that the user writes count, also against the main copy; others keep their bits.
    before = main["1.weight"]["main"]
    with torch.no_grad():
        model[0].weight.fill_(0.25)
    optimizer.zero_grad()
    model(mine(x, rank)).square().mean().backward()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    after = optimizer.full_state_dict()["state"]
    assert torch.equal(after["0.weight"]["main"], torch.full((5, 3), 0.25))
    assert torch.equal(after["1.weight"]["main"], before)


@pytest.mark.ranks(2)
def test_stage_two_has_the_memory_of_few_gradients(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8))).double()
    reference = copy.deepcopy(model)
    optimizer = DistributedOptimizer(
        model, torch.optim.SGD, zero=2, lr=0.1, bucket_mb=1e-3, transport="p2p", main_dtype=torch.float64
    )
    buckets = optimizer._buckets.reducer.buckets
    assert len(buckets) == 8

    def bytes_held() -> int:
        return sum(bucket.buffer.untyped_storage().nbytes() for bucket in buckets)

    seen: list[int] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append(bytes_held()))
    one = 16 * 16 * 8
    x = torch.randn(world * 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        assert bytes_held() == 0
        model(mine(x, rank)).square().mean().backward()
        assert max(seen) <= 3 * one
        optimizer.finish_grad_sync()
        assert bytes_held() == 0
        assert all(parameter.grad is None for parameter in model.parameters())
        assert sum(bucket.shard.untyped_storage().nbytes() for bucket in buckets) == 8 * one // world
        optimizer.step()
        reference.zero_grad()
        reference(x).square().mean().backward()
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
    optimizer.finish_param_sync()
    assert_same(model, reference)


@pytest.mark.ranks(2)
def test_schedulers_closures_and_hooks_work(rank: int, world: int) -> None:
    model, reference = net(), net()
    optimizer = DistributedOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    alone = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=8) for o in (optimizer, alone)]
    called: list[str] = []
    optimizer.register_step_post_hook(lambda *_: called.append("post"))
    for x in data(5, world):

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = model(mine(x, rank)).square().mean()
            loss.backward()
            return loss

        assert optimizer.step(closure) > 0
        alone.zero_grad()
        reference(x).square().mean().backward()
        alone.step()
        for schedule in schedules:
            schedule.step()
        assert optimizer.param_groups[0]["lr"] == alone.param_groups[0]["lr"]
        assert optimizer.param_groups[0]["momentum"] == alone.param_groups[0]["momentum"]
    optimizer.finish_param_sync()
    assert_same(model, reference)
    assert called == ["post"] * 5


@pytest.mark.ranks(2)
def test_parameters_can_join_later(rank: int, world: int) -> None:
    model, reference = net(), net()
    for which in (model, reference):
        which[1].requires_grad_(False)
    optimizer = DistributedOptimizer(model, torch.optim.AdamW, lr=0.01)
    alone = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], lr=0.01)

    def steps(count: int) -> None:
        for x in data(count, world):
            optimizer.zero_grad()
            alone.zero_grad()
            model(mine(x, rank)).square().mean().backward()
            reference(x).square().mean().backward()
            optimizer.step()
            alone.step()
        optimizer.finish_param_sync()
        assert_same(model, reference)

    steps(3)
    for which in (model, reference):
        which[1].requires_grad_(True)
    with pytest.raises(CommError, match=r"1\.weight needed no gradient.*\n?.*add_param_group"):
        optimizer.step()
    optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.02})
    alone.add_param_group({"params": reference[1].parameters(), "lr": 0.02})
    steps(3)
    assert len(optimizer.param_groups) == 2


@pytest.mark.ranks(2)
def test_two_optimizers_share_a_model_and_a_group(rank: int, world: int) -> None:
    def split(which: nn.Sequential) -> tuple[list[Any], list[Any]]:
        named = list(which.named_parameters())
        return [n for n in named if n[1].ndim == 2], [n for n in named if n[1].ndim != 2]

    model, reference = net(), net()
    (matrices, rest), (lone_matrices, lone_rest) = split(model), split(reference)
    both = [
        DistributedOptimizer(matrices, torch.optim.Muon, model=model, lr=0.05, bucket_mb=1e-4),
        # A group may be empty, and others may come in any order.
        DistributedOptimizer([{"params": []}, {"params": rest[::-1]}], torch.optim.Adam, model=model, lr=0.01),
    ]
    alone = [torch.optim.Muon(lone_matrices, lr=0.05), torch.optim.Adam(lone_rest, lr=0.01)]
    for x in data(5, world):
        for optimizer in (*both, *alone):
            optimizer.zero_grad()
        model(mine(x, rank)).square().mean().backward()
        reference(x).square().mean().backward()
        for optimizer in (*both, *alone):
            optimizer.step()
    both[1].load_state_dict(both[1].state_dict())
    for optimizer in both:
        optimizer.finish_param_sync()
    assert_same(model, reference)


@pytest.mark.ranks(2)
def test_parameters_that_left_are_found(rank: int, world: int) -> None:
    x = mine(data(1, world)[0], rank)

    def step(change: Any) -> None:
        model = net()
        optimizer = DistributedOptimizer(model, torch.optim.SGD, lr=0.1)
        change(model)
        model.double()(x).square().mean().backward()
        optimizer.step()

    with pytest.raises(CommError, match=r"1\.bias has left the buffer"):
        step(lambda model: setattr(model[1].bias, "data", torch.zeros(4, dtype=torch.float64)))
    with pytest.raises(CommError, match=r"1\.weight was replaced"):
        step(lambda model: setattr(model[1], "weight", nn.Parameter(torch.ones(4, 5))))
    with pytest.raises(CommError, match=r"0\.weight was replaced"):
        step(lambda model: model.load_state_dict(net(1).state_dict(), assign=True))
    step(lambda model: model.load_state_dict(net(1).state_dict()))


@pytest.mark.ranks(2)
def test_ranks_with_other_parameters_are_named(rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4 + rank))
    with pytest.raises(MismatchError, match=r"1\.weight \[4, 5\].*rank 1 has 1\.weight \[5, 5\]"):
        DistributedOptimizer(model, torch.optim.SGD)


@pytest.mark.ranks(2)
def test_gradients_are_reduced_by_one_alone(rank: int, world: int) -> None:
    def refused(text: str, given: Any) -> None:
        with pytest.raises(ValueError, match=text):
            DistributedOptimizer(given, torch.optim.SGD)

    refused("DistributedDataParallel reduces gradients already", nn.parallel.DistributedDataParallel(net()))
    refused("DistributedDataParallel reduces gradients already", DistributedDataParallel(net()))
    refused("Sequential reduces gradients already", replicate(net()))
    refused(r"0\.weight: is a shard of fully_shard", fully_shard(net()))
    model = net()
    first = DistributedOptimizer(model, torch.optim.SGD)
    refused(r"0\.weight: another DistributedOptimizer", model)
    first.close()
    # One that is dropped lets go of the model as well.
    hooks = [len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters()]
    second = DistributedOptimizer(model, torch.optim.SGD)
    model(mine(data(1, world)[0], rank)).sum().backward()
    second.step()
    del second
    gc.collect()
    assert hooks == [len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters()]
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not any(type(module._parameters) is not dict for module in model.modules())


@pytest.mark.ranks(2)
def test_an_optimizer_that_is_not_elementwise_is_found(rank: int, world: int) -> None:
    class Factored(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["mean"] = parameter.grad.mean().repeat(3)

    model = net()
    optimizer = DistributedOptimizer(model, Factored, plan="flat")
    model(mine(data(1, world)[0], rank)).sum().backward()
    with pytest.raises(CommError, match=r"Factored keeps mean of shape \[3\].*whole"):
        optimizer.step()
    with pytest.raises(PlanError, match="Muon looks at whole matrices"):
        DistributedOptimizer([net()[0].weight], torch.optim.Muon, plan="flat")
    for text, options in {
        "zero: expected 1 or 2": {"zero": 3},
        "bucket_mb: expected": {"bucket_mb": 0},
        "model is not": {"model": net()},
    }.items():
        with pytest.raises(ValueError, match=re.escape(text) if "model" not in text else "model: params_or_model"):
            DistributedOptimizer(net(), torch.optim.SGD, **options)
    with pytest.raises(TypeError, match="optimizer_cls: expected"):
        DistributedOptimizer(net(), nn.Linear)  # type: ignore[arg-type]


@pytest.mark.ranks(2)
def test_values_that_do_not_come_are_named(rank: int, world: int) -> None:
    group = dist.new_group()
    model = net()
    optimizer = DistributedOptimizer(model, torch.optim.SGD, group_or_mesh=group, transport="p2p", lr=0.1)
    model(mine(data(1, world)[0], rank)).sum().backward()
    optimizer.finish_grad_sync()
    if rank == 1:  # it closes the connections of the group
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1)], 0, 7).wait(timedelta(milliseconds=1))
    else:
        text = r"new values of 0\.weight \.\.\. 2\.bias \(6\) were gathered: .*rank 1"
        with pytest.raises(TransportError, match=text):  # noqa: PT012
            optimizer.step()
            optimizer.finish_param_sync()
    dist.barrier()
