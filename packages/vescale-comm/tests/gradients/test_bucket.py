"""What users do with `param.grad`: they read, replace, zero and keep it, in hooks and between backwards.

The fake transport divides what is here as if the other ranks held zeros, so everything is half of one device's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_comm._gradients import GradientReducer
from vescale_comm._transport import FakeTransport
from vescale_comm.errors import CommError

X = torch.arange(15, dtype=torch.float32).view(5, 3) / 7
MODES = ["all_reduce", "reduce_scatter"]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))


def reducer_of(module: nn.Module, size: int = 2, **options: Any) -> GradientReducer:
    return GradientReducer(list(module.named_parameters()), transport=FakeTransport(size), **options)


def results(reducer: GradientReducer) -> dict[str, Tensor | None]:
    """Return what each parameter has got, from shards where there are any; of one rank these are all."""
    found: dict[str, Tensor | None] = {}
    for bucket in reducer.buckets:
        for member, slot, used in zip(bucket.members, bucket.plan.slots, bucket.used, strict=True):
            if bucket.scatter:
                found[member.name] = bucket.shard[slot.offset : slot.stop].view(slot.shape) if used else None
            else:
                found[member.name] = member.param.grad
    return found


@pytest.mark.parametrize("mode", MODES)
def test_sums_of_narrow_gradients_are_wide_wherever_they_are_kept(mode: Any) -> None:
    """256 + 1 is 256 in bfloat16; also where a result, or a gradient that the user has, occupies the buffer."""
    a = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    reducer = GradientReducer([("a", a)], transport=FakeTransport(1), accumulate=torch.float32, mode=mode, adds=True)
    held = []
    for step in range(3):
        with reducer.no_sync():
            (a * 256).sum().backward()
            for _ in range(7):
                a.sum().backward()
            if step == 1:
                held.append(a.grad)
                a.grad = a.grad.clone() if mode == "all_reduce" else torch.full_like(a, 263.0)  # 264, as is 264 + 1
        a.sum().backward()
        reducer.finish()
        assert results(reducer)["a"].tolist() == [264.0] * 2
        reducer.clear()
        a.grad = None
        if step == 0:  # the window after a result that stays
            a.sum().backward()
            reducer.finish()
            with reducer.no_sync():
                (a * 256).sum().backward()
                a.sum().backward()
                a.sum().backward()
            a.sum().backward()
            reducer.finish()
            assert results(reducer)["a"].tolist() == [260.0] * 2
            reducer.clear()
            a.grad = None
    assert held[0].tolist() == [263.0] * 2
    assert a.grad_dtype == torch.bfloat16


def double(param: Tensor) -> None:
    assert param.grad is not None
    param.grad = param.grad * 2


def zero(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.zero_()


def drop(param: Tensor) -> None:
    param.grad = None


def add(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.add_(1)


ACTIONS: list[Callable[[Tensor], None]] = [double, zero, drop, add]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("act", ACTIONS)
def test_hooks_may_change_gradients_that_are_not_reduced_yet(
    act: Callable[[Tensor], None], before: bool, mode: Any
) -> None:
    """Hooks that come before those of the reducer, or after; those after see None once a bucket is launched."""
    net, twin = model(), model()
    seen: list[list[Tensor | None]] = [[], []]
    active = True

    def watch(which: nn.Module, log: list[Tensor | None]) -> None:
        def hook(param: Tensor) -> None:
            if active:
                act(param)
                log.append(None if param.grad is None else param.grad.clone())

        for parameter in which.parameters():
            parameter.register_post_accumulate_grad_hook(hook)

    if before:
        watch(net, seen[0])
    reducer = reducer_of(net, 1, mode=mode, release=mode == "reduce_scatter")
    if not before:
        watch(net, seen[0])
    watch(twin, seen[1])
    for _ in range(2):
        for one in (net, twin):
            active = True
            with reducer.no_sync():
                for part in (X[:2], X[2:4]):
                    one(part).sum().backward()
            active = False
            one(X[4:]).sum().backward()
        reducer.finish()
        for a, b in zip(*seen, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
        want = {name: param.grad for name, param in twin.named_parameters()}
        for name, got in results(reducer).items():
            assert torch.allclose(got, want[name], atol=1e-6), name
        reducer.clear()
        for one in (net, twin):
            one.zero_grad()


def keep_same(grad: Tensor) -> Tensor:
    return grad


def keep_view(grad: Tensor) -> Tensor:
    return grad.view(-1)


def keep_detached(grad: Tensor) -> Tensor:
    return grad.detach()


@pytest.mark.parametrize("keep", [keep_same, keep_view, keep_detached])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_bytes": 1},
        {"view": True},
        {"accumulate": torch.float64},
        {"divisor": 1},
        {"mode": "reduce_scatter"},
        {"mode": "reduce_scatter", "release": True, "bucket_bytes": 1},
    ],
    ids=str,
)
def test_who_keeps_a_gradient_keeps_its_numbers(options: dict[str, Any], keep: Callable[[Tensor], Tensor]) -> None:
    """As where each backward makes new gradients: those of before stay, reduced or not."""
    net, twin = model(), model()
    reducer = reducer_of(net, 1, **options)
    kept: list[tuple[Tensor, Tensor]] = []

    def gather(copied: bool) -> None:
        for a, b in zip(net.parameters(), twin.parameters(), strict=True):
            if a.grad is not None and b.grad is not None:
                kept.append((keep(a.grad), b.grad.clone()))
                if not copied:
                    kept[-1] = (kept[-1][0].clone(), kept[-1][1])

    for step in range(4):
        for part in (X[:2], X[2:4]):
            for one in (net, twin):
                one.zero_grad()
            with reducer.no_sync():
                net(part * (step + 1)).sum().backward()
            twin(part * (step + 1)).sum().backward()
            gather(copied=step != 2)
        for one in (net, twin):
            one.zero_grad()
            one(X * (step + 2)).sum().backward()
        reducer.finish()
        gather(copied=True)
        want = {name: param.grad for name, param in twin.named_parameters()}
        for name, got in results(reducer).items():
            assert torch.allclose(got, want[name], atol=1e-6), (step, name)
        reducer.clear()
        for got, expected in kept:
            assert torch.allclose(got.flatten(), expected.to(got.dtype).flatten(), atol=1e-6), step
    assert len(kept) >= 32


@pytest.mark.parametrize("options", [{}, {"accumulate": torch.float64}, {"divisor": 1}], ids=str)
def test_gradients_that_are_zeroed_in_place_stay_the_same_tensors(options: dict[str, Any]) -> None:
    """Whoever has a list of them sees each result there, as with one device."""
    net, twin = model(), model()
    reducer = reducer_of(net, 1, wait=True, **options)
    net(X).sum().backward()
    lists = [param.grad for param in net.parameters()], [param.grad.detach() for param in net.parameters()]
    for step in range(3):
        net.zero_grad(set_to_none=False)
        twin.zero_grad(set_to_none=False)
        for one in (net, twin):
            one(X * (step + 2)).sum().backward()
        for a, b, same, alias in zip(net.parameters(), twin.parameters(), *lists, strict=True):
            assert a.grad is same
            assert torch.allclose(alias, b.grad, atol=1e-6)
    assert reducer.idle


@pytest.mark.parametrize("mode", MODES)
def test_buffers_stay_where_nobody_keeps_anything(mode: Any) -> None:
    net = model()
    reducer = reducer_of(net, mode=mode, bucket_bytes=64, release=mode == "reduce_scatter")
    memory = [bucket.buffer for bucket in reducer.buckets]
    for step in range(4):
        net.zero_grad(set_to_none=step % 2 == 0)
        with reducer.no_sync():
            net(X).sum().backward()
        if step == 2:
            net.zero_grad()
        net(X).sum().backward()
        reducer.finish()
        reducer.clear()
    assert all(bucket.buffer is before for bucket, before in zip(reducer.buckets, memory, strict=True))
    # Somebody keeps one for a step: the bucket leaves that memory, once.
    with reducer.no_sync():
        net.zero_grad()
        net(X).sum().backward()
    kept = net[0].bias.grad
    assert kept is not None
    for _ in range(3):
        net.zero_grad()
        net(X).sum().backward()
        reducer.finish()
        reducer.clear()
    moved = [bucket.buffer is not before for bucket, before in zip(reducer.buckets, memory, strict=True)]
    assert moved == [False, False, True]


class Fails(torch.autograd.Function):
    fails = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        if Fails.fails:
            raise ArithmeticError("no gradient today")
        return grads[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("zeroed", ["before", "after", "never"])
def test_a_backward_that_fails_after_some_gradients_came(zeroed: str, mode: Any) -> None:
    """Some buckets are launched, some have a part of their gradients: all are dropped, and the next step is right."""
    net, twin = model(), model()
    released = {"release": True} if mode == "reduce_scatter" else {}
    reducer = reducer_of(net, 1, mode=mode, bucket_bytes=64, wait=mode == "all_reduce", **released)

    def forward(one: nn.Sequential) -> Tensor:
        # The weight of the first layer comes after the failure, its bias before: they share a bucket.
        weight = Fails.apply(one[0].weight)
        return one[2](torch.tanh(X @ weight.t() + one[0].bias)).sum()

    for one in (net, twin):
        forward(one).backward()
        one.zero_grad()
    reducer.finish()
    reducer.clear()
    for _ in range(2):
        reducer.prepare()
        loss = forward(net)
        Fails.fails = True
        with pytest.raises(ArithmeticError, match="no gradient today"):
            loss.backward()
        Fails.fails = False
        assert [bucket.launched for bucket in reducer.buckets] == [True, True, False]
        assert net[0].bias.grad is not None
        if zeroed == "before":
            net.zero_grad()
        reducer.prepare()
        assert all(param.grad is None for param in net.parameters())
        if zeroed == "after":
            net.zero_grad()
        forward(net).backward()
        reducer.finish()
        twin.zero_grad()
        forward(twin).backward()
        want = {name: param.grad for name, param in twin.named_parameters()}
        for name, got in results(reducer).items():
            assert torch.allclose(got, want[name], atol=1e-6), name
        reducer.clear()
        net.zero_grad()


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_that_is_used_twice_and_a_weight_that_is_used_twice(mode: Any) -> None:
    net = model()
    shared = nn.Sequential(*net, nn.Tanh(), net[2])
    twin = copy.deepcopy(shared)
    reducer = reducer_of(shared, 1, mode=mode, wait=mode == "all_reduce", bucket_bytes=64, adds=mode != "all_reduce")
    for _ in range(2):
        for one in (shared, twin):
            one.zero_grad()
            loss = one(X).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
        reducer.finish()
        want = {name: param.grad for name, param in twin.named_parameters()}
        for name, got in results(reducer).items():
            assert torch.allclose(got, want[name], atol=1e-5), name
        reducer.clear()


class Interrupted(FakeTransport):
    """Lets the wait for some sum be interrupted, once."""

    left = 1

    def all_reduce(self, buffer: Tensor, **options: Any) -> Any:
        """Divide; see `Transport`."""
        work = super().all_reduce(buffer, **options)
        outer = self

        class Work:
            def wait(self) -> None:
                if outer.left:
                    outer.left -= 1
                    raise KeyboardInterrupt
                work.wait()

        return Work()


def test_an_interrupted_wait_is_not_taken_for_a_result() -> None:
    net = model()
    reducer = GradientReducer(list(net.named_parameters()), transport=Interrupted(2), wait=True)
    with pytest.raises(KeyboardInterrupt):
        net(X).sum().backward()
    assert all(param.grad is None for param in net.parameters())
    for _ in range(2):
        with pytest.raises(CommError, match=r"interrupted here by KeyboardInterrupt, and is lost.*Load a checkpoint"):
            net(X).sum().backward()
        with pytest.raises(CommError, match="is lost"):
            reducer.prepare()
    reducer.close()
    net.zero_grad()
    again = reducer_of(net, wait=True)
    net(X).sum().backward()
    assert net[2].bias.grad.tolist() == [2.5] * 4
    assert again.idle


def test_16_bits_are_summed_in_float32_and_divided_before_they_are_rounded() -> None:
    """70000 is more than float16 can hold, 35000 is not."""
    for canonical in (True, False):
        transport = FakeTransport(2)
        transport.canonical = canonical
        summed: list[Any] = []
        reduce = transport.all_reduce

        def watch(buffer: Tensor, reduce: Any = reduce, summed: list[Any] = summed, **options: Any) -> Any:
            summed.append((options["accumulate"], options["divisor"]))
            return reduce(buffer, **options)

        transport.all_reduce = watch  # type: ignore[method-assign]
        a = nn.Parameter(torch.ones(2, dtype=torch.float16))
        GradientReducer([("a", a)], transport=transport, wait=True)
        (a * 60000).sum().backward()
        assert a.grad.tolist() == [30000, 30000]
        assert summed == [(torch.float32, 2) if canonical else (None, 1)]
